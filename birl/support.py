"""The support of a policy: the words that tokens were drawn from, where top-k, top-p or min-p left others out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from birl.columns import alike, become_arrays

if TYPE_CHECKING:
    from birl.columns import Bools, Ints

WORDS = 1024
"""Of which a training run draws a token at most, where it leaves words out and rollout.top_k does not say how many."""
MOST = 1 << 16
"""Words of a token that an engine tells at most."""
LISTED = 128
"""Of vLLM, which tells them with their log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Of n tokens: how many words each was drawn from, int32 [n], 0 for all of the vocabulary; and these words, token
    by token, each token's in rising order, int32 [sum of counts]. Raises `ValueError` where these are none.

    Example: Support(counts=(2, 0, 1), ids=(4, 45, 2))
    """

    counts: "Ints"
    ids: "Ints"

    def __post_init__(self) -> None:
        become_arrays(self, ("counts", "ids"))
        if (self.counts < 0).any() or self.counts.sum() != len(self.ids):
            raise ValueError(f"supports of {self.counts.sum()} words with {len(self.ids)} ids")

    __eq__ = alike

    @classmethod
    def of(cls, rows: "Sequence[Ints | None]") -> "Support":
        """From each token's words; None: all."""
        import numpy as np

        words = [row for row in rows if row is not None]
        return cls(
            counts=np.array([0 if row is None else len(row) for row in rows], np.int32),
            ids=np.concatenate([np.zeros(0, np.int32), *words]),
        )

    @classmethod
    def joined(cls, parts: "Sequence[tuple[Support | None, int]]") -> "Support | None":
        """Of tokens behind one another, so many in each part; None where no part has any."""
        import numpy as np

        if all(support is None for support, _ in parts):
            return None
        every = [cls(counts=np.zeros(n, np.int32), ids=()) if own is None else own for own, n in parts]  # pyright: ignore
        return cls(counts=np.concatenate([s.counts for s in every]), ids=np.concatenate([s.ids for s in every]))

    def part(self, chosen: "slice | Bools") -> "Support":
        """That of some of its tokens."""
        import numpy as np

        own = np.zeros(len(self.counts), np.bool_)
        own[chosen] = True
        return Support(counts=self.counts[own], ids=self.ids[np.repeat(own, self.counts)])

    def without(self, tokens: "Ints") -> "Any":
        """Places of tokens [n] that are not among the words that they were drawn from."""
        import numpy as np

        owner = np.repeat(np.arange(len(tokens)), self.counts)
        inside = self.counts == 0
        inside[owner[self.ids == np.asarray(tokens)[owner]]] = True
        return np.flatnonzero(~inside)
