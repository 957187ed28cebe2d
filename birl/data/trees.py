"""Sequences -> trees, in which what begins alike is there once.

A packed row is trees behind one another. A token sees those before it in its own node and in the nodes above, so each
sequence is a way from a root down to a node, and is computed as if it were alone (`models/attention.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Node(NamedTuple):
    """Tokens [first, first + count) of a row; `before` tokens of their sequence are above them, in node `parent` and
    the nodes above that (-1: it is a root)."""

    first: int
    count: int
    parent: int
    before: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A stretch of a packed row. Node i has sizes[i] tokens and goes on from node parents[i] < i, the root from
    nothing: -1. Behind a node come all that go on from it (pre-order). A plain sequence is Tree((n,), (-1,))."""

    sizes: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def of(cls, size: int, branches: Sequence[Any] = ()) -> "Tree":
        """A root with branches, each a number of tokens or (tokens, its own branches).

        Example: Tree.of(45, (12, (9, (3, 4)))) is Tree((45, 12, 9, 3, 4), (-1, 0, 0, 2, 2))
        """
        sizes, parents, todo = list[int](), list[int](), list[tuple[int, Any, int]]([(size, branches, -1)])
        while todo:
            size, branches, parent = todo.pop()
            pairs: list[Any] = [b if isinstance(b, tuple) else (b, ()) for b in reversed(branches)]
            todo += [(count, own, len(sizes)) for count, own in pairs]
            sizes.append(size)
            parents.append(parent)
        return cls(tuple(sizes), tuple(parents))

    def __len__(self) -> int:
        return sum(self.sizes)

    def positions(self) -> list[int]:
        """Of each token in its own sequence."""
        return [n.before + i for n in nodes([self]) for i in range(n.count)]

    def pairs(self) -> int:
        """Of a token and one that it sees, itself included."""
        return sum(n.count * n.before + n.count * (n.count + 1) // 2 for n in nodes([self]))


def nodes(trees: Sequence[Tree]) -> list[Node]:
    """Of a row: trees behind one another."""
    result, first = list[Node](), 0
    for tree in trees:
        root = len(result)
        for size, parent in zip(tree.sizes, tree.parents, strict=True):
            above = root + parent if parent >= 0 else -1
            before = result[above].before + result[above].count if above >= 0 else 0
            result.append(Node(first, size, above, before))
            first += size
    return result


def ways(trees: Sequence[Tree]) -> Iterator[tuple[Node, list[range]]]:
    """Each node of a row that has tokens, and the places of all that its last one sees, in order of position."""
    every: list[list[range]] = []
    for node in nodes(trees):
        own = range(node.first, node.first + node.count)
        every.append([*(every[node.parent] if node.parent >= 0 else ()), *([own] if node.count else ())])
        if node.count:
            yield node, every[-1]


@dataclass(slots=True)
class Branch:
    """A node that grows: tokens [start, end) of sequence `owner`; the sequences that end with it, and how many pass."""

    owner: int
    start: int
    end: int
    ends: list[int] = field(default_factory=list)
    passed: int = 1
    branches: dict[bytes, "Branch"] = field(default_factory=dict)  # by their first token


class Forest:
    """The trees of some sequences [T], and what is where. Items of a sequence are the same where they are equal."""

    def __init__(self, sequences: Sequence[np.ndarray]) -> None:
        self.sequences = sequences
        self.roots: dict[bytes, Branch] = {}
        for number in range(len(sequences)):
            self._add(number)

    def _add(self, number: int) -> None:
        mine, at, branches = self.sequences[number], 0, self.roots
        while True:
            key = mine[at].tobytes()
            branch = branches.get(key)
            if branch is None:
                branches[key] = Branch(number, at, len(mine), [number])
                return
            theirs = self.sequences[branch.owner][branch.start : branch.end]
            same = common(theirs, mine[at:])
            if same < len(theirs):
                self._split(branch, branch.start + same)
            branch.passed += 1
            at += same
            if at == len(mine):
                branch.ends.append(number)
                return
            branches = branch.branches

    def _split(self, branch: Branch, place: int) -> None:
        rest = Branch(branch.owner, place, branch.end, branch.ends, branch.passed, branch.branches)
        key = self.sequences[branch.owner][place].tobytes()
        branch.end, branch.ends, branch.branches = place, [], {key: rest}

    def walk(self) -> Iterator[tuple[Branch, int]]:
        """Each node behind the one that it goes on from, and that one's number."""
        todo, number = [(branch, -1) for branch in reversed(self.roots.values())], 0
        while todo:
            branch, parent = todo.pop()
            yield branch, parent
            todo += [(b, number) for b in reversed(branch.branches.values())]
            number += 1

    def order(self) -> list[tuple[int, int]]:
        """The sequences as they come in the trees, and how much each has in common with those before it."""
        result, shared = list[tuple[int, int]](), 0
        for branch, _ in self.walk():
            shared = min(shared, branch.start)
            for number in branch.ends:
                result.append((number, shared))
                shared = branch.end
        return result


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many items both begin with."""
    n = min(len(one), len(other))
    apart = one[:n] != other[:n]
    first = int(apart.argmax()) if n else 0
    return first if n and apart[first] else n
