"""Spans that overlap, laid out in rows in which none does: as a drawing needs them, and Chrome's trace format."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NESTED = ("loop", "calls")  # lanes whose spans lie beside or inside of each other: one row, or thread, for all of them
SLACK = 1e-5  # s; spans that follow one another may overlap by so much: clocks are read one after the other


def rows_of(start: Any, end: Any) -> NDArray[np.int64]:
    """The row of each span, from 0: the lowest that is free when it begins.

    Example: rows_of([0, 1, 2], [2, 3, 4]).tolist() == [0, 1, 0]
    """
    first, last = np.asarray(start, float), np.asarray(end, float)
    result = np.zeros(len(first), np.int64)
    free: list[int] = []
    used: list[tuple[float, int]] = []  # when each row that is taken gets free
    count = 0
    for i in np.argsort(first, kind="stable").tolist():
        while used and used[0][0] <= first[i]:
            heapq.heappush(free, heapq.heappop(used)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        result[i] = row
        heapq.heappush(used, (float(last[i]), row))
    return result


def nested(start: Any, end: Any) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Starts and ends of spans that lie beside or inside of each other, made to do so exactly, and how deep each lies:
    0 is inside of none. One that begins within `SLACK` of another's end comes after that.

    Example: nested([0, 1, 5], [4, 2, 6])[2].tolist() == [0, 1, 0]
    """
    first, last = np.array(start, float), np.array(end, float)
    depth = np.zeros(len(first), np.int64)
    open_until: list[float] = []
    for i in np.lexsort((-last, first)).tolist():
        while open_until and open_until[-1] <= first[i] + SLACK:
            first[i] = max(first[i], open_until.pop())
        if open_until:
            last[i] = min(last[i], open_until[-1])
        last[i] = max(last[i], first[i])
        depth[i] = len(open_until)
        open_until.append(float(last[i]))
    return first, last, depth


def lane_order(lanes: Sequence[str]) -> list[str]:
    """As they are shown from top to bottom."""
    order = ("loop", "calls", "compute", "requests", "weights", "admission", "groups", "environments", "rewards")
    return sorted(lanes, key=lambda lane: (order.index(lane) if lane in order else len(order), lane))
