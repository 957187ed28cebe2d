"""Samples -> Batches: many short sequences in one row without padding, prompts of a group only once.

The answers to one prompt share its tokens. Packed as a tree (`models/attention.py`), the prompt is computed once and
its gradient is the sum of what all answers send back: the same numbers as computing it n times, for less work.
No micro-batch has more than `max_tokens` tokens, and those that are computed side by side cost alike (`balance.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from birl.data.balance import balance, imbalance, sees
from birl.errors import BirlError
from birl.types import Sample

NOTHING = ((1, ()),)  # the trees of a micro-batch without samples: a model wants a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """A prefix and the samples that start with it; `tail` of sample i is everything behind the prefix."""

    prefix: np.ndarray
    samples: tuple[int, ...]  # indices
    tails: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.tails))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch. T packed tokens, N trained ones; the trained ones come sample by sample.

    tokens, positions [T]; trees: (prefix, branch lengths) of each stretch of the row;
    source [N]: which packed token's hidden state predicts the trained token; targets [N]: its id;
    logprobs [N]: the engine's; proximal [N]: the learner's before the batch's first update, or the engine's;
    versions [N]; advantages [N]; returns, values [N]: a critic's, zeros without one; predicted [N]: values of now
    of a critic on the same backbone, with their gradient;
    sample [N]: index of its sample in the step; group [N]: of its sample; turn [N]: counts the stretches of trained
    tokens within a sample;
    weights [N]: the global denominator of the optimizer step, so that a loss is `(per_token * weights).sum()`;
    routes [T, bytes] uint8: which experts computed each token in the engine, where samples say so.

    Example: pack([Sample(...)], weights=[0.5], max_tokens=4096)[0]
    """

    tokens: Tensor
    positions: Tensor
    trees: tuple[tuple[int, tuple[int, ...]], ...]
    source: Tensor
    targets: Tensor
    logprobs: Tensor
    proximal: Tensor
    versions: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    weights: Tensor
    sample: Tensor
    group: Tensor
    turn: Tensor
    predicted: Tensor | None = None
    routes: Tensor | None = None

    @property
    def copies(self) -> Tensor:
        """[T] float32: how many samples each packed token stands for; 0 where there is nothing to compute."""
        runs = [(n, size) for prefix, tails in self.trees for n, size in ((len(tails), prefix), (1, sum(tails)))]
        numbers, sizes = np.array(runs).T
        return torch.from_numpy(np.repeat(numbers.astype(np.float32), sizes)).to(self.tokens.device)

    def to(self, device: torch.device | str) -> "Batch":
        tensors = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor) and f.name != "predicted"]
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def pack(
    samples: Sequence[Sample], weights: Sequence[float], max_tokens: int, parts: int = 1, pair_cost: float = 0.0
) -> list[Batch]:
    """All samples of one optimizer step as micro-batches, whose number is a multiple of `parts`; where there are too
    few samples for that, some train nothing. `parts` in order cost alike (`balance.py`). Raises `BirlError` when one
    sample alone exceeds max_tokens.

    pair_cost: of a token and one that it attends to, by the cost of a token's products with weights.
    """
    longest = max((len(s.tokens) for s in samples), default=0)
    if longest > max_tokens:
        raise BirlError(
            f"A sample of {longest} tokens does not fit into a row of {max_tokens}: learner.tokens_per_microbatch x "
            "parallel.cp x parallel.tp. Set one of them higher, or a smaller rollout.max_tokens."
        )
    numbered = enumerate(samples)
    trees = [t for _, g in groupby(numbered, key=lambda x: x[1].group) for t in branchings(list(g), max_tokens)]
    costs = [cost(len(t.prefix), [len(tail) for tail in t.tails], pair_cost) for t in trees]
    return [
        _batch([trees[i] for i in sorted(b)], samples, weights)
        for b in balance([len(t) for t in trees], max_tokens, parts, costs)
    ]


def cost(prefix: int, branches: Sequence[int], pair_cost: float) -> float:
    """Of a tree, where a token without attention costs 1."""
    return prefix + sum(branches) + pair_cost * sees(prefix, branches)


def packing(batches: Sequence[Batch], max_tokens: int, parts: int, pair_cost: float) -> dict[str, float]:
    """Figures of what `pack` gave. imbalance: time that shares wait for one another in a round, by their work; padding:
    share of the computed tokens that no sample has; filled: of the room for tokens."""
    costs = [sum(cost(*tree, pair_cost) for tree in b.trees) for b in batches]
    tokens, empty = sum(len(b.tokens) for b in batches), sum(b.trees == NOTHING for b in batches)
    return {
        "packing/imbalance": imbalance(costs, parts),
        "packing/padding": empty / tokens,
        "packing/filled": (tokens - empty) / (len(batches) * max_tokens),
    }


