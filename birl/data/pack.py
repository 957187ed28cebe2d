"""Samples -> Batches: many sequences in one row without padding, and what begins alike only once.

Answers to one prompt share its tokens, branches of an agent all turns before they part. Packed as trees (`trees.py`)
these are computed once, and their gradient is the sum of what all that follow send back: the same numbers as computing
each sequence alone, for less work. No micro-batch has more than `max_tokens` tokens, and those that are computed side
by side cost alike (`balance.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from birl.data.balance import micro_batches
from birl.data.sequences import observations
from birl.data.support import SupportRows, upload
from birl.data.trees import Forest, Tree
from birl.errors import BirlError
from birl.support import Support
from birl.types import Sample

NOTHING = (Tree((1,), (-1,)),)  # the trees of a micro-batch without samples: a model wants a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch. T packed tokens, N trained ones; the trained ones come sample by sample. U predictions: samples
    that are the same up to and with a trained token have one of it in common.

    tokens, positions [T]; trees: of the row, one behind the other;
    copies [T] float32: how many samples each packed token stands for; 0 where there is nothing to compute;
    source [U]: which packed token's hidden state predicts; targets [U]: which id;
    entry [N]: which of the U predictions is of this trained token;
    logprobs [N]: the engine's; proximal [N]: the learner's before the batch's first update, or the engine's;
    versions [N]; advantages [N]; returns, values [N]: a critic's, zeros without one; predicted [N]: values of now
    of a critic on the same backbone, with their gradient; divergence [N]: from a teacher, in nats, with its gradient;
    observed [O]: which of the U predictions is of this token of an environment, where these are asked for;
    observed_weights [O] as weights; observed_logprobs [O]: the learner's of now, with their gradient;
    sample [N]: index of its sample in the step; group [N]: of its sample; turn [N]: counts the stretches of trained
    tokens within a sample;
    weights [N]: the global denominator of the optimizer step, so that a loss is `(per_token * weights).sum()`;
    routes [T, bytes] uint8: which experts computed each token in the engine, where samples say so;
    support: the tokens that each of the U predictions was drawn from, where samples have them; then U is N, as samples
    may have drawn one token from different supports;
    hinted: the same samples behind prompts with a hint, for a teacher; its N, and its U, are in the order of this
    batch's, and its weights are 0 where a sample has no such prompt;
    likely [N, k] int64, likely_logprobs [N, k + 1]: what a served teacher says, where samples have it;
    policy: whose weights all of it goes through, where a run trains several; teacher: whom all of it is compared with.

    Example: pack([Sample(...)], weights=[0.5], max_tokens=4096)[0]
    """

    tokens: Tensor
    positions: Tensor
    trees: tuple[Tree, ...]
    copies: Tensor
    source: Tensor
    targets: Tensor
    entry: Tensor
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
    observed: Tensor | None = None
    observed_weights: Tensor | None = None
    predicted: Tensor | None = None
    divergence: Tensor | None = None
    observed_logprobs: Tensor | None = None
    routes: Tensor | None = None
    support: SupportRows | None = None
    hinted: "Batch | None" = None
    likely: Tensor | None = None
    likely_logprobs: Tensor | None = None
    policy: str = ""
    teacher: str = ""

    def to(self, device: torch.device | str) -> "Batch":
        given = [f.name for f in fields(self) if f.name not in ("predicted", "divergence", "observed_logprobs")]
        tensors = [name for name in given if isinstance(getattr(self, name), Tensor)]
        moved = {name: upload(getattr(self, name), device) for name in tensors}
        support, told = self.support and self.support.to(device), self.hinted and self.hinted.to(device)
        return replace(self, **moved, support=support, hinted=told)


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    max_tokens: int,
    parts: int = 1,
    pair_cost: float = 0.0,
    observed: Sequence[float] = (),
) -> list[Batch]:
    """All samples of one optimizer step as micro-batches, whose number is a multiple of `parts`; where there are too
    few samples for that, some train nothing. `parts` in order cost alike (`balance.py`). The samples of a group stay
    together unless that alone exceeds max_tokens, and each policy and teacher has its own micro-batches. Raises
    `BirlError` when one sample exceeds it. Prompts with a hint are beside that bound: what reads them keeps nothing for
    a gradient.

    pair_cost: of a token and one that it attends to, by the cost of a token's products with weights.
    observed: of each sample the weight of its tokens that an environment wrote; without, those are not predicted.
    """
    longest = max((len(s.tokens) for s in samples), default=0)
    if longest > max_tokens:
        raise BirlError(
            f"A sample of {longest} tokens does not fit into a row of {max_tokens}: learner.tokens_per_microbatch x "
            "parallel.cp x parallel.tp. Set one of them higher, or a smaller rollout.max_tokens."
        )
    ids = sequences(samples)
    planned: list[list[list[int]]] = []
    whose: list[dict[str, str]] = []  # of each micro-batch
    for policy, teacher in owners(samples):
        own = [i for i, s in enumerate(samples) if (s.policy, s.teacher) == (policy, teacher)]
        rows = micro_batches([ids[i] for i in own], [samples[i].group for i in own], max_tokens, parts, pair_cost)
        planned += [[[own[n] for n in cluster] for cluster in row] for row in rows]
        whose += [{"policy": policy, "teacher": teacher}] * len(rows)
    if any(s.likely is not None for s in samples):
        batches = [_batch(clusters, ids, samples, weights, alone=True) for clusters in planned]
        batches = [_with_likely(batch, samples) for batch in batches]
    else:
        alone = any(s.hinted is not None or s.support is not None for s in samples)
        batches = [_batch(clusters, ids, samples, weights, alone, observed) for clusters in planned]
    batches = [replace(batch, **own) for batch, own in zip(batches, whose, strict=True)]
    if all(s.hinted is None for s in samples):
        return batches
    told = [hinted(s) for s in samples]
    counted = [w * (s.hinted is not None) for s, w in zip(samples, weights, strict=True)]
    read = [s.tokens for s in told]
    return [
        replace(batch, hinted=replace(_batch(clusters, read, told, counted, alone=True), **own))
        for batch, clusters, own in zip(batches, planned, whose, strict=True)
    ]


