"""One request on its way through a router, and how an answer that was cut short goes on."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from birl.engines.member import Member
from birl.errors import EngineDown
from birl.support import Support
from birl.types import Completion, SamplingParams, Stop

NOTHING = Completion.of((), (), (), Stop.ABORT)


@dataclass(slots=True, eq=False)
class Asked:
    """One request on its way. `part` is what engines that cut it short have answered so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    session: str
    cut: "asyncio.Future[None]"  # done: give back what there is, now
    part: Completion = NOTHING
    aborted: bool = False  # the router was asked to
    failures: list[str] = field(default_factory=list)
    avoid: set[Member] = field(default_factory=set)  # where it failed
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def rest(self, engine: str) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and parameters for what is missing. birl's engines take the part as `forced`, so that each later place
        keeps its random number; others get it as prompt, and another seed: the same would draw the same numbers. They
        would not see a stop string that begins in a prompt: an answer that has one begins again, with its own seed."""
        if engine != "birl" and self.params.stop:
            self.part = NOTHING
        done = self.part.ids
        if not done:
            return self.prompt, self.params
        if engine == "birl":
            return self.prompt, replace(self.params, forced=done + self.params.forced[len(done) :])
        left, forced = self.params.max_tokens - len(done), self.params.forced[len(done) :]
        seed = ((self.params.seed or 0) * 0x9E3779B1 + len(done)) % 2**31
        return self.prompt + done, replace(self.params, max_tokens=left, forced=forced, seed=seed)

    def join(self, engine: str, completion: Completion) -> Completion:
        """The part with its own log-probs and versions, then what is new. Raises `EngineDown` where the engine did not
        go on from the part."""
        n = len(self.part.tokens)
        skip = n if engine == "birl" else 0
        if skip and not np.array_equal(completion.tokens[:n], self.part.tokens[: len(completion.tokens)]):
            raise EngineDown("it did not begin with the tokens that were given")
        new = completion.support and completion.support.part(slice(skip, None))
        full = n + len(completion.tokens[skip:]) >= self.params.max_tokens
        return Completion(
            tokens=np.append(self.part.tokens, completion.tokens[skip:]),
            logprobs=np.append(self.part.logprobs, completion.logprobs[skip:]),
            versions=np.append(self.part.versions, completion.versions[skip:]),
            stop=Stop.LENGTH if full and completion.stop is Stop.ABORT else completion.stop,
            support=Support.joined([(self.part.support, n), (new, len(completion.tokens) - skip)]),
            cached=self.part.cached if n else completion.cached,
        )