def branchings(numbered: Sequence[tuple[int, Sample]], max_tokens: int) -> list[Branching]:
    """Samples of one group -> as few trees as fit into max_tokens each."""
    prefix = shared_prefix([s for _, s in numbered])
    trees: list[Branching] = []
    members: list[tuple[int, np.ndarray]] = []
    size = len(prefix)

    def close() -> None:
        trees.append(Branching(prefix=prefix, samples=tuple(i for i, _ in members), tails=tuple(t for _, t in members)))

    for index, sample in numbered:
        tail = sample.tokens[len(prefix) :]
        if members and size + len(tail) > max_tokens:
            close()
            members, size = [], len(prefix)
        members.append((index, tail))
        size += len(tail)
    close()
    return trees


def shared_prefix(samples: Sequence[Sample]) -> np.ndarray:
    """The longest start that all samples share and none trains: a trained token has its own advantage, so it stays
    apart.

    At least one token of each sample is left over, as a branch must not be empty.
    """
    first = samples[0].tokens
    for sample in samples:
        end = min(len(first), len(sample.tokens) - 1)
        if sample.mask[:end].any():
            end = int(sample.mask.argmax())
        apart = sample.tokens[:end] != first[:end]
        first = first[: int(apart.argmax()) if apart.any() else end]
    return first


def _batch(trees: Sequence[Branching], samples: Sequence[Sample], weights: Sequence[float]) -> Batch:
    tokens, positions, source, taken, turn, size = [], [], [], [], [], 0
    for tree in trees:
        prefix, last = len(tree.prefix), size + len(tree.prefix) - 1  # packed place of the prefix's last token
        tokens.append(tree.prefix)
        positions.append(np.arange(prefix))
        size += prefix
        for index, tail in zip(tree.samples, tree.tails, strict=True):
            tokens.append(tail)
            positions.append(np.arange(prefix, prefix + len(tail)))
            own = np.flatnonzero(samples[index].mask[prefix:])  # a trained token's place in the tail
            source.append(np.where(own > 0, size + own - 1, last))
            taken.append((index, own + prefix))
            turn.append((np.diff(own, prepend=own[:1]) > 1).cumsum())
            size += len(tail)

    def column(name: str, otherwise: str = "") -> Tensor:
        """[N] float32 of one of the samples' columns; where a sample has none, of the other one or zeros."""
        parts = []
        for index, places in taken:
            values = getattr(samples[index], name)
            if values is None:
                values = getattr(samples[index], otherwise) if otherwise else 0.0
            parts.append(values[places] if isinstance(values, np.ndarray) else np.full(len(places), values))
        return _joined(parts, torch.float32)

    def each(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        """[N]: one value for each sample."""
        return _joined([np.full(len(p), value) for value, (_, p) in zip(values, taken, strict=True)], dtype)

    numbers = [index for index, _ in taken]
    return Batch(
        tokens=_joined(tokens or [np.zeros(1)], torch.int64),  # a model wants a token where there is nothing to compute
        positions=_joined(positions or [np.zeros(1)], torch.int64),
        trees=tuple((len(t.prefix), tuple(map(len, t.tails))) for t in trees) or NOTHING,
        source=_joined(source, torch.int64),
        targets=_joined([samples[i].tokens[places] for i, places in taken], torch.int64),
        logprobs=column("logprobs"),
        proximal=column("proximal", "logprobs"),
        versions=_joined([samples[i].versions[places] for i, places in taken], torch.int64),
        advantages=column("advantage"),
        returns=column("returns"),
        values=column("values"),
        weights=each((weights[i] for i in numbers), torch.float32),
        sample=each(numbers, torch.int64),
        group=each((samples[i].group for i in numbers), torch.int64),
        turn=_joined(turn, torch.int64),
        routes=_routes(trees, samples),
    )


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def _routes(trees: Sequence[Branching], samples: Sequence[Sample]) -> Tensor | None:
    """[T, bytes] uint8; all ones where unknown. A shared prefix was computed once, for its first sample."""
    size = max((len(s.routes) // len(s.tokens) for t in trees for s in (samples[i] for i in t.samples)), default=0)
    if size == 0:
        return None
    result = bytearray()
    for tree in trees:
        known = [samples[i].routes or b"\xff" * size * len(samples[i].tokens) for i in tree.samples]
        cut = len(tree.prefix) * size
        result += b"".join((known[0][:cut], *(routes[cut:] for routes in known)))
    return torch.frombuffer(result, dtype=torch.uint8).view(-1, size)
