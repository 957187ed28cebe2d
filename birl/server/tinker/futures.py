"""Futures (`Promise`): requests and their answers, which a client polls."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

PROTO, JSON = "application/x-protobuf", "application/json"
KEPT = 600.0  # time that a fetched answer is kept, for a client that lost it on the way [s]
LEFT = 3600.0  # time that an unfetched answer is kept [s]
SWEEP = 1.0  # interval of sweeps for such answers [s]
MOST_KEPT = 2 * 2**30  # maximum bytes of answers in memory


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer. `failed`: an error that ends the request, with its category, user | server."""

    body: bytes
    media_type: str = JSON
    failed: bool = False

    @classmethod
    def of(cls, **values: Any) -> "Answer":
        return cls(json.dumps(values).encode())

    @classmethod
    def failure(cls, message: str, category: str = "user") -> "Answer":
        return cls(json.dumps({"error": message, "category": category}).encode(), failed=True)


@dataclass(slots=True, eq=False)
class Promise:
    """A future. `owner`: the tenant that may fetch it. `fetched`: time of the first fetch, `settled`: time of the
    answer (monotonic). `brief`: dropped even if it is not fetched; a run's answers are kept for their client, as long
    as there is room."""

    id: str
    owner: str
    brief: bool = False
    answer: Answer | None = None
    made: float = field(default_factory=time.monotonic)
    settled: float = 0.0
    fetched: float | None = None
    task: "asyncio.Task[None] | None" = None  # computes the answer, if it can be cancelled
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        """Bytes of the answer."""
        return len(self.answer.body) if self.answer else 0

    def settle(self, answer: Answer) -> None:
        if self.answer is None:
            self.answer, self.settled = answer, time.monotonic()
            self.done.set()

    async def wait(self, seconds: float) -> Answer | None:
        """The answer, or None after the timeout."""
        try:
            await asyncio.wait_for(self.done.wait(), seconds)
        except TimeoutError:
            return None
        return self.answer


@dataclass(slots=True)
class Promises:
    by_id: dict[str, Promise] = field(default_factory=dict)
    swept: float = 0.0

    def make(self, id: str, owner: str, brief: bool = False) -> Promise:
        """A new future, or the existing one of this id."""
        if time.monotonic() > self.swept + SWEEP:
            self.sweep()
        return self.by_id.setdefault(id, Promise(id, owner, brief))

    def failed(self, id: str, owner: str, error: Exception) -> Promise:
        """A future whose answer is this error of the client."""
        promise = self.make(id, owner, brief=True)
        promise.settle(Answer.failure(str(error)))
        return promise

    def find(self, id: str, owner: str) -> Promise | None:
        """The future of this owner; None if there is none, or it is another owner's."""
        promise = self.by_id.get(id)
        return promise if promise is not None and promise.owner == owner else None

    def abandon(self, session: str, until: float) -> None:
        """Cancel a session's requests made before `until`. A client that is still alive sends them again."""
        for promise in list(self.by_id.values()):
            own = promise.id.partition(":")[0] == session and promise.made <= until
            if promise.task is not None and promise.answer is None and own:
                promise.task.cancel()
                self._drop(promise)

    def sweep(self) -> None:
        """Drop futures fetched or answered long ago and, above the limit, more of the owner with most bytes: those
        fetched first come first, a run's unfetched ones last."""
        self.swept = now = time.monotonic()
        owners = dict[str, list[Promise]]()
        for promise in [p for p in list(self.by_id.values()) if p.answer]:
            lost = promise.brief and promise.fetched is None and now > promise.settled + LEFT
            if lost or (promise.fetched is not None and now > promise.fetched + KEPT):
                self._drop(promise)
            else:
                owners.setdefault(promise.owner, []).append(promise)
        sizes = {owner: sum(p.size for p in own) for owner, own in owners.items()}
        over = sum(sizes.values()) - MOST_KEPT
        if over > 0:
            for own in owners.values():
                own.sort(key=lambda p: (p.fetched is not None, p.brief, -p.settled))
        while over > 0:
            owner = max(sizes, key=sizes.__getitem__)
            promise = owners[owner].pop()
            over, sizes[owner] = over - promise.size, sizes[owner] - promise.size
            self._drop(promise)

    def _drop(self, promise: Promise) -> None:
        """Drop an answer; its run still knows that the request was done."""
        del self.by_id[promise.id]
        promise.answer = None
