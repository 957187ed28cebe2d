"""The types with a value for each token, as numpy arrays; numpy is loaded with the first of them. `Completion`: what an
engine samples. `Support`: the part of the vocabulary that a token was sampled from, if top-k, top-p or min-p left
tokens out. `Sample`: what is trained. The other types are in `types.py`, which has these names, too."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
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
LEAST, ROUNDING = -1e18, 1e-3  # of log-probs [nats]: a log-softmax may exceed 0 by rounding
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


class Stop(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model's end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Output of an engine: token ids, the log-prob of each under the distribution it was sampled from, and the version
    of the weights that sampled it. Token ids, never text. The end token is included only if it was sampled. `routes`:
    experts that computed each token of the prompt and of the answer but its last, the same number of bytes for each
    (`birl/models/routing.py`); empty if the engine does not report it. `support`: the tokens that each token was
    sampled from, if requested and some were left out. `cached`: number of prompt tokens in the engine's prefix cache;
    has no effect on the answer.

    Arrays may be given as any sequence of numbers; they are converted to int32 or float32. Raises `ValueError` if their
    lengths differ, or if an element is no such number.

    Example: Completion(tokens=(45, 2), logprobs=(-0.1, -0.02), versions=(3, 3), stop=Stop.STOP)
    """

    tokens: "Ints"
    logprobs: "Floats"
    versions: "Ints"
    stop: Stop
    routes: bytes = b""
    support: "Support | None" = None
    cached: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        lengths = become_arrays(self, ("tokens", "logprobs", "versions"))
        if len(set(lengths)) > 1:
            raise ValueError("{} tokens, {} logprobs, {} versions".format(*lengths))
        if self.support is not None and len(self.support.counts) != lengths[0]:
            raise ValueError(f"{lengths[0]} tokens, {len(self.support.counts)} supports")

    __eq__ = alike

    @classmethod
    def of(
        cls, tokens: Any, logprobs: Any, versions: Any, stop: Stop, routes: bytes = b"", cached: int = 0,
        support: "Support | None" = None,
    ) -> "Completion":  # fmt: skip
        """Build from any sequences of numbers."""
        return cls(
            tokens=tokens, logprobs=logprobs, versions=versions, stop=stop, routes=routes, cached=cached,
            support=support,
        )  # fmt: skip

    @property
    def ids(self) -> tuple[int, ...]:
        """`tokens` as Python ints, for requests to engines and for decoding."""
        return tuple(self.tokens.tolist())

    def possible(self) -> "Completion":
        """Return self if it is valid. Raises `ValueError` for a log-prob that is NaN, infinite, or above 0 by more than
        rounding, a negative id or version, a token outside its support, or versions that decrease."""
        for numbers, what in ((self.tokens, "token id"), (self.versions, "version")):
            if (numbers < 0).any():
                raise ValueError(f"{numbers.min()} is no {what}")
        if (self.versions[1:] < self.versions[:-1]).any():
            raise ValueError("the versions of its tokens go back")
        if self.support is not None and len(strange := self.support.without(self.tokens)):
            raise ValueError(f"token {strange[0]} is not in the support that it was drawn from")
        wrong = ~((self.logprobs > LEAST) & (self.logprobs <= ROUNDING))
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"the log-prob of token {place} of {len(wrong)} is {self.logprobs[place]}, "
                "and not a number of at most 0"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A training sequence: token ids and parallel arrays [T]. `mask` is True for tokens that the model sampled: only
    those are trained. `logprobs` and `versions` are the engine's; 0.0 and -1 where mask is False. `advantage`: one
    number for all trained tokens, or an array [T], as are `returns` and `values`, the targets and predictions of a
    critic (None without one), and `proximal`, the learner's log-probs before the first update on the batch (None if not
    used). `routes`: experts that computed each token, the same number of bytes for each; empty if not used. `support`:
    sets of tokens that the n trained tokens were sampled from, if some were left out. `hinted`: ids of a prompt with a
    hint, which replaces all tokens before the first trained one for a teacher; None if there is none. `likely`: for the
    n trained tokens the k most likely tokens of a served teacher, int64 [n, k], and log-probs of these and of all
    others as one, float32 [n, k + 1]. `group` and `episode`: the sample's origin; `policy`: the policy that sampled and
    learns it, if a run trains several; `teacher`: its teacher, if there are several.

    Arrays may be given as any sequence of numbers; they are converted to int32, bool or float32. Raises `ValueError` if
    their lengths differ, or if the first token is trained.

    Example: Sample(tokens=(1, 9, 4, 45, 2), mask=(False, False, False, True, True), logprobs=(0., 0., 0., -.1, -.02),
                    versions=(-1, -1, -1, 3, 3), advantage=0.5, group=12, episode=0)
    """

    tokens: "Ints"
    mask: "Bools"
    logprobs: "Floats"
    versions: "Ints"
    advantage: "float | Floats"
    group: int
    episode: int
    returns: "Floats | None" = None
    values: "Floats | None" = None
    proximal: "Floats | None" = None
    routes: bytes = b""
    support: "Support | None" = None
    hinted: "Ints | None" = None
    likely: "tuple[NDArray[np.int64], Floats] | None" = None
    policy: str = ""
    teacher: str = ""

    def __post_init__(self) -> None:
        become_arrays(self, ("hinted",))
        lengths = set(become_arrays(self, SAMPLE))
        if len(lengths) != 1:
            raise ValueError(f"a Sample's columns must be equally long, got {sorted(lengths)}")
        if self.routes and len(self.routes) % len(self.tokens):
            raise ValueError(f"{len(self.routes)} bytes of routes for {len(self.tokens)} tokens")
        if self.support is not None and len(self.support.counts) != self.mask.sum():
            raise ValueError(f"{len(self.support.counts)} supports for {self.mask.sum()} trained tokens")
        if len(self.mask) and self.mask[0]:
            raise ValueError("the first token of a Sample has no context to be predicted from, so it cannot be trained")

    def by_version(self) -> Counter[int]:
        """Number of trained tokens by version of the weights that sampled them."""
        import numpy as np

        versions, counts = np.unique(self.versions[self.versions >= 0], return_counts=True)
        return Counter(dict(zip(versions.tolist(), counts.tolist(), strict=True)))
