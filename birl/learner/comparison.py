"""Engine against learner: a few tokens of every version of the weights that a step trains on, scored under the weights
that sampled them. Tokens of the current version are compared by the loss itself, at no cost."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from birl.data.pack import pack
from birl.learner.past import Past
from birl.types import Sample

KEPT = 4  # versions before the current one whose weights stay in memory
SHARE = 0.02  # of a step's tokens that are scored: without a gradient, a token costs about a third
FEWEST = 8  # tokens of an answer that are looked at where nothing fits into that


@dataclass(frozen=True, slots=True)
class Compared:
    """gaps: by version, the mean |engine log-prob - learner log-prob| [nats] and of how many tokens. unheld: trained
    tokens of versions whose weights are gone."""

    gaps: dict[int, tuple[float, int]] = field(default_factory=dict)
    unheld: int = 0


def compare(past: Past, samples: Sequence[Sample], computed: int, done: Collection[int], size: int) -> Compared:
    """(every rank) The versions among the samples' tokens but those of `done`, of `computed` tokens in the step; a
    sequence has at most `size` tokens."""
    learner = past.learner
    present = sorted({v for s in samples for v in s.versions if v >= 0} - set(done))
    held = [v for v in present if v == learner.version or v in past.versions]
    chosen = {v: few(samples, v, int(SHARE * computed) // len(held), start=learner.version) for v in held}
    gaps: dict[int, tuple[float, int]] = {}
    if chosen:
        with past.instead() as put:
            for version, few_ in chosen.items():
                if version != learner.version:
                    put(version)
                batches = pack(few_, [1.0] * len(few_), size, learner.ranks.shares)
                said = [values.cpu() for values in learner.each(batches, learner.forward)]
                apart = sum(float((own - b.logprobs).abs().sum()) for b, own in zip(batches, said, strict=True))
                count = sum(map(len, said))
                gaps[version] = apart / count, count
    return Compared(gaps, sum(v in set(present) - set(held) for s in samples for v in s.versions))


def few(samples: Sequence[Sample], version: int, room: int, start: int = 0) -> list[Sample]:
    """Samples up to their last token of this version, of at most `room` tokens in all; where none fits, the first
    tokens of one that has few before them. `start`: each step begins with others."""
    own = [upto(s, version) for s in samples if version in s.versions]
    own = own[start % len(own) :] + own[: start % len(own)]
    found: list[Sample] = []
    for sample in own:
        if len(sample.tokens) <= room:
            found.append(sample)
            room -= len(sample.tokens)
    found = found or [min((upto(s, version, FEWEST) for s in own), key=lambda s: (-sum(s.mask), len(s.tokens)))]
    return [replace(s, group=number) for number, s in enumerate(found)]  # nothing in common


def upto(sample: Sample, version: int, most: int | None = None) -> Sample:
    """As far as its last token of this version, or the `most`-th; no others are trained."""
    end = [n for n, v in enumerate(sample.versions) if v == version][:most][-1] + 1
    return Sample(
        tokens=sample.tokens[:end],
        mask=tuple(v == version for v in sample.versions[:end]),
        logprobs=sample.logprobs[:end],
        versions=sample.versions[:end],
        advantage=0.0,
        group=0,
        episode=0,
        routes=sample.routes[: len(sample.routes) // len(sample.tokens) * end],
    )
