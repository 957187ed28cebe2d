"""Promises: what was asked, and its answer once there is one. A client asks for it until it comes."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

PROTO, JSON = "application/x-protobuf", "application/json"
KEPT = 600.0  # seconds that an answer which was fetched stays, for a client that lost it on the way
MOST_KEPT = 2 * 2**30  # bytes of answers in memory; the oldest fetched ones go first


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
    """`owner`: the tenant that may ask for it. `fetched`: when it first was, by the clock."""

    id: str
    owner: str
    answer: Answer | None = None
    fetched: float | None = None
    task: "asyncio.Task[None] | None" = None  # what computes it, where it can be cancelled
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, answer: Answer) -> None:
        if self.answer is None:
            self.answer = answer
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

    def make(self, id: str, owner: str) -> Promise:
        """A new one, or the one that has that name."""
        self.sweep()
        return self.by_id.setdefault(id, Promise(id, owner))

    def find(self, id: str, owner: str) -> Promise | None:
        """Of this owner only: another's is as if it were not there."""
        promise = self.by_id.get(id)
        return promise if promise is not None and promise.owner == owner else None

    def sweep(self) -> None:
        """Forget what was fetched long ago, and more of it where too much is kept."""
        now = time.monotonic()
        fetched = [p for p in self.by_id.values() if p.fetched is not None]
        size = sum(len(p.answer.body) for p in fetched if p.answer)
        for promise in fetched:
            if now - (promise.fetched or now) > KEPT or size > MOST_KEPT:
                size -= len(promise.answer.body) if promise.answer else 0
                del self.by_id[promise.id]
