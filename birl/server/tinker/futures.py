"""Promises: what was asked, and its answer once there is one. A client asks for it until it comes."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

PROTO, JSON = "application/x-protobuf", "application/json"
KEPT = 600.0  # seconds that an answer which was fetched stays, for a client that lost it on the way
LEFT = 3600.0  # seconds that an answer stays which is not fetched
SWEEP = 1.0  # seconds between two looks for such
MOST_KEPT = 2 * 2**30  # bytes of answers in memory


@dataclass(frozen=True, slots=True)
class Answer:
    """`failed`: an error that ends the request, with its category, user | server."""

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
    """`owner`: the tenant that may ask for it. `fetched`: when it first was, `settled`: when the answer came, by the
    clock. `brief`: one that is not fetched is forgotten, too; a run's requests wait for their client, while there is
    room."""

    id: str
    owner: str
    brief: bool = False
    answer: Answer | None = None
    made: float = field(default_factory=time.monotonic)
    settled: float = 0.0
    fetched: float | None = None
    task: "asyncio.Task[None] | None" = None  # what computes it, where it can be cancelled
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        """Bytes of its answer."""
        return len(self.answer.body) if self.answer else 0

    def settle(self, answer: Answer) -> None:
        if self.answer is None:
            self.answer, self.settled = answer, time.monotonic()
            self.done.set()

    async def wait(self, seconds: float) -> Answer | None:
        """The answer, or None where there is none within that time."""
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
        """A new one, or the one that has that name."""
        if time.monotonic() > self.swept + SWEEP:
            self.sweep()
        return self.by_id.setdefault(id, Promise(id, owner, brief))

    def find(self, id: str, owner: str) -> Promise | None:
        """Of this owner only: another's is as if it were not there."""
        promise = self.by_id.get(id)
        return promise if promise is not None and promise.owner == owner else None

    def abandon(self, session: str, until: float) -> None:
        """Compute no further what a session asked for up to that time. Where somebody is still there, it asks anew."""
        for promise in list(self.by_id.values()):
            own = promise.id.partition(":")[0] == session and promise.made <= until
            if promise.task is not None and promise.answer is None and own:
                promise.task.cancel()
                self._drop(promise)

    def sweep(self) -> None:
        """Forget what was fetched, or answered, long ago, and where too much is kept, more of the owner that has most:
        what was fetched first, what a run's client never fetched last."""
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
        """Its run still knows that it was, and not the answer."""
        del self.by_id[promise.id]
        promise.answer = None
