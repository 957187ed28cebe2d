"""Who decodes next. Pure Python: no tensors, no time, no threads, so that it can be tested with numbers alone.

Running requests sit in slots 0..B-1 of the KV cache without holes. The cache is a rectangle, slots x longest sequence,
so a batch fits when B * longest <= capacity. Requests are admitted in order of arrival at the length they have; when
the longest grows until the rectangle is full, the youngest is preempted: it goes back to the head of the queue with
what it has sampled, and is computed again later, with the same result.
"""

from collections import deque
from dataclasses import dataclass, field

from birl.engine.request import Request
from birl.errors import BirlError
from birl.types import Stop

HEADROOM = 32  # tokens of growth that must be free before a request is admitted, so that it is not preempted at once


@dataclass(slots=True)
class Scheduler:
    """`max_batch` slots; `capacity` = slots * tokens that the KV cache may hold."""

    max_batch: int
    capacity: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """Raises `BirlError` when the request could not run even alone."""
        need = len(request.prompt) + request.max_tokens
        if need > self.capacity:
            raise BirlError(
                f"The KV cache holds {self.capacity} tokens, but one sequence may need {need} ({len(request.prompt)} "
                "of prompt and "
                f"{request.max_tokens} of answer). Raise engine.kv_cache_gb or lower rollout.max_tokens."
            )
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> list[Request]:
        """Move waiting requests into slots, first come first served; returns those whose prompt must be computed
        now."""
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            longest = max(len(r) for r in (*self.running, request)) + (HEADROOM if self.running else 1)
            if (len(self.running) + 1) * longest > self.capacity:
                break
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def preempt(self) -> list[Request]:
        """Make room for one more token for everybody. Returns who lost the slot (always the youngest, so the rest stays
        put)."""
        lost: list[Request] = []
        while len(self.running) > 1 and len(self.running) * (max(map(len, self.running)) + 1) > self.capacity:
            lost.append(self.running.pop())
            self.waiting.appendleft(lost[-1])
        return lost

    def retire(self) -> tuple[list[Request], list[tuple[int, int]]]:
        """Take out finished and aborted requests. Returns them, and the moves (from slot, to slot) that close the
        holes."""
        for request in [r for r in self.waiting if r.aborted]:
            self.waiting.remove(request)
        finished = [r for r in self.running if r.stop is not None or r.aborted]
        for request in finished:
            request.stop = Stop.ABORT if request.aborted else request.stop
        count = len(self.running) - len(finished)
        holes = [i for i in range(count) if self.running[i].stop is not None]
        movers = [i for i in range(count, len(self.running)) if self.running[i].stop is None]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[count:]
        return finished, moves
