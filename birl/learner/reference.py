"""Log-probs of whole answers, under the policy and under the reference of a preference loss: a frozen copy of the
initial weights, or log-probs computed with them before the first step (preference.reference=live, precomputed)."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birl.algorithms.segments import starts, totals
from birl.data.examples import Example
from birl.data.pack import Batch
from birl.data.sequences import Tokens
from birl.learner.lora import digest
from birl.parallel.ranks import Packer, Shared
from birl.regular import read_json, write_whole
from birl.types import Sample


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers in a micro-batch, in order: number within the step, sum of log-probs, tokens."""

    number: Tensor  # [A]
    total: Tensor  # [A] float32
    length: Tensor  # [A]
    weight: Tensor  # [A]

    @property
    def mean(self) -> Tensor:
        return self.total / self.length


def answers(logp: Tensor, batch: Batch) -> Answers:
    """Sum the log-probs of trained tokens [N] by answer [A]."""
    first, length = starts(batch.sample), totals(torch.ones_like(batch.sample), batch.sample)
    return Answers(batch.sample[first], totals(logp, batch.sample), length, batch.weights[first])


#: micro-batches -> log-probs of their trained tokens
BatchScorer = Callable[[Sequence[Batch]], list[Tensor]]


@dataclass(slots=True, kw_only=True)
class Reference:
    """(rank 0) Sum of log-probs of each answer under the current weights (`now`) and the initial ones (`first`). The
    reference is 0 if there is neither `first` nor anything `known`."""

    pack: Packer
    now: BatchScorer
    first: BatchScorer | None
    weights: Callable[[Sequence[Any]], list[Tensor]]  # digest of the current weights
    known: dict[str, list[float]] = field(default_factory=dict)  # tokens of an example -> the sum of each answer

    def gains(self, samples: Sequence[Sample]) -> Tensor:
        """Log-ratio of each sample, current minus initial sum of log-probs, [samples] float32, without gradient."""
        batches = self._packed(samples)
        gained = _sums(batches, self.now(batches), len(samples))
        return gained if self.first is None else gained - _sums(batches, self.first(batches), len(samples))

    def of(self, batches: Sequence[Batch], examples: Sequence[Example]) -> list[Tensor]:
        """Reference sum of each answer, [A] for each micro-batch."""
        if self.first is not None:
            logps = self.first(batches)
            return [answers(logp.cpu(), batch).total for batch, logp in zip(batches, logps, strict=True)]
        each = [answers(batch.logprobs, batch) for batch in batches]
        if self.known:
            sums = torch.tensor([x for e in examples for x in self.known[_identity(e)]], dtype=torch.float32)
            return [sums[a.number] for a in each]
        return [torch.zeros_like(a.total) for a in each]

    def precompute(self, examples: Sequence[Example], rows: int, run: Path | None) -> None:
        """Compute the sums of all answers under the current weights, `rows` at a time; once for a run: its folder keeps
        them."""
        by_name = {_identity(e): e for e in examples}
        file, mark = None if run is None else run / "reference.json", self._mark(by_name)
        self.known = {} if file is None else _stored(file, mark)
        if not self.known:
            names, different = list(by_name), list(by_name.values())
            for start in range(0, len(different), rows):
                part = different[start : start + rows]
                samples = samples_of(part)
                batches = self._packed(samples)
                sums = iter(_sums(batches, self.now(batches), len(samples)).tolist())
                for name, example in zip(names[start:], part, strict=False):
                    self.known[name] = [next(sums) for _ in example.sequences]
            if file is not None:
                about = {"of": mark, "sha256": _digest(self.known), "sums": self.known}
                write_whole(file, json.dumps(about).encode())

    def _packed(self, samples: Sequence[Sample]) -> Shared[Batch]:
        """Micro-batches for sums without a gradient. They may be larger than usual, for a sample longer than a
        micro-batch (KTO's prompt with the answer of another row)."""
        capacity = max([self.pack.capacity, *(len(s.tokens) for s in samples)])
        return replace(self.pack, capacity=capacity)(samples, [0.0] * len(samples))

    def _mark(self, names: Iterable[str]) -> str:
        """Digest of the weights and rows that the sums belong to."""
        mark = hashlib.sha256(bytes(self.weights(())[0].tolist()))
        for name in names:
            mark.update(name.encode())
        return mark.hexdigest()


def _stored(file: Path, mark: str) -> dict[str, list[float]]:
    """The sums in a file, if they belong to `mark`; none, after a warning, if it is damaged."""
    try:
        stored = read_json(file)
        if stored["sha256"] != _digest(stored["sums"]):
            raise ValueError
        return stored["sums"] if stored["of"] == mark else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        print(f"WARNING: {file} is damaged; the log-probs of the reference are computed again.", flush=True)
        return {}


def _digest(sums: object) -> str:
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def _sums(batches: Sequence[Batch], logprobs: Sequence[Tensor], count: int) -> Tensor:
    """Sum of log-probs of each of `count` answers, [count] float32."""
    sums = torch.empty(count, dtype=torch.float32)
    for batch, logp in zip(batches, logprobs, strict=True):
        a = answers(logp.cpu(), batch)
        sums[a.number] = a.total
    return sums


def weights_of(model: nn.Module) -> list[Tensor]:
    """(every rank) Digest of its weights, [32] uint8."""
    return [torch.tensor([*digest(model)], dtype=torch.uint8)]


def samples_of(examples: Sequence[Example]) -> list[Sample]:
    """Return one sample for each answer; those of a row share a group."""
    return [s.sample(group=i) for i, e in enumerate(examples) for s in e.sequences]


def mismatched(examples: Sequence[Example], limit: int) -> list[Sample]:
    """Return each prompt with the answer of the next row (the last prompt with the first row's), cut to `limit`
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
    """Digest of an example's tokens. Its id is not unique: rows of data.train and data.validation may share one."""
    identity = hashlib.sha256()
    for side in example.sequences:
        identity.update(side.ids.tobytes() + side.mask + b"|")
    return identity.hexdigest()
