"""Log-probs of engine and learner compared: a few tokens of every weight version in a step are scored under the weights
that sampled them. Tokens of the current version are compared by the loss itself, at no cost."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.models.decoder import weights_changed
from birl.models.quantized import rounded
from birl.models.slices import quantizable
from birl.parallel.crew import RankGroup
from birl.parallel.layout import drop_gathered
from birl.parallel.ranks import Shared
from birl.types import Sample

KEPT = 4  # versions before the current one whose weights stay in memory
SHARE = 0.02  # of a step's tokens that are scored: without a gradient, a token costs about a third
#: largest gap of correct engines and learners [nats a token]: birl's differ by less than 1e-5 in float32; in bfloat16
#: by 0.04 with published models, and by 0.43 with large random weights in two implementations
GAPS = {"float32": 0.002, "bfloat16": 0.5}
FEWEST = 8  # tokens of an answer that are scored if no sample fits into that


class Past:
    """(every rank) Weights of at most `most` versions before the current one, in CPU memory: a copy of the trained
    weights for each, in the module's type. Each rank has its own shards.
    `int8`: the engine samples with these weights in int8, so scores are computed with int8 weights.
    `logprobs`, on rank 0: log-probs of `Shared` micro-batches, each under the weights of a version; every share must
    have equally many of each version."""

    def __init__(self, learner: Learner, most: int, crew: RankGroup | None = None, int8: bool = False) -> None:
        self.learner, self.most = learner, most
        self.linears = list(quantizable(learner.model).values()) if int8 else []
        self.logprobs = self._logprobs if crew is None else crew.everywhere(self._logprobs)
        self.versions: dict[int, list[Tensor]] = {}
        trained = [p for p in learner.model.parameters() if p.requires_grad]
        # of quantised weights only the LoRA matrices change
        self.parameters = [t for p in trained for t in (p.master.tensors().values() if p.is_meta else (p,))]  # pyright: ignore
        # parameters may point to other memory, without a copy
        self.plain = not learner.ranks.sharded and learner.device.type == "cpu"

    @property
    def compares(self) -> bool:
        """Whether there are tokens that the loss does not compare: of older weights, or of int8 weights."""
        return self.most > 0 or bool(self.linears)

    @torch.no_grad()
    def keep(self) -> None:
        """Store the current weights; the oldest versions beyond `most` are dropped."""
        if self.most and self.learner.version not in self.versions:
            self.versions[self.learner.version] = self._copies()
        for version in sorted(self.versions)[: -self.most or None]:
            del self.versions[version]

    @contextmanager
    def instead(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that puts the weights of a kept version, or the current ones, into the module (compute
        thread, between two steps of an engine). On exit the current ones are restored bit for bit."""
        now = [p.data for p in self.parameters] if self.plain else self._copies()
        plain = [m.weight.data for m in self.linears]
        current = self.learner.version
        inside = None if self.linears else current

        def restore() -> None:
            for linear, weight in zip(self.linears, plain, strict=True):
                linear.weight.data = weight

        def put(version: int) -> None:
            nonlocal inside
            if version != inside:
                inside = version
                restore()
                self._put(now if version == current else self.versions[version])
                if self.linears:
                    for linear in self.linears:
                        linear.weight.data = rounded(linear.weight)

        try:
            yield put
        finally:
            restore()
            if self.linears or inside != current:
                self._put(now)

    def _logprobs(self, work: Sequence[tuple[int, Batch]]) -> list[Tensor]:
        with self.instead() as put:

            def compute(item: tuple[int, Batch]) -> Tensor:
                put(item[0])
                return self.learner.forward(item[1]).cpu()

            return self.learner.ranks.collect(work, compute)

    def _copies(self) -> list[Tensor]:
        return [_own(p).to("cpu", copy=True) for p in self.parameters]

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        drop_gathered(self.learner.outputs)
        for parameter, weight in zip(self.parameters, weights, strict=True):
            if self.plain:
                parameter.data = weight
            else:
                _own(parameter).copy_(weight)
        weights_changed(self.learner.model)


def _own(parameter: Tensor) -> Tensor:
    """This rank's shard."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


@dataclass(frozen=True, slots=True)
class Compared:
    """gaps: by version, the mean |engine log-prob - learner log-prob| [nats] and the number of tokens. figures: the
    share of trained tokens whose version's weights are dropped, and the effect of rounding to int8 [nats]."""

    gaps: dict[int, tuple[float, int]]
    figures: dict[str, float]


