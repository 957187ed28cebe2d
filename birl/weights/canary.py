"""A few prompts that engine and learner both give log-probs for: the proof that what samples is what is trained.

Digests show that the right bytes are there. The canary shows that they are used: no stale copy in another layout, no
adapter left out, no other kernel, no tokens that were taken apart and put together differently.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from birl.data.pack import Batch, pack
from birl.errors import WeightsFailed
from birl.learner.learner import Learner
from birl.types import Engine, Sample, SamplingParams

LONGEST = 256  # tokens of a prompt that are used


@dataclass(slots=True)
class Canary:
    """`prompts`: token ids, at least two each. The second half of each is scored given the first."""

    learner: Learner
    prompts: Sequence[tuple[int, ...]]
    max_gap: float
    expected: list[list[float]] = field(default_factory=list)  # log-probs of the second halves
    together: Callable[[list[Batch]], list[list[float]]] | None = None  # `said` of all ranks, where each has parts
    parts: int = 1  # shares of the ranks

    def __post_init__(self) -> None:
        self.prompts = [p[:LONGEST] for p in self.prompts if len(p) > 1]

    def compute(self) -> None:
        """What the learner says now (compute thread). At temperature 1: engines score given tokens at that."""
        samples = [
            Sample(
                tokens=ids,
                mask=tuple(i >= _half(ids) for i in range(len(ids))),
                logprobs=(0.0,) * len(ids),
                versions=(-1,) * len(ids),
                advantage=0.0,
                group=number,
                episode=0,
            )
            for number, ids in enumerate(self.prompts)
        ]
        found: list[list[float]] = [[] for _ in samples]
        batches = pack(samples, [1.0] * len(samples), LONGEST * 4, parts=self.parts)
        ask = self.together or partial(said, self.learner)
        for batch, values in zip(batches, ask(batches), strict=True):
            for sample, value in zip(batch.group.tolist(), values, strict=True):
                found[sample].append(value)
        self.expected = found

    async def check(self, engine: Engine, name: str) -> float:
        """Mean |engine - learner| of one engine [nats a token]. Raises `WeightsFailed` where it is too large."""

        async def one(ids: tuple[int, ...], expected: list[float]) -> tuple[float, int]:
            given = ids[_half(ids) :]
            params = SamplingParams(max_tokens=len(given), forced=given, ignore_eos=True, seed=0)
            answer = await engine.generate(ids[: _half(ids)], params)
            if answer.tokens != given:
                raise WeightsFailed("mismatch", f"{name} was given {len(given)} tokens to score and scored others.")
            return sum(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)), len(given)

        # all at once: one after the other, each would wait for the steps of a busy engine anew
        found = await asyncio.gather(*map(one, self.prompts, self.expected))
        total, count = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0)
        gap = total / max(count, 1)
        if not gap <= self.max_gap:
            raise WeightsFailed(
                "numbers",
                f"{name} has the right weights by name, and computes other log-probs than the learner: {gap:.3g} nats "
                f"a token apart, weights.max_gap={self.max_gap:g} is allowed. It uses a stale copy, leaves an adapter "
                "out, or its kernels compute something else.",
            )
        return gap


def said(learner: Learner, batches: list[Batch]) -> list[list[float]]:
    """(every rank) Log-probs at temperature 1."""
    before, learner.outputs.temperature = learner.outputs.temperature, 1.0
    try:
        return [values.tolist() for values in learner.each(batches, learner.forward)]
    finally:
        learner.outputs.temperature = before


def _half(ids: tuple[int, ...]) -> int:
    return max(len(ids) // 2, 1)
