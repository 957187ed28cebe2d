"""Canary: log-probs of engine and learner on a few prompts prove that the engine samples from the trained weights.

Digests show that the right bytes have arrived. The canary shows that they are used: no stale copy in another layout, no
missing adapter, no other kernel, no different tokenization.

    scored     the engine's log-probs of given tokens, and the learner's          no further apart than usual
    sampled    the engine's log-probs of sampled tokens, and of the same as given  no further apart than usual
    stale      the engine's lie where the learner's were, some versions ago or     that is no rounding
               before the run began or was resumed

The usual gap is that of the first check of a run, when all have the same weights and differ by rounding alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, nan, sqrt

import numpy as np
import torch

from birl.data.pack import Batch, pack
from birl.errors import Malformed, WeightsFailed
from birl.learner.learner import Learner
from birl.types import Completion, Engine, Sample, SamplingParams

LONGEST = 12  # the last tokens of a prompt that are used; all but the first are scored
DRAWN = 16  # tokens that are sampled after each prompt
TIMES = 5.0  # an engine may show this many times the gap of the first check
EXACT, ROUNDED = 5e-3, 0.03  # nats per token that are always allowed in float32 and in 16 bits (the effect of
# rounding on log-probs grows as a model sharpens: 0.0005 untrained and 0.005 after three steps was seen),
SPARSE = 0.04  # or this divided by the root of the number of tokens: the mean of a few is noisy
REMEMBERED = 4  # older versions that are recognised
NOTHING = 1e-5  # nats that log-probs must have moved by for two versions to be distinguished
SURE = 5.0  # standard errors at which a version counts as recognised


@dataclass(slots=True)
class Canary:
    """The canary of a learner. `prompts`: token ids, at least two each."""

    learner: Learner
    prompts: Sequence[tuple[int, ...]]
    max_gap: float
    expected: list[list[float]] = field(default_factory=list)  # log-probs of the scored tokens
    together: Callable[[list[Batch]], list[list[float]]] | None = (
        None  # `logprobs_of` on all ranks, where each has only parts of the weights
    )
    parts: int = 1  # shares of the ranks (data parallel)
    past: deque[list[list[float]]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # `expected`, newest first
    began: list[list[float]] = field(default_factory=list)  # `expected` of the weights that engines start with
    usual: float = 0.0  # largest gap of the first check [nats per token]

    def __post_init__(self) -> None:
        self.prompts = [p[-LONGEST:] for p in self.prompts if len(p) > 1]

    def begin(self) -> None:
        """Call before a checkpoint is loaded: a restarted engine has these weights until the first update."""
        self.began = self.learner_logprobs()

    def compute(self) -> None:
        """Store the learner's current log-probs, which engines are compared with (compute thread)."""
        result = self.learner_logprobs()
        if self.expected:
            self.past.appendleft(self.expected)
        self.began = self.began or result
        self.expected = result

    def learner_logprobs(self) -> list[list[float]]:
        """The learner's log-probs of the scored tokens at temperature 1, at which engines score given tokens."""
        samples = [
            Sample(
                tokens=np.array(ids, np.int32),
                mask=np.arange(len(ids)) > 0,
                logprobs=np.zeros(len(ids), np.float32),
                versions=np.full(len(ids), -1, np.int32),
                advantage=0.0,
                group=number,
                episode=0,
            )
            for number, ids in enumerate(self.prompts)
        ]
        result: list[list[float]] = [[] for _ in samples]
        batches = pack(samples, [1.0] * len(samples), LONGEST * 4, parts=self.parts)
        ask = self.together or partial(logprobs_of, self.learner)
        for batch, values in zip(batches, ask(batches), strict=True):
            for sample, value in zip(batch.group.tolist(), values, strict=True):
                result[sample].append(value)
        return result

    async def check(self, engine: Engine, name: str) -> float:
        """Mean |engine - learner| of one engine [nats per token], NaN without prompts. Raises `WeightsFailed` if it is
        too large, or if the engine computes with older weights or reports other log-probs when sampling."""
        if not self.prompts:
            return nan
        # concurrently: one after the other, each request would wait for steps of a busy engine
        heard, drawn = await asyncio.gather(
            asyncio.gather(*(self.scored(engine, name, ids) for ids in self.prompts)),
            asyncio.gather(*(self.drawn(engine, name, ids) for ids in self.prompts)),
        )
        pairs = [
            pair for own, wanted in zip(heard, self.expected, strict=True) for pair in zip(own, wanted, strict=True)
        ]
        gap, most = _mean(pairs), self.allowed(len(pairs))
        those = self.stale([value for own in heard for value in own])
        if those:
            raise WeightsFailed(
                "stale",
                f"{name} has the right weights by name, and computes with those {those}: its "
                f"log-probs are {gap:.3g} nats a token from the learner's of now, and lie where those were.",
            )
        if not gap <= most:
            raise WeightsFailed(
                "numbers",
                f"{name} has the right weights by name, and computes other log-probs than the learner: {gap:.3g} nats "
                f"a token apart, {self.why(most)} is allowed. It uses a stale copy, leaves an adapter out, or its "
                "kernels compute something else.",
            )
        pairs = [pair for pairs_of_one in drawn for pair in pairs_of_one or ()]
        if not any(pairs_of_one is None or pairs_of_one for pairs_of_one in drawn):
            raise WeightsFailed("numbers", f"{name} samples no tokens, though it may not stop before {DRAWN}.")
        own, most = _mean(pairs), self.allowed(len(pairs))
        if not own <= most:
            raise WeightsFailed(
                "numbers",
                f"{name} reports other log-probs for the tokens that it samples than for the same tokens given: "
                f"{own:.3g} nats a token apart, {self.why(most)} is allowed. Training would take the wrong ones for "
                "true.",
            )
        if not self.past:
            self.usual = max(self.usual, gap, own)
        return gap

    async def scored(self, engine: Engine, name: str, ids: tuple[int, ...]) -> list[float]:
        """The engine's log-probs of a prompt's scored tokens."""
        return (await self.given(engine, name, ids[:1], ids[1:])).logprobs.tolist()

    async def drawn(self, engine: Engine, name: str, ids: tuple[int, ...]) -> list[tuple[float, float]] | None:
        """Log-probs of tokens that the engine samples after a prompt: as reported while sampling, and when they are
        given. None if its weights change in between."""
        params = SamplingParams(max_tokens=DRAWN, ignore_eos=True, seed=0)
        answer = await answered(engine, name, ids, params)
        # not every engine can score an answer to its end if it reaches the end of the context
        tokens = answer.ids[: None if len(answer.tokens) == DRAWN else -1]
        if not tokens:
            return []
        again = await self.given(engine, name, ids, tokens)
        if len({*answer.versions, *again.versions}) > 1:
            return None
        return list(zip(answer.logprobs.tolist(), again.logprobs.tolist(), strict=False))

    async def given(self, engine: Engine, name: str, ids: tuple[int, ...], tokens: tuple[int, ...]) -> Completion:
        params = SamplingParams(max_tokens=len(tokens), forced=tokens, ignore_eos=True, seed=0)
        answer = await answered(engine, name, ids, params)
        if answer.ids != tokens:
            raise WeightsFailed("mismatch", f"{name} was given {len(tokens)} tokens to score and scored others.")
        return answer

    def allowed(self, count: int) -> float:
        """Largest allowed mean gap over `count` tokens [nats]."""
        if not self.past:
            return self.max_gap
        least = EXACT if self.learner.dtype == torch.float32 else ROUNDED
        return min(self.max_gap, max(least, SPARSE / sqrt(max(count, 1)), TIMES * self.usual))

    def why(self, most: float) -> str:
        if most == self.max_gap:
            return f"weights.max_gap={most:g}"
        return f"{most:.3g} by the first proof of this run, which showed {self.usual:.3g},"

    def stale(self, heard: list[float]) -> str:
        """The older version that the engine's log-probs match, in words; empty if it is up to date, or unclear.

        Of e = engine - now and p = past - now, the share of p in e is c = <e, p> / <p, p>: 0 for an engine that is up
        to date, 1 for one that is not. Rounding moves it by about |e - c p| / (|p| sqrt(N)), of N tokens.
        """
        now = [value for values in self.expected for value in values]
        best, result = inf, ""
        earlier = {f"of {ago} updates before": past for ago, past in enumerate(self.past, start=1)}
        for when, past in {**earlier, "that the run began with": self.began}.items():
            moved = [before - value for before, value in zip((v for vs in past for v in vs), now, strict=True)]
            apart = [value - other for value, other in zip(heard, now, strict=True)]
            size = sum(p * p for p in moved)
            if size == 0:
                continue
            share = sum(e * p for e, p in zip(apart, moved, strict=True)) / size
            left = sum((e - share * p) ** 2 for e, p in zip(apart, moved, strict=True))
            error = sqrt(left / size / len(now))
            if share > max(0.5, SURE * error) and sqrt(size / len(now)) > NOTHING and left < best:
                best, result = left, when
        return result


async def answered(engine: Engine, name: str, ids: tuple[int, ...], params: SamplingParams) -> Completion:
    """The engine's answer. Raises `WeightsFailed` if it is malformed: without a retry, which would be no better."""
    try:
        return (await engine.generate(ids, params)).possible()
    except Malformed as error:
        raise WeightsFailed("mismatch", f"{name} gives the canary no answer: {error}") from error
    except ValueError as error:
        raise WeightsFailed("numbers", f"{name}: {error}.") from error


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(abs(a - b) for a, b in pairs) / max(len(pairs), 1)


def logprobs_of(learner: Learner, batches: list[Batch]) -> list[list[float]]:
    """(every rank) Log-probs of the trained tokens of each batch at temperature 1."""
    before, learner.outputs.temperature = learner.outputs.temperature, 1.0
    try:
        return [values.tolist() for values in learner.ranks.each(batches, learner.forward)]
    finally:
        learner.outputs.temperature = before
