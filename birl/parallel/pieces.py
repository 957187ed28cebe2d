"""Which tokens of a packed row belong to which rank, so that attention is the same work for all.

A node of a tree is a line: token by token it sees one more key. Cut into 2n equal pieces of which rank i has the
i-th and the i-th from the end (zig-zag), every rank has one cheap and one dear piece, and all sums are equal. Each line
is cut by itself, so that it does not matter how long the row's sequences are; tokens left over go to the ranks that
have fewest, so that all have equally many (one more or less, and none where n divides the row).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from birl.data.trees import Tree, ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [first, last) of a row, neighbours in one node, which begins at `own`; above: the places of what all of
    them see in the nodes above it, in order of position."""

    above: tuple[range, ...]
    own: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def position(self) -> int:
        """Of its first token in its sequence."""
        return sum(map(len, self.above)) + self.first - self.own

    def seen(self, window: int | None) -> list[range]:
        """Places of the keys that some token of it sees, in order; the last token's own is the last."""
        drop = 0 if window is None else max(0, self.position - window + 1)  # of the keys before the first token
        result = []
        for r in (*self.above, range(self.own, self.last)):
            if drop < len(r):
                result.append(r[drop:])
            drop = max(0, drop - len(r))
        return result

    def pairs(self, window: int | None) -> int:
        """How many (query, key) pairs it is: attention is 4 x heads x head size FLOPs for each, forward."""
        before, n = self.position, len(self)
        if window is None or before + n <= window:
            return n * before + n * (n + 1) // 2
        rising = max(0, window - before)  # tokens that see less than a whole window
        return rising * before + rising * (rising + 1) // 2 + (n - rising) * window


def lines(trees: Sequence[Tree]) -> Iterator[Piece]:
    """Each node of a row."""
    for node, way in ways(trees):
        yield Piece(above=tuple(way[:-1]), own=node.first, first=node.first, last=node.first + node.count)


def zigzag(trees: Sequence[Tree], ranks: int) -> list[list[Piece]]:
    """The pieces of each rank, in the row's order."""
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
    """Neighbours become one: the middle pieces of a line are both the last rank's."""
    if pieces and pieces[-1].last == piece.first and pieces[-1].own == piece.own:
        piece = replace(piece, first=pieces.pop().first)
    pieces.append(piece)
