"""Engine against learner: a few tokens of every version of the weights that a step trains on, scored under the weights
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
#: nats a token that right engines and learners stay below: birl's differ by less than 1e-5 in float32; in bfloat16 by
#: 0.04 with published models, and by 0.43 with large random weights in two implementations
GAPS = {"float32": 0.002, "bfloat16": 0.5}
FEWEST = 8  # tokens of an answer that are looked at where nothing fits into that


class Past:
    """(every rank) Weights of at most `most` versions before the current one, in CPU memory: a copy of the trained
    weights for each, in the type that the module holds them in. Each rank has the parts that are its own.
    `int8`: what samples is these weights in int8, so scores are under that.
    `logprobs`, on rank 0: of micro-batches that are `Shared`, each under the weights of a version; equally many of each
    version for every share."""

    def __init__(self, learner: Learner, most: int, crew: RankGroup | None = None, int8: bool = False) -> None:
        self.learner, self.most = learner, most
        self.linears = list(quantizable(learner.model).values()) if int8 else []
        self.logprobs = self._logprobs if crew is None else crew.everywhere(self._logprobs)
        self.versions: dict[int, list[Tensor]] = {}
        trained = [p for p in learner.model.parameters() if p.requires_grad]
        # of what is quantised only what LoRA trains changes
        self.parameters = [t for p in trained for t in (p.master.tensors().values() if p.is_meta else (p,))]  # pyright: ignore
        # where parameters may point to other memory, without a copy
        self.plain = not learner.ranks.sharded and learner.device.type == "cpu"

    @property
    def compares(self) -> bool:
        """Are there tokens that the loss does not compare: of older weights, or of weights in int8?"""
        return self.most > 0 or bool(self.linears)

    @torch.no_grad()
    def keep(self) -> None:
        """The weights as they are now; the oldest of too many go."""
        if self.most and self.learner.version not in self.versions:
            self.versions[self.learner.version] = self._copies()
        for version in sorted(self.versions)[: -self.most or None]:
            del self.versions[version]

    @contextmanager
    def instead(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that puts the weights of a kept version, or those of now, into the module (compute thread,
        between two steps of an engine). At the end those of now are back, bit for bit."""
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
    """This rank's part of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


@dataclass(frozen=True, slots=True)
class Compared:
    """gaps: by version, the mean |engine log-prob - learner log-prob| [nats] and of how many tokens. figures: the share
    of trained tokens of versions whose weights are gone, and what rounding to int8 changes [nats]."""

    gaps: dict[int, tuple[float, int]]
    figures: dict[str, float]


def compare(
    past: Past, samples: Sequence[Sample], computed: int, known: Mapping[int, tuple[float, int]], size: int
) -> Compared:
    """(rank 0) The versions among the samples' tokens, of `computed` tokens in the step; a sequence has at most `size`
    tokens. `known`: what the loss has compared already, which is with the weights before they are rounded."""
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
    """The figures of `gaps`, by version, and of each policy's own. `version`: of the learner. Raises `BirlError` above
    `most` of any."""
    stats.other["mismatch/tokens"] = float(sum(n for _, n in gaps.values()))
    stats.first_gap = sum(gap * n for gap, n in gaps.values()) / stats.other["mismatch/tokens"] if gaps else nan
    for each, (mean, _) in gaps.items():
        check_gap(mean, each, most)
    for own in (own for own in stats.of.values() if own.sums["fresh"]):  # none hides behind the others
        own.first_gap = own.sums["gap"] / own.sums["fresh"]
        check_gap(own.first_gap, version, most)


def check_gap(mean: float, version: int, most: float) -> None:
    """`mean`: between the log-probs of engine and learner, of the same tokens and weights [nats a token]. Raises
    `BirlError` above `most`."""
    if not mean <= most:
        raise BirlError(
            f"The engine's log-probs of tokens of version {version} differ from the learner's by {mean:.3g} nats a "
            f"token on average; learner.max_logprob_gap={most:g} is allowed. The engine does not sample from the "
            "weights that are trained."
        )


def few(samples: Sequence[Sample], version: int, room: int, start: int = 0) -> list[Sample]:
    """Samples up to their last token of this version, of at most `room` tokens in all; where none fits, the first
    tokens of one that has few before them. `start`: each step begins with others."""
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
    """Where its last token of this version ends, or the `most`-th."""
    return int(np.flatnonzero(sample.versions == version)[:most][-1]) + 1


def upto(sample: Sample, version: int, end: int) -> Sample:
    """Its first `end` tokens, of which those of this version alone are trained."""
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
