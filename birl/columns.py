"""Columns of frozen objects: one number for each token, as numpy arrays. Numpy is loaded with the first of them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]
    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float32]

SAMPLE = ("tokens", "mask", "logprobs", "versions", "advantage", "returns", "values", "proximal")
WHOLE = ("tokens", "prompt", "hinted", "versions", "counts", "ids")
TYPES = dict.fromkeys(WHOLE, "int32") | {"mask": "bool"}  # else float32
KINDS = {"i": "iu", "b": "biu", "f": "fiu"}  # of numbers that such a column takes


def become_arrays(item: Any, names: Sequence[str]) -> list[int]:
    """Columns of a frozen object become arrays [T], but for None and one advantage for all tokens; their lengths.
    Raises `ValueError` for a number that its array cannot hold: an id of 1.5, or of 2^40."""
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
    """The same in every field that counts, arrays included, which dataclasses cannot compare."""
    import numpy as np

    if type(one) is not type(other):
        return False
    pairs: list[tuple[Any, Any]] = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare]
    return all(bool(np.array_equal(a, b)) if hasattr(a, "dtype") else a == b for a, b in pairs)
