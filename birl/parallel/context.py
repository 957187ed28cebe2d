"""Context parallelism: a packed row of tokens over several ranks, so that a sequence may be longer than one rank's
memory allows.

    split     each rank gets as many tokens of the row, with their positions, and runs the model on them
    attend    attention, the only exchange between tokens:
              gather    all-gather of keys and values (Llama 3, arXiv:2407.21783 section 3.3.2); a rank has only its own
                        queries, distributed so that all ranks have the same work (`zigzag`)
              ulysses   all-to-all from all heads of its tokens to all tokens of its heads, and back (DeepSpeed Ulysses,
                        arXiv:2309.14509); the row is split into n equal parts
    carry     layers with a state: each rank computes them for the whole row, and continues with its own tokens
    join      gathers log-probs of the trained tokens of all ranks on every rank, so that losses need no changes

All else stays where it is: hidden states, logits, targets. Every rank's gradient of a weight is that of its own tokens:
FSDP adds them over the ranks of a row as over those of other rows.

Shapes: n ranks, T tokens of the row with padding, t = T / n of each rank, N trained tokens, H query heads, K key heads,
D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from birl.data.pack import Batch
from birl.data.support import SupportRows, upload
from birl.data.trees import Tree, ways
from birl.errors import BirlError
from birl.models import varlen
from birl.models.attention import Layout, Packed, Variant, area
from birl.models.slots import slots_of
from birl.models.states import Step
from birl.models.tree_attention import Area, tree_attention
from birl.models.vision import Seen
from birl.parallel.ranks import Ranks
from birl.parallel.regions import gather, join, swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens [first, last) of a row in one node, which begins at `own`; above: the places of the tokens in
    its ancestors, which all of them attend to, in order of position."""

    above: tuple[range, ...]
    own: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def position(self) -> int:
        """Position of its first token in its sequence."""
        return sum(map(len, self.above)) + self.first - self.own

    def seen(self, window: int | None, blocks: Sequence[tuple[int, int]] = ()) -> list[range]:
        """Places of the keys that some token of it attends to, in order; the last is the last token's own, or the end
        of the block (first, count) that it is in."""
        last = max([self.last, *(row + n for row, n in blocks if row < self.last <= row + n)])
        drop = 0 if window is None else max(0, self.position - window + 1)  # of the keys before the first token
        result = []
        for r in (*self.above, range(self.own, last)):
            if drop < len(r):
                result.append(r[drop:])
            drop = max(0, drop - len(r))
        return result

    def among(self, blocks: Sequence[tuple[int, int]], row: int) -> list[tuple[int, int]]:
        """Blocks (first, count) of the row that overlap with it, shifted as if its first token were at `row`."""
        own = [(first, n) for first, n in blocks if first < self.last and first + n > self.first]
        return [(first - self.first + row, n) for first, n in own]

    def pairs(self, window: int | None) -> int:
        """Number of its (query, key) pairs; forward attention takes 4 x heads x head size FLOPs for each."""
        before, n = self.position, len(self)
        if window is None or before + n <= window:
            return n * before + n * (n + 1) // 2
        rising = max(0, window - before)  # tokens that attend to less than a whole window
        return rising * before + rising * (rising + 1) // 2 + (n - rising) * window


def lines(trees: Sequence[Tree]) -> Iterator[Piece]:
    """Yield each node of a row as a piece."""
    for node, way in ways(trees):
        yield Piece(above=tuple(way[:-1]), own=node.first, first=node.first, last=node.first + node.count)