def compare(
    past: Past, samples: Sequence[Sample], computed: int, known: Mapping[int, tuple[float, int]], size: int
) -> Compared:
    """(rank 0) Compare the versions of the samples' tokens. `computed`: tokens of the step; a sequence has at most
    `size` tokens; `known`: gaps that the loss has computed already, with the unrounded weights."""
    learner, done = past.learner, {} if past.linears else dict(known)
    count = sum((s.by_version() for s in samples), Counter[int]())
    present = sorted((v for v in count if v not in done), reverse=True)  # the weights of now come first
    held = [v for v in present if v == learner.version or v in past.versions]
    chosen = {v: few(samples, v, int(SHARE * computed) // len(held), start=learner.version) for v in held}
    gaps: dict[int, tuple[float, int]] = {}
    if chosen:
        packed = {v: pack(few_, [1.0] * len(few_), size, learner.ranks.shares) for v, few_ in chosen.items()}
        work = Shared((v, batch) for v, batches in packed.items() for batch in batches)
        for (version, batch), own in zip(work, past.logprobs(work), strict=True):
            apart, n = gaps.get(version, (0.0, 0))
            gaps[version] = apart + float((own - batch.logprobs).abs().sum()), n + len(own)
        gaps = {v: (apart / n, n) for v, (apart, n) in gaps.items()}
    figures = {"mismatch/unheld": sum(count[v] for v in present if v not in held) / max(sum(count.values()), 1)}
    if past.linears:
        figures["mismatch/rounding"] = known.get(learner.version, (nan, 0))[0]
    return Compared(done | gaps, figures)


def check(stats: Stats, gaps: Mapping[int, tuple[float, int]], version: int, most: float) -> None:
    """Store the figures of `gaps` (by version) and of each policy in `stats`. `version`: the learner's. Raises
    `BirlError` if any gap is above `most`."""
    stats.other["mismatch/tokens"] = float(sum(n for _, n in gaps.values()))
    stats.first_gap = sum(gap * n for gap, n in gaps.values()) / stats.other["mismatch/tokens"] if gaps else nan
    for each, (mean, _) in gaps.items():
        check_gap(mean, each, most)
    for own in (own for own in stats.of.values() if own.sums["fresh"]):  # none hides behind the others
        own.first_gap = own.sums["gap"] / own.sums["fresh"]
        check_gap(own.first_gap, version, most)


def check_gap(mean: float, version: int, most: float) -> None:
    """Raises `BirlError` if `mean` is above `most`. `mean`: gap between log-probs of engine and learner for the same
    tokens and weights [nats a token]."""
    if not mean <= most:
        raise BirlError(
            f"The engine's log-probs of tokens of version {version} differ from the learner's by {mean:.3g} nats a "
            f"token on average; learner.max_logprob_gap={most:g} is allowed. The engine does not sample from the "
            "weights that are trained."
        )


def few(samples: Sequence[Sample], version: int, room: int, start: int = 0) -> list[Sample]:
    """Select samples, cut after their last token of this version, of at most `room` tokens in all; if none fits, the
    first such tokens of a sample with few tokens before them. `start`: rotates the selection between steps."""
    own = [s for s in samples if version in s.versions]
    own = own[start % len(own) :] + own[: start % len(own)]
    result: list[Sample] = []
    for sample in own:
        if (end := end_of(sample, version)) <= room:
            result.append(upto(sample, version, end))
            room -= end
    if not result:
        first = [upto(s, version, end_of(s, version, FEWEST)) for s in own]
        result = [min(first, key=lambda s: (-int(s.mask.sum()), len(s.tokens)))]
    return [replace(s, group=number) for number, s in enumerate(result)]  # nothing in common


def end_of(sample: Sample, version: int, most: int | None = None) -> int:
    """End of the sample's last token of this version, or of the `most`-th one."""
    return int(np.flatnonzero(sample.versions == version)[:most][-1]) + 1


def upto(sample: Sample, version: int, end: int) -> Sample:
    """The sample's first `end` tokens, of which only those of this version are trained."""
    trained = np.flatnonzero(sample.mask)
    return Sample(
        tokens=sample.tokens[:end],
        mask=sample.versions[:end] == version,
        logprobs=sample.logprobs[:end],
        versions=sample.versions[:end],
        advantage=0.0,
        group=0,
        episode=0,
        routes=sample.routes[: len(sample.routes) // len(sample.tokens) * end],
        support=sample.support and sample.support.part((trained < end) & (sample.versions[trained] == version)),
    )
