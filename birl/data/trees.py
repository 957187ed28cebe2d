"""Prefix trees: sequences -> trees, in which common prefixes are stored once.

A packed row is a concatenation of trees. A token attends to those before it in its own node and in its ancestors, so
each sequence is a path from a root to a node, and is computed as if it were alone (`models/attention.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Node(NamedTuple):
    """Tokens [first, first + count) of a row; `before` tokens of their sequence precede them, in node `parent` and its
    ancestors (-1: it is a root)."""

    first: int
    count: int
    parent: int
    before: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A contiguous part of a packed row. Node i has sizes[i] tokens and parent parents[i] < i; -1 for the root. A node
    is followed by its descendants (pre-order). A plain sequence is Tree((n,), (-1,))."""

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
        """Position of each token in its own sequence."""
        return [n.before + i for n in nodes([self]) for i in range(n.count)]

    def pairs(self) -> int:
        """Number of pairs of a token and one that it attends to, itself included."""
        return sum(n.count * n.before + n.count * (n.count + 1) // 2 for n in nodes([self]))


def nodes(trees: Sequence[Tree]) -> list[Node]:
    """Nodes of a row of concatenated trees."""
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
    """Yield each non-empty node of a row, and the places of all tokens that its last one attends to, by position."""
    every: list[list[range]] = []
    for node in nodes(trees):
        own = range(node.first, node.first + node.count)
        every.append([*(every[node.parent] if node.parent >= 0 else ()), *([own] if node.count else ())])
        if node.count:
            yield node, every[-1]


@dataclass(slots=True)
class Branch:
    """A growing node: tokens [start, end) of sequence `owner`; sequences that end in it, number that pass it."""

    owner: int
    start: int
    end: int
    ends: list[int] = field(default_factory=list)
    passed: int = 1
    branches: dict[bytes, "Branch"] = field(default_factory=dict)  # by their first token


class PrefixTrees:
    """Builds the prefix trees of some sequences [T], whose items are compared by equality."""

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
        """Yield each node after its parent, and the parent's number."""
        todo, number = [(branch, -1) for branch in reversed(self.roots.values())], 0
        while todo:
            branch, parent = todo.pop()
            yield branch, parent
            todo += [(b, number) for b in reversed(branch.branches.values())]
            number += 1

    def order(self) -> list[tuple[int, int]]:
        """The sequences in the order of the trees, each with the length of its common prefix with earlier ones."""
        result, shared = list[tuple[int, int]](), 0
        for branch, _ in self.walk():
            shared = min(shared, branch.start)
            for number in branch.ends:
                result.append((number, shared))
                shared = branch.end
        return result


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(one), len(other))
    apart = one[:n] != other[:n]
    first = int(apart.argmax()) if n else 0
    return first if n and apart[first] else n
