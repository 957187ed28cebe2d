"""Rows of one training pass, packed: the common prefix of neighbouring rows is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from birl.data.trees import Tree
from birl.text.pictures import FIRST

SHARED = 16  # tokens: a shorter common prefix is not shared


@dataclass(frozen=True, slots=True, eq=False)
class TargetRow:
    """Tokens [T] int64 of one datum, and K target tokens predicted from each of them [T, K] int64."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Concatenated rows in which neighbours share their common prefix: tokens and positions [T], their trees, and for
    each row the places of its tokens."""

    tokens: Tensor
    positions: Tensor
    trees: list[Tree]
    places: list[Tensor]


def pack_rows(rows: Sequence[TargetRow]) -> PackedRows:
    """Pack rows as `data/pack.py` packs groups of samples. A row's results do not depend on other rows of its tree."""
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
    return PackedRows(torch.cat(tokens), torch.cat(positions), trees, places)


def beginning(rows: Sequence[TargetRow]) -> tuple[int, int]:
    """Length [tokens] of the prefix that the first rows have in common, and the number of these rows."""
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
