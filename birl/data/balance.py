"""Load balancing, sequences -> micro-batches of about equal cost within a bound on tokens: largest differencing of
groups, or runs of neighbours if groups have common prefixes.

Ranks compute their micro-batches in parallel: the i-th ones of all shares form a round, which lasts as long as its most
expensive one. Equal numbers of tokens are not equal costs: a token of a long sequence attends to more tokens.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np

from birl.data.trees import PrefixTrees

ENOUGH = 0.998  # share of a round's allowed cost from which on no further items are tried
NONE = np.zeros(1, dtype=bool)
BISECTIONS = 24  # of the allowed cost of a run
SAVED = 0.05  # smallest share of a step's cost in common prefixes of groups, for common trees


class Item(NamedTuple):
    """Samples that stay together, with their tokens and cost as trees."""

    samples: tuple[int, ...]  # indices
    size: int
    cost: float


def micro_batches(
    ids: Sequence[np.ndarray], groups: Sequence[int], max_tokens: int, parts: int, pair_cost: float
) -> list[list[list[int]]]:
    """Sequences [T], ordered by group -> for each micro-batch its sequences, in clusters that share trees. A group
    stays together unless it alone exceeds max_tokens."""
    numbered = groupby(range(len(ids)), key=groups.__getitem__)
    items = [item for _, group in numbered for item in pieces(list(group), ids, max_tokens, pair_cost)]
    costs = [item.cost for item in items]
    bins = balance([item.size for item in items], max_tokens, parts, costs)
    time = waited([sum(costs[i] for i in b) for b in bins], parts)
    if items and (joined := common_trees(items, ids, max_tokens, parts, pair_cost, time)):
        return [[sorted(n for i in b for n in items[i].samples)] if b else [] for b in joined]
    return [[sorted(items[i].samples) for i in sorted(b)] for b in bins]


def cost(tokens: int, pair_cost: float) -> float:
    """Cost of a sequence; a token without attention costs 1."""
    return tokens + pair_cost * tokens * (tokens + 1) / 2


def pieces(group: Sequence[int], ids: Sequence[np.ndarray], max_tokens: int, pair_cost: float) -> list[Item]:
    """Items of a group's samples, split between branches if they have more than max_tokens."""
    order = PrefixTrees([ids[i] for i in group]).order()
    sizes = [(len(ids[group[n]]), shared) for n, shared in order]
    alone = [(n, cost(n, pair_cost)) for n, _ in sizes]
    after = [(n - shared, cost(n, pair_cost) - cost(shared, pair_cost)) for n, shared in sizes]
    result = []
    for run in runs(alone, after, max_tokens):
        size, price = (a + sum(b) for a, *b in zip(alone[run[0]], *(after[i] for i in run[1:]), strict=True))
        result.append(Item(tuple(group[order[i][0]] for i in run), int(size), price))
    return result


def common_trees(
    items: Sequence[Item], ids: Sequence[np.ndarray], max_tokens: int, parts: int, pair_cost: float, time: float
) -> list[list[int]]:
    """Items in bins by common prefix, in the form of `balance`; empty if that takes no less than `time`."""
    order = PrefixTrees([ids[item.samples[0]] for item in items]).order()
    if sum(cost(shared, pair_cost) for _, shared in order) < SAVED * sum(item.cost for item in items):
        return []
    alone = [(items[i].size, items[i].cost) for i, _ in order]
    after = [(items[i].size - shared, items[i].cost - cost(shared, pair_cost)) for i, shared in order]
    cut = runs(alone, after, max_tokens, parts)
    prices = [sum([alone[run[0]][1], *(after[i][1] for i in run[1:])]) if run else 0.0 for run in cut]
    placed = [b[0] for b in in_rounds([[n] for n in range(len(cut))], prices, parts)]
    if waited([prices[n] for n in placed], parts) >= time:
        return []
    return [[order[i][0] for i in cut[n]] for n in placed]


def waited(costs: Sequence[float], parts: int) -> float:
    """Cost of all rounds: each costs as much as its most expensive bin."""
    return sum(max(costs[i : i + parts]) for i in range(0, len(costs), parts))


