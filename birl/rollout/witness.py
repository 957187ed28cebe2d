"""Answers on their way from the engine to the episodes, a few of which are kept: the learner scores them while it still
has the weights that sampled them."""

from dataclasses import dataclass, replace

from birl.types import Completion, Engine, Sample, SamplingParams

KEPT = 32  # newest answers
SHARE = 0.05  # of a step's tokens that are scored: without a gradient, a token costs about a third


@dataclass(slots=True, kw_only=True)
class Witness:
    """Implements `birl.types.Engine` with another one. `temperature`: of the learner's log-probs. `exact`: after a
    change of the weights the engine computes keys and values anew, so that later tokens of an answer are of the new
    ones alone."""

    engine: Engine
    temperature: float
    exact: bool = True
    heard: tuple[tuple[tuple[int, ...], Completion], ...] = ()  # replaced, never changed: two threads look at it

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        found = await self.engine.generate(prompt_ids, params, session)
        plain = params.top_p >= 1 and not (params.top_k or params.min_p or params.forced)
        if found.tokens and plain and params.temperature == self.temperature:
            self.heard = (*self.heard[1 - KEPT :], (prompt_ids, found))
        return found

    async def close(self) -> None:
        await self.engine.close()

    def sampled(self, version: int, room: int, longest: int) -> list[Sample]:
        """Answers with tokens of this version, the newest first, of about `room` tokens with their prompts together,
        and at least one; each of at most `longest`."""
        fitting = [s for prompt, c in reversed(self.heard) if (s := self.sample(prompt, c, version)) is not None]
        fitting = [s for s in fitting if len(s.tokens) <= longest]
        found: list[Sample] = []
        for sample in fitting:
            if len(sample.tokens) <= room:
                found.append(sample)
                room -= len(sample.tokens)
        found = found or sorted(fitting, key=lambda s: len(s.tokens))[:1]
        return [replace(s, group=number) for number, s in enumerate(found)]  # nothing in common

    def sample(self, prompt: tuple[int, ...], answer: Completion, version: int) -> Sample | None:
        """None where no token of it can be scored."""
        own = [v == version for v in answer.versions]
        if not any(own) or not (self.exact or all(own)):
            return None
        before = len(prompt)
        size = len(answer.routes) // max(before + len(own) - 1, 1)
        return Sample(
            tokens=(*prompt, *answer.tokens),
            mask=(*(False,) * before, *own),
            logprobs=(*(0.0,) * before, *answer.logprobs),
            versions=(*(-1,) * before, *answer.versions),
            advantage=0.0,
            group=0,
            episode=0,
            routes=answer.routes.ljust(size * (before + len(own)), b"\xff"),  # no engine has computed the last one
        )
