"""Rows of one pass of training, packed: neighbours that begin alike have their beginning computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from birl.data.trees import Tree
from birl.text.pictures import FIRST

SHARED = 16  # tokens: a shorter beginning in common is computed again


@dataclass(frozen=True, slots=True, eq=False)
class TargetRow:
    """Tokens [T] int64 of one datum, and what is predicted from each of them, targets [T, K] int64."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Rows behind one another, and what neighbours begin with in common only once: tokens and positions [T], their
    trees, and of each row where its tokens are."""

    tokens: Tensor
    positions: Tensor
    trees: list[Tree]
    places: list[Tensor]


def plant(rows: Sequence[TargetRow]) -> Forest:
    """As `data/pack.py` has groups of samples. What comes of a row does not depend on who else is in its tree."""
    tokens, positions, trees, places, start = [], [], [], [], 0
    while rows:
        prefix, count = beginning(rows)
        head = rows[0].tokens[:prefix]
        tokens.append(head)
        positions.append(torch.arange(prefix, dtype=torch.int64))
        stem, end = torch.arange(start, start + prefix, dtype=torch.int64), start + prefix
        branches = []
        for row in rows[:count]:
            tail = row.tokens[prefix:]
            tokens.append(tail)
            positions.append(torch.arange(prefix, len(row.tokens), dtype=torch.int64))
            places.append(torch.cat([stem, torch.arange(end, end + len(tail), dtype=torch.int64)]))
            branches += [len(tail)] if len(tail) else []
            end += len(tail)
        trees.append(Tree.of(prefix, tuple(branches)))
        start, rows = end, rows[count:]
    return Forest(torch.cat(tokens), torch.cat(positions), trees, places)


def beginning(rows: Sequence[TargetRow]) -> tuple[int, int]:
    """Of the first rows that begin alike: how many tokens, and how many rows."""
    first, common, count = rows[0].tokens, len(rows[0].tokens) - 1, 1
    for row in rows[1:]:
        size = min(common, len(row.tokens) - 1)
        apart = (row.tokens[:size] != first[:size]).nonzero()
        size = int(apart[0]) if len(apart) else size
        while size and first[size] >= FIRST and first[size - 1] >= FIRST:  # no picture is cut
            size -= 1
        if size < SHARED or 2 * size < common:
            break
        common, count = size, count + 1
    return (common, count) if count > 1 else (len(first), 1)