def owners(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Policy and teacher of samples, each pair once, those of a policy together."""
    pairs = dict.fromkeys((s.policy, s.teacher) for s in samples)
    return [pair for policy in dict.fromkeys(p for p, _ in pairs) for pair in pairs if pair[0] == policy] or [("", "")]


def _with_likely(batch: Batch, samples: Sequence[Sample]) -> Batch:
    own = [samples[i].likely for i in torch.unique_consecutive(batch.sample).tolist()]
    if not own:  # nothing is trained
        own = [s.likely and (s.likely[0][:0], s.likely[1][:0]) for s in samples[:1]]
    ids, logprobs = zip(*(told for told in own if told is not None), strict=True)
    likely = torch.from_numpy(np.concatenate(ids)).to(torch.int64)
    return replace(batch, likely=likely, likely_logprobs=torch.from_numpy(np.concatenate(logprobs)).float())


def hinted(sample: Sample) -> Sample:
    """What a teacher reads: the prompt with the hint, and the same tokens from the first trained one on."""
    if sample.hinted is None:
        return sample
    first, prompt = int(sample.mask.argmax()), sample.hinted
    nothing = np.zeros_like(prompt)
    return Sample(
        tokens=np.concatenate([prompt, sample.tokens[first:]]),
        mask=np.concatenate([nothing.astype(np.bool_), sample.mask[first:]]),
        logprobs=np.concatenate([nothing.astype(np.float32), sample.logprobs[first:]]),
        versions=np.concatenate([nothing - 1, sample.versions[first:]]),
        advantage=0.0,
        group=sample.group,
        episode=sample.episode,
        support=sample.support,
        teacher=sample.teacher,
    )


def sequences(samples: Sequence[Sample]) -> list[np.ndarray]:
    """What makes tokens of two samples the same computation [T]: their ids, and the experts that they are sent to."""
    size = max((len(s.routes) // len(s.tokens) for s in samples), default=0)
    if size == 0:
        return [s.tokens for s in samples]
    result = []
    for s in samples:
        routes = np.frombuffer(s.routes or b"\xff" * size * len(s.tokens), np.uint8).reshape(-1, size)
        rows = np.concatenate([s.tokens[:, None].view(np.uint8), routes], 1)
        result.append(rows.view(np.dtype((np.void, rows.shape[1])))[:, 0])
    return result


@dataclass(slots=True)
class Row:
    """A packed row that grows tree by tree. `place` of each sample: where its tokens are."""

    owners: list[tuple[int, int, int]]  # of each node: sample, and which of its tokens
    trees: list[Tree]
    before: list[int]  # of each node: the packed token before its first one, -1 where there is none
    passed: list[int]  # of each node: samples that go through it
    place: dict[int, np.ndarray]

    def add(self, cluster: Sequence[int], ids: Sequence[np.ndarray]) -> None:
        """Samples whose tokens are in common trees."""
        size = sum(map(len, self.trees))
        ways: list[list[np.ndarray]] = []
        sizes: list[int] = []
        parents: list[int] = []
        root = 0
        for branch, parent in Forest([ids[i] for i in cluster]).walk():
            if parent < 0 and sizes:
                self.trees.append(Tree(tuple(sizes), tuple(parents)))
                sizes, parents, root = [], [], len(ways)
            own = np.arange(size, size := size + branch.end - branch.start)
            ways.append([*(ways[parent] if parent >= 0 else ()), own])
            sizes.append(len(own))
            parents.append(parent - root if parent >= 0 else -1)
            self.owners.append((cluster[branch.owner], branch.start, branch.end))
            self.before.append(int(ways[parent][-1][-1]) if parent >= 0 else -1)
            self.passed.append(branch.passed)
            self.place |= {cluster[n]: np.concatenate(ways[-1]) for n in branch.ends}
        self.trees.append(Tree(tuple(sizes), tuple(parents)))


def _batch(
    clusters: Sequence[Sequence[int]],
    ids: Sequence[np.ndarray],
    samples: Sequence[Sample],
    weights: Sequence[float],
    alone: bool = False,
    observed: Sequence[float] = (),
) -> Batch:
    """`alone`: every trained token has a prediction of its own."""
    row = Row([], [], [], [], {})
    for cluster in clusters:
        row.add(cluster, ids)
    sizes = np.array([end - start for _, start, end in row.owners], np.int64)
    before = np.arange(sizes.sum()) - 1  # each token's packed place, less one, but for first ones of nodes
    before[sizes.cumsum() - sizes] = row.before
    numbers = sorted(row.place)
    taken = [np.flatnonzero(samples[i].mask) for i in numbers]  # trained tokens
    read = [observations(samples[i]) for i in numbers] if observed else []
    places = [row.place[i][t] for i, t in zip([*numbers, *(numbers if read else ())], [*taken, *read], strict=True)]
    chosen, entries = _predictions(places, len(before), alone)
    tokens = _joined([samples[i].tokens[a:b] for i, a, b in row.owners] or [np.zeros(1)], torch.int64)
    counts = [len(own) for own in taken]
    entry, others = torch.from_numpy(entries).split([sum(counts), len(entries) - sum(counts)])
    of_samples = [observed[i] for i in numbers] if read else []

    def each(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        """[N]: one value for each sample."""
        return _repeated(values, counts, dtype)

    def column(name: str, otherwise: Tensor | None = None) -> Tensor:
        given = [getattr(samples[i], name) for i in numbers]
        return otherwise if otherwise is not None and all(v is None for v in given) else _column(given, taken)

    logprobs = column("logprobs")
    return Batch(
        tokens=tokens,  # a model wants a token where there is nothing to compute
        positions=_joined([np.arange(a, b) for _, a, b in row.owners] or [np.zeros(1)], torch.int64),
        trees=tuple(row.trees) or NOTHING,
        copies=_joined([np.repeat(np.array(row.passed or [0], np.float32), sizes if len(sizes) else 1)], torch.float32),
        source=torch.from_numpy(before[chosen]),
        targets=tokens[torch.from_numpy(chosen)],
        entry=entry,
        logprobs=logprobs,
        proximal=column("proximal", logprobs),
        versions=_joined([samples[i].versions[own] for i, own in zip(numbers, taken, strict=True)], torch.int64),
        advantages=column("advantage"),
        returns=column("returns"),
        values=column("values"),
        weights=each((weights[i] for i in numbers), torch.float32),
        sample=each(numbers, torch.int64),
        group=each((samples[i].group for i in numbers), torch.int64),
        turn=_joined([stretches(own) for own in taken], torch.int64),
        observed=others if observed else None,
        observed_weights=_repeated(of_samples, [len(own) for own in read], torch.float32) if observed else None,
        routes=_routes(row, samples),
        support=_support(samples, numbers, [*counts, len(others)]),
    )


def _column(given: Sequence["np.ndarray | float | None"], places: Sequence[np.ndarray]) -> Tensor:
    """[N] float32: of each sample a value for each of its tokens, one for all, or none, 0."""
    if not any(isinstance(values, np.ndarray) for values in given):
        return _repeated([cast(float, values or 0.0) for values in given], [len(p) for p in places], torch.float32)
    each = zip(given, places, strict=True)
    return _joined([v[p] if isinstance(v, np.ndarray) else np.full(len(p), v or 0.0) for v, p in each], torch.float32)


def _repeated(values: Iterable[float], counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    result = torch.empty(sum(counts), dtype=dtype)
    for part, value in zip(result.split(list(counts)), values, strict=True):
        part.fill_(value)
    return result


def _predictions(places: Sequence[np.ndarray], tokens: int, alone: bool) -> tuple[np.ndarray, np.ndarray]:
    """Packed places of trained tokens -> those that are predicted [U], and which of them each trained token is [N]."""
    if alone:
        chosen = np.concatenate([np.zeros(0, np.int64), *places])
        return chosen, np.arange(len(chosen))
    predicted = np.zeros(tokens, np.bool_)
    for own in places:
        predicted[own] = True
    entry = predicted.cumsum() - 1
    return np.flatnonzero(predicted), np.concatenate([entry[:0], *(entry[own] for own in places)])


def stretches(places: np.ndarray) -> np.ndarray:
    """Rising numbers -> of each, how many gaps are before it."""
    ends = np.flatnonzero(places[1:] - places[:-1] > 1) + 1
    return np.repeat(np.arange(len(ends) + 1), np.diff(ends, prepend=0, append=len(places)))


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def _routes(row: Row, samples: Sequence[Sample]) -> Tensor | None:
    """[T, bytes] uint8; all ones where unknown."""
    size = max((len(samples[i].routes) // len(samples[i].tokens) for i, _, _ in row.owners), default=0)
    if size == 0:
        return None
    known = [(samples[i].routes or b"\xff" * size * b)[a * size : b * size] for i, a, b in row.owners]
    return torch.frombuffer(bytearray(b"".join(known)), dtype=torch.uint8).view(-1, size)


def _support(samples: Sequence[Sample], numbers: Sequence[int], counts: Sequence[int]) -> SupportRows | None:
    """Of the trained tokens of these samples, so many each, and of what they read, which were not drawn."""
    *own, read = counts
    each = [(samples[i].support, n) for i, n in zip(numbers, own, strict=True)]
    own = Support.joined([*each, (None, read)])
    return None if own is None else SupportRows.of(own)
