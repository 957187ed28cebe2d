"""One step of reinforcement learning, as every rank computes it: groups -> advantages -> samples -> batches -> update.

`RLWorker.learn` is the algorithm between a group and a gradient; rank 0 calls it for each step (`rl.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from math import nan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.algorithms.kl import AdaptiveKL, FixedKL
from birl.algorithms.reduce import DENOMINATORS
from birl.data.pack import Batch, pack, packing
from birl.engine.engine import EmbeddedEngine
from birl.engine.sampled import Sampled
from birl.learner.comparison import Past, check_gap, compare
from birl.learner.critic import critic_loss
from birl.learner.learner import Learner, Stats
from birl.learner.policy import DTYPES, Policy
from birl.learner.token_figures import Key, Watch
from birl.parallel.layout import drop_gathered
from birl.rollout import assemble
from birl.rollout.ages import Ages
from birl.seeds import derive_seed
from birl.train.credit import Credit, Credited
from birl.train.objective import Objective
from birl.train.worker import Worker
from birl.types import Group, Sample
from birl.weights.canary import logprobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """How a batch of rollouts becomes optimizer steps: `parts` of the batch, one step each, `passes` times over.
    `capacity`: tokens of a micro-batch; `shares`: data-parallel ranks; `everything`: samples with advantage 0 have a
    gradient, too; `observations`: what an environment wrote is predicted; `max_gap`: between the log-probs of engine
    and learner [nats]; `critic_only`: the first steps, in which the policy stays; `rollouts_only`: nothing is trained;
    `league`: steps between versions that are kept."""

    seed: int
    parts: int
    passes: int
    denominator: str
    max_tokens: int
    capacity: int
    shares: int
    everything: bool
    observations: bool
    max_staleness: int
    max_gap: float
    token_figures: bool
    critic_only: int
    critic_lr: float
    critic_passes: int
    rollouts_only: bool
    league: int


@dataclass(slots=True, kw_only=True)
class RLWorker(Worker):
    """The policy's learner, what it minimises, how its answers are judged; and the weights that are sampled from.
    `engine_of`: context, longest prompt and answer [tokens] -> an engine that samples from them."""

    updates: Updates
    policy: Policy
    dtype: str
    engine_of: Callable[[int, int], EmbeddedEngine]
    objective: Objective
    credit: Credit
    kl: FixedKL | AdaptiveKL
    past: Past
    sampled: Sampled
    ages: Ages = field(default_factory=Ages)
    step: int = 0  # finished steps
    sampling: bool = True  # engines have the weights that the step begins with
    seen: dict[Key, Tensor] = field(default_factory=dict[Key, Tensor])  # the learner's figures of the step's tokens

    def begin(self, folder: Path, total_steps: int | None, weights: Mapping[str, float]) -> None:
        """What only rank 0 knows, as it has the data and the rewards; `weights` of each reward function."""
        self.checkpoints.run, self.credit.weights = folder, weights
        self.total_updates = total_steps and total_steps * self.updates.parts * self.updates.passes

    def learn(
        self, step: int, groups: Sequence[Group], greedy: dict[int, float], sampling: bool
    ) -> tuple[Credited, Stats]:
        """Rewards to advantages, advantages to optimizer steps; `step` are finished. `sampling`: engines
        have the weights of now."""
        self.step, self.seen, self.sampling = step, {}, sampling
        if self.sampled.own is not None:
            self.sampled.own.rest()
        self.kl.coef = self.extra.get("kl_coef", self.kl.coef)
        self.ages.starts = self.extra.get("versions", [])
        self.ages.begin(self.learner.version, self.updates.max_staleness + 1)
        self.extra["versions"] = self.ages.starts
        self.ages.check((g.start_version for g in groups), self.updates.max_staleness)
        credited = self.credit.of(groups, greedy, self.kl.coef, step < self.updates.critic_only)
        stats = Stats() if self.updates.rollouts_only else self.update(credited.samples)
        if credited.kl == credited.kl:
            self.kl.update(credited.kl, credited.episodes)
            self.extra["kl_coef"] = self.kl.coef
        if self.updates.league and (step + 1) % self.updates.league == 0 and self.learner.policies is not None:
            self.learner.policies.keep((step + 1) // self.updates.league - 1)
        return credited, stats

    def update(self, samples: list[Sample]) -> Stats:
        """Optimizer steps on one batch of rollouts."""
        stats = Stats()
        self.rate = self.learning_rate()
        parts = assemble.split_by_group(samples, self.updates.parts)
        for part in parts * self.updates.passes:
            self.update_once(part, stats, samples)
        return stats

    def update_once(self, samples: list[Sample], stats: Stats, everything: list[Sample]) -> None:
        """One optimizer step. Samples whose advantages are 0 count in the denominator, but have no gradient, so they
        are not computed (with a KL term, an entropy bonus or a critic they have one). A batch without any gradient
        moves nothing, the optimizer's momentum included."""
        keys, critic = self.updates, self.critic
        weighed = assemble.weighed(samples, DENOMINATORS[keys.denominator], keys.max_tokens, keys.observations)
        useful = [own for own in weighed if self.has_gradient(own[0])]
        if not useful:
            stats.skipped += 1
            return
        self.rate = self.learning_rate()
        size, shares, pair_cost = keys.capacity, keys.shares, self.policy.pair_cost
        trained, weights, others = map(list, zip(*useful, strict=True))
        batches = pack(trained, weights, size, shares, pair_cost, others if keys.observations else ())
        stats.other |= packing(batches, size, shares, pair_cost)
        value_weight = 1 / max(sum(assemble.trained_lengths(samples)), 1)
        norms = [] if critic is None else [self.update_critic(critic, batches, value_weight, stats)]
        if critic is None or self.step >= keys.critic_only:
            seed = derive_seed(keys.seed, self.step, stats.updates)
            each = [list(own) for _, own in groupby(batches, key=lambda b: b.policy)]
            known = [one for own in each for one in self.objective.look(own, seed)]
            losses = [self.objective.loss(of, self.kl.coef, value_weight) for of in known]
            watch = Watch() if keys.token_figures else None
            watched = losses if watch is None else watch.over(losses)
            work = iter(zip(batches, watched, strict=True))
            for own in each:
                figures = Stats()
                self.learner.learn(list(islice(work, len(own))), figures)
                stats.take(own[0].policy, figures)
            if watch is not None:
                self.seen = watch.compute(batches, trained, self.learner.ranks) | self.seen
            if stats.updates == 0:
                self.compare(everything, sum(len(b.tokens) for b in batches), stats)
            stats.grad_norm = self.learner.optim_step(self.rate)
            stats.updates += 1
            norms.append(stats.grad_norm)
        self.check_finite(stats, *norms)

    def compare(self, samples: list[Sample], computed: int, stats: Stats) -> None:
        """Engine against learner on the step's samples, before the weights move. Raises `BirlError` where
        the log-probs of any version are too far apart."""
        fresh = stats.sums["fresh"]
        gaps = {self.learner.version: (stats.sums["gap"] / fresh, int(fresh))} if fresh else {}
        if self.updates.max_staleness > 0:
            result = compare(self.past, samples, computed, gaps, self.updates.capacity)
            gaps |= result.gaps
            stats.other["mismatch/unheld"] = result.unheld / max(sum(assemble.trained_lengths(samples)), 1)
        stats.other["mismatch/tokens"] = float(sum(n for _, n in gaps.values()))
        stats.first_gap = sum(gap * n for gap, n in gaps.values()) / stats.other["mismatch/tokens"] if gaps else nan
        for version, (mean, _) in gaps.items():
            check_gap(mean, version, self.updates.max_gap)
        for own in (own for own in stats.of.values() if own.sums["fresh"]):  # none hides behind the others
            own.first_gap = own.sums["gap"] / own.sums["fresh"]
            check_gap(own.first_gap, self.learner.version, self.updates.max_gap)
        if self.sampling:
            self.past.keep()

    def update_critic(self, critic: Learner, batches: Sequence[Batch], weight: float, stats: Stats) -> float:
        """The same for a critic with a model of its own; gives its gradient norm. Its figures are means over the same
        tokens, those of the last pass."""
        norm, loss = 0.0, critic_loss(self.objective.critic_keys.clip, weight)
        for _ in range(self.updates.critic_passes):
            own = Stats()
            critic.learn([(batch, loss) for batch in batches], own)
            norm = critic.optim_step(self.updates.critic_lr)
            stats.other |= {name: own.mean(name) for name in own.sums} | {"critic/grad_norm": norm}
        return norm

    def has_gradient(self, sample: Sample) -> bool:
        """Samples that have none need not go through the model."""
        if self.updates.rollouts_only:
            return False
        own = sample.advantage
        everything = self.updates.everything or self.objective.needs_reference() or sample.hinted is not None
        return everything or bool(np.any(own))

    def host(self, token: str, context: int, longest: int) -> list[str]:
        """The first rank of every data-parallel group but rank 0's serves an engine; their addresses."""
        address = ""
        if not self.crew.leads and self.crew.ranks.first:
            from birl.server.serve import hosted, service_of

            engine = self.engine_of(context, longest)
            address = hosted(service_of(self.policy, engine, token, self.dtype))
            print(f"birl: rank {self.crew.ranks.rank} samples, too, at {address}", flush=True)
        return [a for a in self.crew.gather(address) if a]

    def refresh(self) -> None:
        self.sampled.refresh()

    @torch.no_grad()
    def gathered(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Weights as the engines have them, whole on rank 0, nothing elsewhere."""
        drop_gathered(self.learner.outputs)
        parameters, result = dict(self.learner.model.named_parameters()), []
        for name in names:
            weight = parameters[name].to(DTYPES[self.dtype])
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if self.crew.leads:
                result.append(whole.to(self.learner.device))
        return result

    def logprobs_of(self, batches: list[Batch]) -> list[list[float]]:
        """What engines are compared with."""
        return logprobs_of(self.learner, batches)
