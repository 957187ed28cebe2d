"""Log-probs of whole answers, and those of the reference that a preference loss compares with: a frozen copy of the
first weights, or what they gave before the first step (preference.reference=live, precomputed)."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from birl.algorithms.segments import starts, totals
from birl.data.examples import Example
from birl.data.pack import Batch, pack
from birl.data.sequences import Tokens
from birl.learner.learner import Learner
from birl.learner.lora import digest
from birl.regular import read_json, write_whole
from birl.types import Sample


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers in a micro-batch, in order: which of the step it is, its sum of log-probs, its tokens."""

    number: Tensor  # [A]
    total: Tensor  # [A] float32
    length: Tensor  # [A]
    weight: Tensor  # [A]

    @property
    def mean(self) -> Tensor:
        return self.total / self.length


def answers(logp: Tensor, batch: Batch) -> Answers:
    """Log-probs of trained tokens [N] -> of answers [A]."""
    first, length = starts(batch.sample), totals(torch.ones_like(batch.sample), batch.sample)
    return Answers(batch.sample[first], totals(logp, batch.sample), length, batch.weights[first])


@dataclass(slots=True, kw_only=True)
class Reference:
    """Sums of log-probs, of each answer. Zeros where there is neither `frozen` nor anything `known`."""

    trained: Learner
    frozen: Learner | None
    capacity: int  # tokens of a micro-batch
    pair_cost: float
    known: dict[str, list[float]] = field(default_factory=dict)  # tokens of an example -> the sum of each answer

    def sums(self, learner: Learner, samples: Sequence[Sample]) -> Tensor:
        """Under a learner's weights, [samples] float32, no gradient: so one that is longer than a micro-batch (KTO's
        prompt with the answer of another) has its own."""
        sums = torch.empty(len(samples), dtype=torch.float32)
        capacity = max([self.capacity, *(len(s.tokens) for s in samples)])
        batches = pack(samples, [0.0] * len(samples), capacity, learner.ranks.shares, self.pair_cost)
        for batch, logp in zip(batches, learner.each(batches, learner.forward), strict=True):
            a = answers(logp.cpu(), batch)
            sums[a.number] = a.total
        return sums

    def of(self, batches: Sequence[Batch], examples: Sequence[Example]) -> list[Tensor]:
        """[A] for each micro-batch: the sum of each of its answers."""
        if self.frozen is not None:
            logps = self.frozen.each(batches, self.frozen.forward)
            return [answers(logp.cpu(), batch).total for batch, logp in zip(batches, logps, strict=True)]
        each = [answers(batch.logprobs, batch) for batch in batches]
        if self.known:
            sums = torch.tensor([x for e in examples for x in self.known[_identity(e)]], dtype=torch.float32)
            return [sums[a.number] for a in each]
        return [torch.zeros_like(a.total) for a in each]

    def precompute(self, examples: Sequence[Example], rows: int, run: Path | None) -> None:
        """The sums of all answers under the weights of now, `rows` at a time; once for a run: they are in its folder.
        (every rank)"""
        by_name, ranks = {_identity(e): e for e in examples}, self.trained.ranks
        file, mark = None if run is None else run / "reference.json", self._mark(by_name)
        stored = read_json(file) if ranks.rank == 0 and file is not None and file.is_file() else {}
        self.known = ranks.told(stored["sums"] if stored.get("of") == mark else {})
        if not self.known:
            names, different = list(by_name), list(by_name.values())
            for start in range(0, len(different), rows):
                part = different[start : start + rows]
                sums = iter(self.sums(self.trained, samples_of(part)).tolist())
                for name, example in zip(names[start:], part, strict=False):
                    self.known[name] = [next(sums) for _ in example.sequences]
            if file is not None and ranks.rank == 0:
                write_whole(file, json.dumps({"of": mark, "sums": self.known}).encode())

    def _mark(self, names: Iterable[str]) -> str:
        """What the sums belong to: these weights and these rows."""
        mark = hashlib.sha256(digest(self.trained.model))
        for name in names:
            mark.update(name.encode())
        return mark.hexdigest()


def samples_of(examples: Sequence[Example]) -> list[Sample]:
    """One for each answer; those of a row share a group."""
    return [s.sample(group=i) for i, e in enumerate(examples) for s in e.sequences]


def mismatched(examples: Sequence[Example], limit: int) -> list[Sample]:
    """Each prompt with the answer of the next row, the last with that of the first; of each the first `limit`
    tokens."""
    result = []
    for n, (row, other) in enumerate(zip(examples, [*examples[1:], *examples[:1]], strict=True)):
        for i, own in enumerate(row.sequences):
            answer = other.sequences[min(i, len(other.sequences) - 1)]
            before, after = own.mask.index(1), answer.mask.index(1)
            ids, mask = own.ids[:before] + answer.ids[after:], bytes(before) + answer.mask[after:]
            result.append(Tokens(ids=ids[:limit], mask=mask[:limit]).sample(group=n))
    return result


def _identity(example: Example) -> str:
    """Of an example's tokens. Its id will not do: rows of data.train and data.validation may have the same."""
    identity = hashlib.sha256()
    for side in example.sequences:
        identity.update(side.ids.tobytes() + side.mask + b"|")
    return identity.hexdigest()
