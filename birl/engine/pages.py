"""Which pages of the KV cache are free, and how many sequences use each of the others. Numbers only."""

import heapq
from dataclasses import dataclass, field

from birl.kernels import PAGE


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


@dataclass(slots=True)
class Pages:
    """`total` pages. The lowest free one is given first, so that memory which was never written stays untouched."""

    total: int
    free: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.total))  # sorted, so a heap
        self.users = [0] * self.total

    def take(self) -> int:
        page = heapq.heappop(self.free)
        self.users[page] = 1
        return page

    def share(self, page: int) -> int:
        self.users[page] += 1
        return page

    def release(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            heapq.heappush(self.free, page)
