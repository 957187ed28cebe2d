"""The support of a policy: the part of the vocabulary that a token was drawn from, where top-k, top-p or min-p left
tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from birl.columns import alike, become_arrays

if TYPE_CHECKING:
    from birl.columns import Bools, Ints

LARGEST = 1024
"""Tokens of the largest support in a training run with top_p or min_p where rollout.top_k does not bound it."""
MOST = 1 << 16
"""Tokens of the largest support that an engine reports."""
LISTED = 128
"""The same of vLLM, which reports it by log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Of n tokens: the size of the support of each, int32 [n], 0 for all of the vocabulary; and the ids in it, support
    by support, each in rising order, int32 [sum of counts]. Raises `ValueError` where these are none.

    Example: Support(counts=(2, 0, 1), ids=(4, 45, 2))
    """

    counts: "Ints"
    ids: "Ints"

    def __post_init__(self) -> None:
        become_arrays(self, ("counts", "ids"))
        if (self.counts < 0).any() or self.counts.sum() != len(self.ids):
            raise ValueError(f"supports of {self.counts.sum()} tokens with {len(self.ids)} ids")

    __eq__ = alike

    @classmethod
    def of(cls, rows: "Sequence[Ints | None]") -> "Support":
        """From the ids of each token's support; None: all."""
        import numpy as np

        ids = [row for row in rows if row is not None]
        return cls(
            counts=np.array([0 if row is None else len(row) for row in rows], np.int32),
            ids=np.concatenate([np.zeros(0, np.int32), *ids]),
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
        """Places of tokens [n] that are outside of their supports."""
        import numpy as np

        owner = np.repeat(np.arange(len(tokens)), self.counts)
        inside = self.counts == 0
        inside[owner[self.ids == np.asarray(tokens)[owner]]] = True
        return np.flatnonzero(~inside)
