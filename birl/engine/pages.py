"""Page allocator of the KV cache: free pages, reference counts, and prefix caching. Numbers only, no tensors.

A full page is identified by its tokens and the page before it, and so by every token up to its end: tokens are
compared, not hashes of them. It remains known after its last user has ended, until it is evicted: least recently used
first, and within a sequence the last page first. So the page before a known one is known too, and a page number
identifies one prefix.
"""

import heapq
from dataclasses import dataclass, field

from birl.kernels.tensors import PAGE

FIRST = -1  # stands for the page before the first

#: (page before, tokens of a page)
Key = tuple[int, tuple[int, ...]]


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


@dataclass(slots=True)
class Pages:
    """The allocator of `total` pages. The lowest free page is given first: memory never written stays untouched."""

    total: int
    free: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    known: dict[Key, int] = field(default_factory=dict)
    keys: dict[int, Key] = field(default_factory=dict)  # of each known page
    idle: dict[int, None] = field(default_factory=dict)  # known pages without users, least recently used first
    routes: dict[int, list[bytes]] = field(default_factory=dict)  # of known pages, if routes are recorded

    def __post_init__(self) -> None:
        self.free = list(range(self.total))  # sorted, so a heap
        self.users = [0] * self.total

    @property
    def room(self) -> int:
        """Number of pages that can be allocated."""
        return len(self.free) + len(self.idle)

    def take(self) -> int:
        if self.free:
            page = heapq.heappop(self.free)
        else:
            page = next(iter(self.idle))
            del self.idle[page], self.known[self.keys.pop(page)]
            self.routes.pop(page, None)
        self.users[page] = 1
        return page

    def share(self, page: int) -> int:
        self.idle.pop(page, None)
        self.users[page] += 1
        return page

    def release(self, page: int) -> None:
        """Drop one reference. Call for the last page of a sequence first."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if page in self.keys:
            self.idle[page] = None
        else:
            heapq.heappush(self.free, page)

    def keep(self, key: Key, page: int) -> int:
        """Make `page` the known page of these tokens unless there is one; returns the known page."""
        result = self.known.setdefault(key, page)
        if result == page:
            self.keys[page] = key
        return result

    def find(self, ids: tuple[int, ...], first: int = FIRST) -> list[int]:
        """The known pages that are a prefix of `ids`. `first`: stands for the page before them, one per adapter."""
        result: list[int] = []
        for end in range(PAGE, len(ids) + 1, PAGE):
            page = self.known.get((result[-1] if result else first, ids[end - PAGE : end]))
            if page is None:
                break
            result.append(page)
        return result

    def forget(self) -> None:
        """Forget all known pages."""
        for page in self.idle:
            heapq.heappush(self.free, page)
        for each in (self.known, self.keys, self.idle, self.routes):
            each.clear()


def sharing(tables: list[list[int]], lengths: list[int], most: int = 8) -> tuple[list[int], list[int]]:
    """Groups of neighbouring rows with common first pages, as (rows of each group, shared pages): of one sequence all
    rows up to a page's end, with that page; of several at most `most`, with full pages only."""
    groups: list[int] = []
    shared: list[int] = []
    first: list[int] = []
    for table, length in zip(tables, lengths, strict=True):
        if groups and table is first and pages_for(length) == shared[-1]:
            groups[-1] += 1
            continue
        if groups and groups[-1] < most:
            most_shared = min(shared[-1], length // PAGE)
            apart = () if table is first else range(most_shared)
            same = next((n for n in apart if first[n] != table[n]), most_shared)
            if same and (same == shared[-1] or groups[-1] == 1 or 2 * same > shared[-1]):
                groups[-1] += 1
                shared[-1] = same
                continue
        first = table
        groups.append(1)
        shared.append(pages_for(length))
    return groups, shared
