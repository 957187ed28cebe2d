"""The least loaded engine of many, without looking at all of them."""

import heapq
from collections.abc import Collection
from itertools import count

from birl.engines.member import Member, State

SLACK = 1024  # places that do not hold any more and may stay, beside three for each engine


class Loads:
    """Engines by (requests in flight, requests sent): `put` one after each change of these, and when it gets ready. Its
    older places stay until they come up, or until there are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Member]] = []
        self._number = count()
        self._members: set[Member] = set()

    def put(self, member: Member) -> None:
        self._members.add(member)
        heapq.heappush(self._heap, (member.in_flight, member.sent, next(self._number), member))
        if len(self._heap) > 3 * len(self._members) + SLACK:
            self._members = {m for m in self._members if m.state is State.READY}  # others come back when they are ready
            self._heap = [(m.in_flight, m.sent, next(self._number), m) for m in self._members]
            heapq.heapify(self._heap)

    def least(self, now: float, avoid: Collection[Member] = ()) -> Member | None:
        """One that is free, rather none of `avoid`; None where none is."""
        aside: list[tuple[int, int, int, Member]] = []
        result: Member | None = None
        while self._heap and (result is None or result in avoid):
            entry = heapq.heappop(self._heap)
            in_flight, sent, _, member = entry
            if (in_flight, sent) != (member.in_flight, member.sent) or member.state is not State.READY:
                continue
            aside.append(entry)
            if member.free(now) and (result is None or member not in avoid):
                result = member
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return result
