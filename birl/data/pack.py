"""Sequence packing, samples -> batches: many sequences in one row without padding, common prefixes only once.

Answers to one prompt share its tokens, branches of an agent all turns before they diverge. Packed as trees (`trees.py`)
these are computed once, and their gradient is the sum of those from all continuations: the same numbers as computing
each sequence alone, for less work. No micro-batch has more than `max_tokens` tokens, and those that are computed in
parallel have about equal cost (`balance.py`).
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
from birl.data.trees import PrefixTrees, Tree
from birl.errors import BirlError
from birl.samples import Support
from birl.types import Sample

NOTHING = (Tree((1,), (-1,)),)  # the trees of a micro-batch without samples: a model needs a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch. T packed tokens, N trained tokens, ordered by sample. U predictions: samples that are equal up
    to and including a trained token share one prediction of it.

    tokens, positions [T]; trees: of the row, in order;
    copies [T] float32: number of samples that share each packed token; 0 for a dummy token;
    source [U]: packed token whose hidden state predicts; host: the same in CPU memory, if this is on a GPU;
    targets [U]: predicted id;
    entry [N]: index of a trained token's prediction among the U;
    logprobs [N]: the engine's; proximal [N]: the learner's before the batch's first update, or the engine's;
    versions [N]; advantages [N]; returns, values [N]: a critic's, zeros without one; predicted [N]: current values of
    a critic on the same backbone, with gradient; divergence [N]: from a teacher [nats], with gradient;
    observed [O]: index of the prediction of an environment's token, if these are predicted;
    observed_weights [O]: their weights; observed_logprobs [O]: the learner's current ones, with gradient;
    sample [N]: index of its sample in the step; group [N]: of its sample; turn [N]: number of the contiguous span of
    trained tokens within a sample;
    weights [N]: the global denominator of the optimizer step, so that a loss is `(per_token * weights).sum()`;
    routes [T, bytes] uint8: experts that computed each token in the engine, if samples have them;
    support: the sets of tokens that the U predictions were sampled from, if samples have them; then U is N, as samples
    may have sampled one token from different supports;
    hinted: the same samples after prompts with a hint, for a teacher; its N and U are in the order of this batch's, and
    its weights are 0 for samples without such a prompt;
    likely [N, k] int64, likely_logprobs [N, k + 1]: most likely tokens of a served teacher, if samples have them;
    policy: the policy of all samples, if a run trains several; teacher: the teacher of all samples.

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
    host: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        given = [f.name for f in fields(self) if f.name not in ("predicted", "divergence", "observed_logprobs", "host")]
        tensors = [name for name in given if isinstance(getattr(self, name), Tensor)]
        moved = {name: upload(getattr(self, name), device) for name in tensors}
        support, told = self.support and self.support.to(device), self.hinted and self.hinted.to(device)
        host = self.source if self.host is None else self.host
        return replace(self, **moved, support=support, hinted=told, host=host)


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    max_tokens: int,
    parts: int = 1,
    pair_cost: float = 0.0,
    observed: Sequence[float] = (),
) -> list[Batch]:
    """Pack all samples of an optimizer step into micro-batches, whose number is a multiple of `parts`; with too few
    samples some are empty. Each `parts` in order have about equal cost (`balance.py`). The samples of a group stay
    together unless the group exceeds max_tokens, and each policy and teacher has its own micro-batches. Raises
    `BirlError` if one sample exceeds max_tokens. The bound does not apply to prompts with a hint, as the teacher that
    reads them stores no activations.

    pair_cost: cost of attention to one token, relative to a token's products with weights.
    observed: weight of the environment's tokens, for each sample; if empty, those are not predicted.
    """
    longest = max((len(s.tokens) for s in samples), default=0)
    if longest > max_tokens:
        raise BirlError(
            f"A sample of {longest} tokens exceeds a micro-batch of {max_tokens} (learner.tokens_per_microbatch x "
            "parallel.cp x parallel.tp). Raise one of these keys, or lower rollout.max_tokens."
        )
    ids = sequences(samples)
    planned: list[tuple[list[list[int]], dict[str, str]]] = []  # micro-batches: clusters of samples, and whose they are
    for policy, teacher in owners(samples):
        own = [i for i, s in enumerate(samples) if (s.policy, s.teacher) == (policy, teacher)]
        rows = micro_batches([ids[i] for i in own], [samples[i].group for i in own], max_tokens, parts, pair_cost)
        whose = {"policy": policy, "teacher": teacher}
        planned += [([[own[n] for n in cluster] for cluster in row], whose) for row in rows]
    alone = any(s.hinted is not None or s.support is not None or s.likely is not None for s in samples)
    batches = [replace(_batch(row, ids, samples, weights, alone, observed), **whose) for row, whose in planned]
    if any(s.likely is not None for s in samples):
        batches = [_with_likely(batch, samples) for batch in batches]
    if all(s.hinted is None for s in samples):
        return batches
    told = [hinted(s) for s in samples]
    counted = [w * (s.hinted is not None) for s, w in zip(samples, weights, strict=True)]
    read = [replace(_batch(row, [s.tokens for s in told], told, counted, True), **whose) for row, whose in planned]
    pairs = zip(batches, read, strict=True)
    merged = not observed and all(s.support is None and s.likely is None for s in samples)
    return [_shared(b, r) if merged else replace(b, hinted=r) for b, r in pairs]


def _shared(batch: Batch, hinted: Batch) -> Batch:
    """Return the batch with its hinted one, and merge predictions (U = N) that are equal in both."""
    both = torch.stack([batch.source, batch.targets, hinted.source]).numpy()
    unique = np.unique(both, axis=1, return_index=True, return_inverse=True)
    kept, same = (torch.from_numpy(places.reshape(-1)) for places in unique[1:])
    own, theirs = (replace(b, source=b.source[kept], targets=b.targets[kept], entry=same) for b in (batch, hinted))
    return replace(own, hinted=theirs)


def owners(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Distinct (policy, teacher) of samples, ordered by policy."""
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
    """Sample for a teacher: the prompt with the hint, then the same tokens from the first trained one on."""
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
    """Keys [T] that are equal if tokens of two samples are the same computation: ids, and experts if known."""
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
    """A packed row that grows tree by tree. `place`: sample -> places of its tokens."""

    owners: list[tuple[int, int, int]]  # of each node: sample, start and end of its tokens
    trees: list[Tree]
    before: list[int]  # of each node: the packed token before its first one, -1 if there is none
    passed: list[int]  # of each node: samples that go through it
    place: dict[int, np.ndarray]

    def add(self, cluster: Sequence[int], ids: Sequence[np.ndarray]) -> None:
        """Add samples that share trees."""
        size = sum(map(len, self.trees))
        ways: list[list[np.ndarray]] = []
        sizes: list[int] = []
        parents: list[int] = []
        root = 0
        for branch, parent in PrefixTrees([ids[i] for i in cluster]).walk():
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
        tokens=tokens,  # a dummy token if there is nothing to compute
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
    """[N] float32 from values of each sample: one for each token, one for all, or None (0)."""
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
    """Packed places of trained tokens -> predicted places [U], and the index of each trained token among them [N]."""
    if alone:
        chosen = np.concatenate([np.zeros(0, np.int64), *places])
        return chosen, np.arange(len(chosen))
    predicted = np.zeros(tokens, np.bool_)
    for own in places:
        predicted[own] = True
    entry = predicted.cumsum() - 1
    return np.flatnonzero(predicted), np.concatenate([entry[:0], *(entry[own] for own in places)])


def stretches(places: np.ndarray) -> np.ndarray:
    """Ascending numbers -> number of gaps before each."""
    ends = np.flatnonzero(places[1:] - places[:-1] > 1) + 1
    return np.repeat(np.arange(len(ends) + 1), np.diff(ends, prepend=0, append=len(places)))


def _joined(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def _routes(row: Row, samples: Sequence[Sample]) -> Tensor | None:
    """Routes [T, bytes] uint8; all bits 1 if unknown."""
    size = max((len(samples[i].routes) // len(samples[i].tokens) for i, _, _ in row.owners), default=0)
    if size == 0:
        return None
    known = [(samples[i].routes or b"\xff" * size * b)[a * size : b * size] for i, a, b in row.owners]
    return torch.frombuffer(bytearray(b"".join(known)), dtype=torch.uint8).view(-1, size)


def _support(samples: Sequence[Sample], numbers: Sequence[int], counts: Sequence[int]) -> SupportRows | None:
    """Supports of these samples' trained tokens; `counts`: of each, and last of observed tokens, without support."""
    *own, read = counts
    each = [(samples[i].support, n) for i, n in zip(numbers, own, strict=True)]
    own = Support.joined([*each, (None, read)])
    return None if own is None else SupportRows.of(own)
