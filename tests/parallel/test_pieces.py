"""Rows dealt to ranks: every token once, equally many for each, and the same attention work."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birl.data.trees import Tree
from birl.models import varlen
from birl.models.attention import Packed, tree_mask
from birl.models.tree_attention import tree_attention
from birl.parallel.context import Gathered, Piece, lines, zigzag
from tests.models.test_varlen import reference

NODE = st.integers(1, 30)
BRANCH = st.recursive(NODE, lambda deeper: st.tuples(NODE, st.lists(deeper, max_size=3).map(tuple)), max_leaves=6)
TREE = st.builds(Tree.of, st.integers(1, 40), st.lists(BRANCH, max_size=4).map(tuple))
ROW = st.lists(TREE, min_size=1, max_size=6)
WINDOW = st.one_of(st.none(), st.integers(1, 50))


def imbalance(shares: Sequence[Sequence[Piece]], window: int | None = None) -> float:
    """Attention work of the rank that has most, as a share above the mean: 0 is perfect, 1 is twice the mean."""
    work = [sum(p.pairs(window) for p in pieces) for pieces in shares]
    return max(work) * len(work) / sum(work) - 1


def foreign(shares: Sequence[Sequence[Piece]], window: int | None = None) -> list[int]:
    """For each rank, how many tokens of other ranks its own tokens see: what it would have to be sent at least."""
    result = []
    for pieces in shares:
        own = {t for p in pieces for t in range(p.first, p.last)}
        result.append(len({t for p in pieces for r in p.seen(window) for t in r} - own))
    return result


def whole_mask(trees: list[Tree], window: int | None) -> Tensor:
    return torch.block_diag(*(tree_mask(tree, window).int() for tree in trees)).bool()


@settings(max_examples=100, deadline=None)
@given(ROW, st.integers(1, 5))
def test_every_token_is_dealt_once_and_all_ranks_get_as_many(trees: list[Tree], ranks: int) -> None:
    shares = zigzag(trees, ranks)
    tokens = [t for pieces in shares for p in pieces for t in range(p.first, p.last)]
    assert sorted(tokens) == list(range(sum(map(len, trees))))
    counts = [sum(map(len, pieces)) for pieces in shares]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=100, deadline=None)
@given(ROW, st.integers(1, 5), WINDOW)
def test_a_piece_says_what_the_mask_says(trees: list[Tree], ranks: int, window: int | None) -> None:
    mask = whole_mask(trees, window)
    positions = [n for tree in trees for n in tree.positions()]
    for piece in (p for pieces in zigzag(trees, ranks) for p in pieces):
        rows = mask[piece.first : piece.last]
        assert piece.position == positions[piece.first]
        assert piece.pairs(window) == int(rows.sum())
        assert [t for r in piece.seen(window) for t in r] == rows.any(0).nonzero().flatten().tolist()


def test_one_sequence_is_dealt_in_zigzag() -> None:
    shares = zigzag([Tree.of(16)], 2)
    assert [[(p.first, p.last) for p in pieces] for pieces in shares] == [[(0, 4), (12, 16)], [(4, 12)]]


@settings(max_examples=40, deadline=None)
@given(ROW, st.integers(2, 4), WINDOW)
def test_pieces_together_are_the_attention_of_the_whole_row(trees: list[Tree], ranks: int, window: int | None) -> None:
    """Both ways that a rank computes its queries; the one of CUDA with FlashAttention written out in plain PyTorch."""
    total, generator = sum(map(len, trees)), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, total, 8, generator=generator) for heads in (4, 2, 2))
    wanted = tree_attention(q, k, v, Packed(trees).areas(window), 0.4)
    shares = zigzag(trees, ranks)
    dealt = torch.cat([torch.arange(p.first, p.last) for pieces in shares for p in pieces])
    keys, values = (x.transpose(0, 1)[dealt] for x in (k, v))  # as they arrive from the ranks
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(varlen, "flash", reference)
        for pieces in filter(None, shares):
            own = torch.cat([torch.arange(p.first, p.last) for p in pieces])
            plain = Gathered(None, Packed(trees), pieces, dealt.argsort())
            found = tree_attention(q[:, own], k, v, plain.areas(window), 0.4)
            torch.testing.assert_close(found, wanted[own], atol=1e-5, rtol=1e-5)
            cut = Gathered(None, Packed(trees), pieces, dealt.argsort()).cut(window)
            found = varlen.attend(cut, q[:, own].transpose(0, 1), keys, values, 0.4, window)
            torch.testing.assert_close(found, wanted[own], atol=1e-5, rtol=1e-5)


RNG = random.Random(1)
ROWS = {
    "one long sequence": [Tree.of(32768)],
    "80 short ones": [Tree.of(max(16, int(RNG.lognormvariate(5.5, 0.8)))) for _ in range(80)],
    "a long one and short ones": [Tree.of(9000), *(Tree.of(RNG.randint(50, 400)) for _ in range(30))],
    "prompts with 8 answers": [
        Tree.of(RNG.randint(100, 900), tuple(RNG.randint(50, 2000) for _ in range(8))) for _ in range(4)
    ],
}


def stretches(trees: list[Tree], ranks: int) -> list[list[Piece]]:
    """Neighbouring tokens for each rank: what a row that is simply cut would give."""
    total = sum(map(len, trees))
    bounds = [total * r // ranks for r in range(ranks + 1)]
    found = []
    for first, last in pairwise(bounds):
        cuts = [(line, max(first, line.first), min(last, line.last)) for line in lines(trees)]
        found.append([Piece(above=c.above, own=c.own, first=a, last=b) for c, a, b in cuts if a < b])
    return found


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_rank_has_one_percent_more_work_than_the_mean(name: str, ranks: int) -> None:
    """The table of docs/parallel.md; a long row that is simply cut has 50 to 160 % more on its last rank."""
    found = imbalance(zigzag(ROWS[name], ranks))
    assert found < 0.01
    assert found <= imbalance(stretches(ROWS[name], ranks))
    assert imbalance(zigzag(ROWS[name], ranks), window=1024) < 0.10


def test_equal_pieces_are_equal_work() -> None:
    for ranks in (2, 4, 8):
        assert imbalance(zigzag([Tree.of(64 * ranks)], ranks)) == 0
        assert imbalance(zigzag([Tree.of(4 * ranks, (2 * ranks, 6 * ranks))], ranks)) == 0


def test_causal_attention_needs_three_quarters_of_what_all_gather_sends() -> None:
    """The rank with the first and the last piece needs all, the one with the middle pieces half of the others'."""
    for ranks in (2, 4, 8):
        needed = foreign(zigzag([Tree.of(64 * ranks)], ranks))
        assert sum(needed) / (64 * ranks * (ranks - 1)) == 0.75
        assert max(needed) == 64 * (ranks - 1)