def balance(
    sizes: Sequence[int], capacity: int, parts: int = 1, costs: Sequence[float] | None = None
) -> list[list[int]]:
    """Item indices in bins: as few as possible, a multiple of `parts`, none with more than `capacity` tokens unless
    one item alone has more. Each `parts` bins in order have about equal cost, and so have the sums of each share.

    sizes: tokens; costs: None for `sizes`. The result is deterministic.
    """
    costs = sizes if costs is None else costs
    filled = first_fit(sizes, capacity)
    least = max(-(-sum(sizes) // capacity), sum(2 * size > capacity for size in sizes), 1)
    for count in dict.fromkeys(-(-n // parts) * parts for n in (least, max(len(filled), 1))):
        for by in (None, costs, sizes) if parts > 1 else (sizes,):
            bins = by_level(sizes, costs, capacity, count, parts) if by is None else largest_differencing(by, count)
            if all(sum(sizes[i] for i in items) <= capacity for items in bins):
                return in_rounds(bins, costs, parts)
    return in_rounds(_spread(filled, costs, -(-len(filled) // parts) * parts), costs, parts)


def by_level(sizes: Sequence[int], costs: Sequence[float], capacity: int, count: int, parts: int) -> list[list[int]]:
    """Bins of equal cost; but if one item costs more than the mean bin, its whole round may cost as much, so that the
    others of the round wait less. Such rounds are filled first, most expensive items first."""
    left = sorted(range(len(sizes)), key=lambda i: (-costs[i], i))
    total, bins, smallest = float(sum(costs)), [], min(sizes, default=0)
    while count - len(bins) > parts and left and (level := costs[left[0]]) > total / (count - len(bins)):
        load, room = np.zeros(parts), np.full(parts, capacity)
        filled: list[list[int]] = [[] for _ in range(parts)]
        later: list[int] = []
        gap, most = level, capacity  # of the emptiest bins
        for n, i in enumerate(left):
            if gap < (1 - ENOUGH) * level or most < smallest:
                later += left[n:]
                break
            fits = (load + costs[i] <= level) & (room >= sizes[i]) if costs[i] <= gap and sizes[i] <= most else NONE
            place = int(fits.argmax())
            if not fits[place]:
                later.append(i)
                continue
            filled[place].append(i)
            load[place] += costs[i]
            room[place] -= sizes[i]
            gap, most = level - load.min(), room.max()
        bins, left, total = bins + filled, later, total - float(load.sum())
    rest = largest_differencing([costs[i] for i in left], count - len(bins))
    return bins + [[left[place] for place in items] for items in rest]


def runs(
    alone: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]], capacity: int, parts: int = 1
) -> list[range]:
    """Runs of consecutive items, which share prefixes with their neighbours: as few as fit into `capacity` tokens, a
    multiple of `parts`, with the least cost of the most expensive one (the linear partition problem: bisection with
    greedily filled runs).

    alone, after: tokens and cost of each item, as the first of its run and after another one.
    """

    def filled(most: float) -> list[range]:
        result, start, size, cost = list[range](), 0, 0, 0.0
        for i in range(len(alone)):
            tokens, price = after[i]
            if i > start and (size + tokens > capacity or cost + price > most):
                result.append(range(start, i))
                start = i
            if i == start:
                size, cost = 0, 0.0
                tokens, price = alone[i]
            size, cost = size + tokens, cost + price
        return [*result, range(start, len(alone))]

    result = filled(inf)
    count = -(-len(result) // parts) * parts
    low, high = 0.0, sum(price for _, price in alone)
    for _ in range(BISECTIONS if count > 1 else 0):
        middle = (low + high) / 2
        tried = filled(middle)
        if len(tried) <= count:
            high, result = middle, tried
        else:
            low = middle
    return result + [range(0)] * (count - len(result))


def imbalance(costs: Sequence[float], parts: int) -> float:
    """(sum over rounds of the largest cost) x parts / total cost - 1: the time that shares wait for others, relative to
    the time they work. Never below (largest share / mean share) - 1."""
    total = sum(costs)
    return waited(costs, parts) * parts / total - 1 if total else 0.0


def largest_differencing(weights: Sequence[float], count: int) -> list[list[int]]:
    """Indices in `count` bins whose sums differ by little (Karmarkar and Karp 1982, in its k-way form: Korf 2009,
    section 2.3): take the two partial solutions whose sums differ most, and join the largest bin of each with the
    smallest of the other."""
    nodes: list[tuple[int, int]] = []  # number - items: the two that were joined
    items = len(weights)

    def joined(a: int, b: int) -> int:
        nodes.append((a, b))
        return items + len(nodes) - 1

    def whole(number: int) -> tuple[np.ndarray, np.ndarray]:
        sums, parts = np.zeros(count), np.full(count, -1, dtype=np.int64)
        sums[-1], parts[-1] = weights[number], number
        return sums, parts

    # (-spread, age, sums in rising order above the smallest, what each consists of; -1: nothing). One item alone, whose
    # age is its number, has no arrays yet: all of them together would be large.
    heap: list[Any] = [(-float(weights[i]), i, None, None) for i in range(items)]
    heapify(heap)
    for age in range(items, 2 * items - 1):
        first, second = heappop(heap), heappop(heap)
        if first[2] is None:
            first, second = second, first
        sums, parts = (first[2], first[3]) if first[2] is not None else whole(first[1])
        if second[2] is None:  # goes into the smallest
            number = second[1]
            value, node = sums[0] + weights[number], number if parts[0] < 0 else joined(int(parts[0]), number)
            place = int(np.searchsorted(sums[1:], value))
            sums[:place], parts[:place] = sums[1 : place + 1], parts[1 : place + 1]
            sums[place], parts[place] = value, node
        else:
            other = second[3][::-1]
            merged = np.where(parts >= 0, parts, other)
            for place in np.flatnonzero((parts >= 0) & (other >= 0)):
                merged[place] = joined(int(parts[place]), int(other[place]))
            sums = sums + second[2][::-1]
            order = np.argsort(sums, kind="stable")
            sums, parts = sums[order], merged[order]
        if sums[0] > 0:
            sums -= sums[0]
        heappush(heap, (-float(sums[-1]), age, sums, parts))
    parts = heap[0][3] if items > 1 else whole(0)[1] if items else np.full(count, -1)
    return [_leaves(int(node), nodes, items) for node in parts]


def _leaves(node: int, nodes: Sequence[tuple[int, int]], items: int) -> list[int]:
    result, open_ = [], [node]
    while open_:
        node = open_.pop()
        if node >= items:
            open_ += nodes[node - items]
        elif node >= 0:
            result.append(node)
    return sorted(result)


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Largest first, each into the first bin that has room: at most 11/9 of the fewest possible bins, and one."""
    bins: list[list[int]] = []
    room = np.full(max(len(sizes), 1), capacity, dtype=np.int64)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = int(np.argmax(room[: len(bins) + 1] >= sizes[i])) if sizes[i] <= capacity else len(bins)
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[place] -= sizes[i]
    return bins


def _spread(bins: list[list[int]], costs: Sequence[float], count: int) -> list[list[int]]:
    """Increase the number of bins to `count`: split the most expensive ones while possible, then add empty ones."""
    heap = [(-sum(costs[i] for i in items), items) for items in bins if len(items) > 1]
    result = [items for items in bins if len(items) == 1]
    heapify(heap)
    while heap and len(heap) + len(result) < count:
        items = heappop(heap)[1]
        for half in largest_differencing([costs[i] for i in items], 2):
            part = [items[place] for place in half]
            if len(part) > 1:
                heappush(heap, (-sum(costs[i] for i in part), part))
            else:
                result.append(part)
    result += [items for _, items in heap]
    return result + [[] for _ in range(count - len(result))]


def in_rounds(bins: list[list[int]], costs: Sequence[float], parts: int) -> list[list[int]]:
    """Order bins by round, most expensive first. In a round the most expensive bin goes to the least loaded share."""
    total = {id(items): float(sum(costs[i] for i in items)) for items in bins}
    bins = sorted(bins, key=lambda items: (-total[id(items)], items[0] if items else len(costs)))
    loads, result = [0.0] * parts, []
    for start in range(0, len(bins), parts):
        lanes = sorted(range(parts), key=lambda lane: (loads[lane], lane))
        placed: dict[int, list[int]] = dict(zip(lanes, bins[start : start + parts], strict=True))
        for lane, items in placed.items():
            loads[lane] += total[id(items)]
        result += [placed[lane] for lane in range(parts)]
    return result