def zigzag(trees: Sequence[Tree], ranks: int) -> list[list[Piece]]:
    """Assign pieces of a row to ranks, in the row's order, so that all have the same attention work.

    In a node of a tree each token attends to one more key than the one before. Cut into 2n equal pieces of which rank i
    has the i-th and the i-th from the end, every rank has one cheap and one expensive piece, and all sums are equal.
    Each node is cut separately, so that the lengths of the row's sequences do not matter; remaining tokens go to the
    ranks with the fewest, so that all have equally many (up to one token, and exactly if n divides the row)."""
    result: list[list[Piece]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for line in lines(trees):
        each, rest = divmod(len(line), 2 * ranks)
        extra = [0] * ranks
        for _ in range(rest):
            fewest = min(range(ranks), key=lambda r: loads[r] + extra[r])
            extra[fewest] += 1
        place = line.first
        early = [each + (n + 1) // 2 for n in extra]
        late = [each + n // 2 for n in extra]
        for rank, n in [*enumerate(early), *reversed(list(enumerate(late)))]:
            if n:
                _append(result[rank], replace(line, first=place, last=place + n))
            place += n
        loads = [load + a + b for load, a, b in zip(loads, early, late, strict=True)]
    return result


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, merged with an adjacent one: the last rank has both middle pieces of a line."""
    if pieces and pieces[-1].last == piece.first and pieces[-1].own == piece.own:
        piece = replace(piece, first=pieces.pop().first)
    pieces.append(piece)


@dataclass(frozen=True, slots=True)
class ContextShard:
    """A rank's shard of a micro-batch. tokens, positions [t]; source, targets, support: of the trained tokens that are
    predicted from its own tokens; order [N]: the trained tokens ordered by rank; counts: number for each rank. seen:
    features of pictures, at the places of the tokens that this rank embeds."""

    tokens: Tensor
    positions: Tensor
    layout: Layout
    source: Tensor
    targets: Tensor
    support: SupportRows | None = None
    seen: Seen | None = None
    order: Tensor | None = None
    counts: tuple[int, ...] = ()
    group: Any = None

    def joined(self, *figures: Tensor) -> tuple[Tensor, ...]:
        """Gather figures of this rank's trained tokens to those of all [N]."""
        return figures if self.order is None else join(figures, self.order, self.counts, self.group)


def split(batch: Batch, ranks: Ranks, seen: Seen | None = None) -> ContextShard:
    """Return this rank's shard of a micro-batch, whose size is a multiple of n tokens. `seen`: of the whole row. Its
    indices are computed on the host, which would have to wait for a GPU's."""
    n, device, count = ranks.grid.cp, batch.tokens.device, len(batch.tokens)
    ahead = None if seen is None else seen.mutual
    if n == 1:
        layout = Packed(batch.trees, device, mutual=ahead)
        own = torch.arange(count, device=device)
        here = embedded(seen, own, count, ranks) if ranks.grid.tp > 1 else seen
        return ContextShard(batch.tokens, batch.positions, layout, batch.source, batch.targets, batch.support, here)
    group = ranks.groups["cp"]
    rank, row = dist.get_rank(group), Packed(batch.trees, device, mutual=ahead)
    if ranks.grid.context == "ulysses":
        tokens = place = torch.arange(count)
        layout: Layout = Swapped(group, row)
    else:
        shares = zigzag(batch.trees, n)
        tokens = torch.cat([torch.arange(p.first, p.last) for pieces in shares for p in pieces])
        place = tokens.argsort()
        layout = Gathered(group, row, shares[rank], upload(place, device))
    mine = upload(tokens.view(n, -1)[rank], device)  # place [T]: index of each token of the row among `tokens`
    source = place[batch.source if batch.host is None else batch.host]
    own = source // len(mine)
    order, counts = own.argsort(stable=True), tuple((own[:, None] == torch.arange(n)).sum(0).tolist())
    chosen = order.split(list(counts))[rank]
    return ContextShard(
        tokens=batch.tokens[mine],
        positions=batch.positions[..., mine],
        layout=layout,
        source=upload(source[chosen] - rank * len(mine), device),
        targets=batch.targets[upload(chosen, device)],
        support=batch.support and batch.support.rows(chosen),
        seen=embedded(seen, mine, count, ranks),
        order=upload(order, device),
        counts=counts,
        group=group,
    )


def embedded(seen: Seen | None, mine: Tensor, count: int, ranks: Ranks) -> Seen | None:
    """Features of pictures, of a row of `count` tokens, at the tokens that this rank embeds: of `mine` [t], which with
    sequence parallelism are split over the ranks of tp."""
    if ranks.grid.tp > 1 and ranks.grid.sequence:
        mine = mine.chunk(ranks.grid.tp)[dist.get_rank(ranks.groups["tp"])]
    return None if seen is None else seen.among(mine, count)


class Gathered:
    """Attention of a rank's own queries to the keys of all ranks."""

    def __init__(self, group: Any, row: Packed, pieces: Sequence[Piece], place: Tensor) -> None:
        """`place` [T]: index of each token of the row among the gathered ones."""
        self.group, self.row, self.pieces, self.place = group, row, pieces, place
        self.known: dict[int | None, Any] = {}  # by window; made once, used by every layer

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: Variant | None = None,
    ) -> Tensor:  # fmt: skip
        """query [1, H, t, D], key and value [1, K, t, D] -> [1, t, H, D]."""
        assert variant is None, "`check_heads` says no"
        size = key.shape[-1]
        rows = gather(torch.cat([key[0], value[0]], -1).transpose(0, 1), self.group)  # one collective for both
        if not self.blocks(window) and varlen.takes(query, value):
            cut, q = self.cut(window), query[0].transpose(0, 1)
            return varlen.attend(cut, q, rows[..., :size], rows[..., size:], scale, window)[None]
        ordered = rows.index_select(0, self.place).transpose(0, 1)
        return tree_attention(query[0], ordered[..., :size], ordered[..., size:], self.areas(window), scale)[None]

    def carry(self, layer: int, rows: Tensor, step: Step) -> Tensor:
        """Rows [1, t, H] -> the same."""
        whole = gather(rows[0], self.group).index_select(0, self.place)
        own = self.place.argsort().view(self.group.size(), -1)[dist.get_rank(self.group)]
        return self.row.carry(layer, whole[None], step).index_select(1, own)

    def areas(self, window: int | None) -> list[Area]:
        """Attention areas: each piece, and the tokens of the row that it attends to."""
        if window not in self.known:
            blocks, firsts = self.blocks(window), accumulate(map(len, self.pieces), initial=0)
            self.known[window] = [
                area(row, len(p), p.seen(window, blocks), window, None, self.place.device, p.among(blocks, row))
                for row, p in zip(firsts, self.pieces, strict=False)
            ]
        return self.known[window]

    def blocks(self, window: int | None) -> tuple[tuple[int, int], ...]:
        """Blocks of picture tokens with bidirectional attention in a layer with this window."""
        return () if self.row.mutual is None else self.row.mutual.of(window)

    def cut(self, window: int | None) -> varlen.Segments:
        """`areas` as segments for FlashAttention, with keys by their index among the gathered ones."""
        if window not in self.known:
            seen = [(len(p), p.seen(window)) for p in self.pieces]
            self.known[window] = varlen.cut(seen, self.place.device, places=self.place)
        return self.known[window]


class Swapped:
    """Attention of a rank's own heads in the whole row."""

    def __init__(self, group: Any, row: Packed) -> None:
        self.group, self.row = group, row

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: Variant | None = None,
    ) -> Tensor:  # fmt: skip
        """query [1, H, t, D], key and value [1, K, t, D] -> [1, t, H, D]."""
        assert variant is None, "`check_heads` says no"
        n, tokens = self.group.size(), query.shape[2]
        times = copies(query.shape[1], key.shape[1], n)
        heads = [query[0], *(x[0].repeat_interleave(times, 0) if times > 1 else x[0] for x in (key, value))]
        sent = [x.reshape(n, -1) for x in heads]  # [n, own heads x t x D]
        got = swap(torch.cat(sent, 1), self.group).split([x.shape[1] for x in sent], 1)
        q, k, v = (
            part.view(n, -1, tokens, x.shape[2]).transpose(0, 1).flatten(1, 2)[None]
            for part, x in zip(got, heads, strict=True)
        )
        out = self.row.attend(layer, q, k, v, scale, window)[0]  # [T, H / n, D]
        back = swap(out.reshape(n, -1), self.group).view(n, tokens, *out.shape[1:])
        return back.transpose(0, 1).flatten(1, 2)[None]

    def carry(self, layer: int, rows: Tensor, step: Step) -> Tensor:
        """Rows [1, t, H] -> the same."""
        out = self.row.carry(layer, gather(rows[0], self.group)[None], step)
        return out.chunk(self.group.size(), 1)[dist.get_rank(self.group)]


def copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Number of copies of each key head that are sent: one, or `ranks / kv_heads` if there are fewer key heads than
    ranks. Raises `BirlError` if the heads cannot be split."""
    if kv_heads % ranks == 0 and heads % ranks == 0:
        return 1
    if ranks % kv_heads == 0 and heads % ranks == 0:
        return ranks // kv_heads
    raise BirlError(
        f"parallel.context=ulysses: {heads} query heads and {kv_heads} key heads cannot be shared out among "
        f"parallel.cp={ranks} processes: each needs as many query heads, and whole key heads or a share of one. "
        "Set parallel.context=gather, which works with any heads, or another parallel.cp."
    )


def check_heads(model: nn.Module, ranks: Ranks) -> None:
    """Check before the first step that the model's attention can be split. Raises `BirlError`."""
    if ranks.grid.cp > 1 and any(s.extras for s in slots_of(model)):
        raise BirlError(
            f"parallel.cp={ranks.grid.cp}: the attention of {type(model).__name__} has sinks, a soft cap or chunks, "
            "which birl does not compute over several processes. Set parallel.cp=1."
        )
    if ranks.grid.context == "ulysses" and ranks.grid.cp > 1:
        for slot in slots_of(model):
            copies(slot.heads // ranks.grid.tp, max(1, slot.kv_heads // ranks.grid.tp), ranks.grid.cp)
