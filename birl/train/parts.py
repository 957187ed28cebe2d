"""All objects of one training run."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from birl.config import schema
from birl.config.rules_algorithm import CRITIC
from birl.data.pack import Batch
from birl.data.tasks import Tasks
from birl.engine.engine import Counters, EmbeddedEngine
from birl.engine.policy import DTYPES, Policy
from birl.engines.servers import Servers
from birl.engines.spread import Spread
from birl.learner.learner import Learner
from birl.learner.writer import Writer
from birl.models.device import device_of
from birl.models.forward import weights_changed
from birl.models.load import cast
from birl.models.slices import fill, sketched
from birl.parallel.crew import Crew
from birl.parallel.shard import drop_gathered
from birl.rollout.assemble import Usage
from birl.rollout.group import Rollout
from birl.seeds import derive_seed
from birl.server.serve import hosted, service_of
from birl.text.chat import Chat
from birl.track.tracker import Tracker
from birl.train.credit import Credit
from birl.train.evaluate import Plan, data_digest
from birl.train.objective import Objective
from birl.train.rewards import Progress
from birl.train.tasks import stream
from birl.types import Sample, SamplingParams, Task
from birl.weights.canary import said
from birl.weights.publish import Publisher

NOT_HERE: Any = None  # of a rank that does not lead


@dataclass(kw_only=True)
class Parts:
    """All objects of one training run."""

    config: schema.RL
    run: Path
    policy: Policy
    learner: Learner
    reference: Learner | None
    critic: Learner | None
    objective: Objective
    credit: Credit
    crew: Crew
    writer: Writer = field(default_factory=Writer)
    copy: nn.Module | None = None  # the engine's own weights, and the learner's version that they are of
    copied: int = 0
    # rank 0 alone has these
    engine: EmbeddedEngine | Spread | Servers = NOT_HERE
    rollout: Rollout = NOT_HERE
    params: SamplingParams = NOT_HERE
    train: list[Tasks] = field(default_factory=list)
    plan_validation: Plan | None = None
    tracker: Tracker = NOT_HERE
    publisher: Publisher = NOT_HERE
    resume_from: Path | None = None
    total_steps: int | None = None
    progress: Progress = field(default_factory=Progress)
    counted: Counters = field(default_factory=Counters)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def sampled(self) -> nn.Module:
        """The module that the embedded engine samples from."""
        return self.copy or self.learner.model

    @property
    def usage(self) -> Usage:
        return self.credit.usage

    @property
    def chat(self) -> Chat:
        return self.policy.chat

    @property
    def compute(self) -> Executor:
        return self.policy.compute

    @property
    def total_updates(self) -> int | None:
        return (
            self.total_steps
            and self.total_steps * self.config.algorithm.updates_per_batch * self.config.algorithm.passes
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        found = self.learner.tensors()
        if self.critic is not None:
            found |= {f"critic.{name}": tensor for name, tensor in self.critic.tensors().items()}
        return found

    def loaded(self, version: int) -> None:
        self.learner.loaded(version)
        if self.critic is not None:
            self.critic.loaded(version)

    def sampler(self, context: int, longest: int) -> EmbeddedEngine:
        """An engine that samples from the learner's weights; where they are split over ranks, from a copy."""
        keys, policy, learner = self.config, self.policy, self.learner
        among = self.crew.ranks.shares if device_of(policy.model).type == "cpu" else 1
        if not self.crew.ranks.sharded:
            return policy.engine(keys.engine, context, lambda: learner.version, longest, replays(keys), among)
        self.copy = cast(sketched(policy.folder, device_of(policy.model)), DTYPES[keys.model.dtype])
        fill(self.copy.requires_grad_(False))
        own = replace(policy, model=self.copy)
        return own.engine(keys.engine, context, lambda: self.copied, longest, replays(keys), among)

    def host(self, token: str, context: int, longest: int) -> list[str]:
        """(every rank) The first rank of every data-parallel group but rank 0's serves an engine; their addresses."""
        address = ""
        if not self.crew.leads and self.crew.ranks.first:
            engine = self.sampler(context, longest)
            address = hosted(service_of(self.policy, engine, token, self.config.model.dtype))
            print(f"birl: rank {self.crew.ranks.rank} samples, too, at {address}", flush=True)
        return [a for a in self.crew.gather(address) if a]

    @torch.no_grad()
    def refresh(self) -> None:
        """(every rank) The engines' own weights become the learner's, one after the other."""
        copies = {} if self.copy is None else dict(self.copy.named_parameters())
        for name, parameter in self.learner.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if name in copies:
                copies[name].copy_(whole)
        if self.copy is not None:
            weights_changed(self.copy)
        self.copied = self.learner.version

    @torch.no_grad()
    def gathered(self, names: Sequence[str]) -> list[torch.Tensor]:
        """(every rank) Weights as the engines have them, whole on rank 0, nothing elsewhere."""
        drop_gathered(self.learner.outputs)
        parameters, found = dict(self.learner.model.named_parameters()), []
        for name in names:
            weight = parameters[name].to(DTYPES[self.config.model.dtype])
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if self.crew.leads:
                found.append(whole)
        return found

    def said(self, batches: list[Batch]) -> list[list[float]]:
        """(every rank) What engines are compared with."""
        return said(self.learner, batches)

    def has_gradient(self, sample: Sample) -> bool:
        """Samples that have none need not go through the model."""
        if self.config.debug.only_rollout:
            return False
        keys = self.config.algorithm
        ranked = keys.entropy_control != "none"  # all tokens of the step are compared
        everything = ranked or keys.advantage in CRITIC or keys.entropy_coef > 0 or self.objective.needs_reference()
        own = sample.advantage
        return everything or (any(own) if isinstance(own, tuple) else own != 0)

    @cached_property
    def validation_digest(self) -> str:
        """Of the questions that are validated on."""
        return data_digest(self.plan_validation.tasks if self.plan_validation else ())

    @property
    def validation_rollout(self) -> Rollout:
        """The same but for its seed: validation draws other numbers than training."""
        return replace(self.rollout, seed=derive_seed(self.config.seed, -1))

    def stream(self, position: int) -> Iterator[Task]:
        return stream(self.config, self.train, position)

    def take_counters(self) -> Counters:
        """What the engine did since the last call."""
        now = self.engine.counters
        taken = Counters(*(getattr(now, f.name) - getattr(self.counted, f.name) for f in fields(Counters)))
        self.counted = replace(now)
        return taken

    async def close(self) -> None:
        await asyncio.to_thread(self.writer.finish)
        await self.opened.aclose()
        self.tracker.close()


def replays(config: schema.RL | schema.Stage) -> bool:
    return isinstance(config, schema.RL) and config.algorithm.router_replay == "rollout"
