"""Per-token columns of frozen dataclasses, as numpy arrays; numpy is loaded with the first of them. `Support`: the part
of the vocabulary that a token was sampled from, if top-k, top-p or min-p left tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]
    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float32]

SAMPLE = ("tokens", "mask", "logprobs", "versions", "advantage", "returns", "values", "proximal")
WHOLE = ("tokens", "prompt", "hinted", "versions", "counts", "ids")
TYPES = dict.fromkeys(WHOLE, "int32") | {"mask": "bool"}  # others: float32
KINDS = {"i": "iu", "b": "biu", "f": "fiu"}  # dtype kinds that such a column accepts
LARGEST = 1024
"""Largest support [tokens] in a training run with top_p or min_p, if rollout.top_k does not bound it."""
MOST = 1 << 16
"""Largest support that an engine reports [tokens]."""
LISTED = 128
"""Largest support that vLLM reports, as log-probs [tokens]."""


def become_arrays(item: Any, names: Sequence[str]) -> list[int]:
    """Convert the columns of a frozen object to arrays [T], except None and a scalar advantage. Returns their lengths.
    Raises `ValueError` for a number that the array cannot hold: an id of 1.5, or of 2^40."""
    import numpy as np

    lengths: list[int] = []
    for name in names:
        given, dtype = getattr(item, name), np.dtype(TYPES.get(name, "float32"))
        if given is None or (name == "advantage" and isinstance(given, float | int)):
            continue
        column: NDArray[Any] = np.asarray(given, None if len(given) else dtype)
        if column.ndim != 1 or column.dtype.kind not in KINDS[dtype.kind]:
            wrong = next((n for n in given if type(n) is not int), given)
            what = "token id" if name in ("tokens", "prompt", "hinted") else name.rstrip("s")
            raise ValueError(f"{wrong!r} is no {what}")
        result = column.astype(dtype, copy=False)
        if dtype.kind == "i" and column.dtype != dtype and (result != column).any():
            raise ValueError(f"{column[result != column][0]} does not fit into {dtype}")
        object.__setattr__(item, name, result)
        lengths.append(len(result))
    return lengths


def alike(one: Any, other: Any) -> bool:
    """Whether two objects are equal in every compared field, including arrays, which dataclasses cannot compare."""
    import numpy as np

    if type(one) is not type(other):
        return False
    pairs: list[tuple[Any, Any]] = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare]
    return all(bool(np.array_equal(a, b)) if hasattr(a, "dtype") else a == b for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Supports of n tokens. `counts`: size of each, int32 [n], 0 for the whole vocabulary; `ids`: token ids, support by
    support, each in ascending order, int32 [sum of counts]. Raises `ValueError` if they are inconsistent.

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
        """Build from the ids of each token's support; None: the whole vocabulary."""
        import numpy as np

        ids = [row for row in rows if row is not None]
        return cls(
            counts=np.array([0 if row is None else len(row) for row in rows], np.int32),
            ids=np.concatenate([np.zeros(0, np.int32), *ids]),
        )

    @classmethod
    def joined(cls, parts: "Sequence[tuple[Support | None, int]]") -> "Support | None":
        """Concatenate supports, each given with its number of tokens; None if no part has one."""
        import numpy as np

        if all(support is None for support, _ in parts):
            return None
        every = [cls(counts=np.zeros(n, np.int32), ids=()) if own is None else own for own, n in parts]  # pyright: ignore
        return cls(counts=np.concatenate([s.counts for s in every]), ids=np.concatenate([s.ids for s in every]))

    def part(self, chosen: "slice | Bools") -> "Support":
        """The supports of some of the tokens."""
        import numpy as np

        own = np.zeros(len(self.counts), np.bool_)
        own[chosen] = True
        return Support(counts=self.counts[own], ids=self.ids[np.repeat(own, self.counts)])

    def without(self, tokens: "Ints") -> "Any":
        """Indices of the tokens [n] that are outside of their supports."""
        import numpy as np

        owner = np.repeat(np.arange(len(tokens)), self.counts)
        inside = self.counts == 0
        inside[owner[self.ids == np.asarray(tokens)[owner]]] = True
        return np.flatnonzero(~inside)
