"""One step of reinforcement learning: groups -> advantages -> samples -> batches -> update.

`RLWorker.learn` runs on rank 0, called by `rl.py`. It calls the methods marked "(every rank)" on all ranks; each gets
its share of the micro-batches and no other data of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
from torch import Tensor

from birl.algorithms.kl import AdaptiveKL
from birl.algorithms.reduce import DENOMINATORS
from birl.data.pack import Batch
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import Sampled
from birl.learner.comparison import Past, check, compare
from birl.learner.critic import critic_loss, fit
from birl.learner.learner import Stats
from birl.learner.policy import DTYPES, Policy
from birl.learner.token_figures import Key, figures_of, watched
from birl.parallel.ranks import Packer, Shared
from birl.rollout import assemble
from birl.rollout.ages import Ages
from birl.seeds import derive_seed
from birl.train.credit import Credit, Credited
from birl.train.objective import LossInputs, Objective
from birl.train.worker import Worker
from birl.types import Group, Sample
from birl.weights.canary import logprobs_of
from birl.weights.gathered import gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """How a batch of rollouts becomes optimizer steps: the batch is split into `parts`, one step each, and used
    `passes` times. `everything`: samples with advantage 0 have a gradient, too; `observations`: tokens of the
    environment are predicted (ECHO); `max_gap`: between log-probs of engine and learner [nats]; `critic_only`: first
    steps that train the critic alone; `rollouts_only`: nothing is trained; `league`: steps between kept opponents."""

    seed: int
    parts: int
    passes: int
    denominator: str
    max_tokens: int
    pack: Packer
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


#: one optimizer step: samples, their micro-batches by policy, the reference's log-probs by policy, weight of a value
Part = tuple[list[Sample], list[Shared[Batch]], list[Sequence[Tensor | None]], float]


@dataclass(slots=True, kw_only=True)
class RLWorker(Worker):
    """The policy's learner with its objective and credit assignment, and the weights that are sampled from.
    `engine_of`: (context, longest prompt and answer) [tokens] -> an engine on these weights."""

    updates: Updates
    policy: Policy
    dtype: str
    engine_of: Callable[[int, int], EmbeddedEngine]
    objective: Objective
    credit: Credit
    kl: AdaptiveKL
    past: Past
    sampled: Sampled
    ages: Ages = field(default_factory=Ages)
    step: int = 0  # finished steps
    sampling: bool = True  # the engines have the weights at the start of the step
    seen: dict[Key, Tensor] = field(default_factory=dict[Key, Tensor])  # log-prob and entropy of the step's tokens

    def begin(self, folder: Path, weights: Mapping[str, float]) -> None:
        """(every rank) Receive what rank 0 alone knows from rewards. `weights`: of each reward function."""
        self.checkpoints.run, self.credit.weights = folder, weights

    def expect(self, steps: int | None) -> None:
        """(rank 0) Set the number of steps of the run; None: unknown."""
        keys = self.updates  # the first steps may train the critic alone
        self.total_updates = steps and (steps - keys.critic_only) * keys.parts * keys.passes

    def learn(
        self, step: int, groups: Sequence[Group], greedy: dict[int, float], sampling: bool
    ) -> tuple[Credited, Stats]:
        """(rank 0) Rewards -> advantages -> optimizer steps. `step`: finished steps; `sampling`: the engines have the
        learner's current weights."""
        self.step, self.seen, self.sampling = step, {}, sampling
        self.crew.call(self, RLWorker.rest)
        if self.kl.target:  # else it is the configuration's, which may have changed since the checkpoint
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
        stats, keys = Stats(), self.updates
        self.rate = self.learning_rate()
        parts = map(self.part, assemble.split_by_group(samples, keys.parts))
        for part in [*parts] * keys.passes if keys.passes > 1 else parts:  # packed and sent once for all passes
            self.update_once(part, stats, samples)
        return stats

    def part(self, samples: list[Sample]) -> Part:
        """(rank 0) Pack the samples of one optimizer step. Samples with advantage 0 count in the denominator and are
        not computed, as they have no gradient (unless a KL term, an entropy bonus or a critic gives them one)."""
        keys = self.updates
        weighed = assemble.weighed(samples, DENOMINATORS[keys.denominator], keys.max_tokens, keys.observations)
        useful = [own for own in weighed if self.has_gradient(own[0])]
        trained, weights, others = map(list, zip(*useful, strict=True)) if useful else ([], [], [])
        batches = keys.pack(trained, weights, others if keys.observations else ()) if useful else []
        by_policy = [Shared(group) for _, group in groupby(batches, key=lambda b: b.policy)]
        refs = [self.objective.reference_logprobs(group) for group in by_policy if self.step >= keys.critic_only]
        return trained, by_policy, refs, 1 / max(sum(assemble.trained_lengths(samples)), 1)

    def update_once(self, part: Part, stats: Stats, everything: list[Sample]) -> None:
        """(rank 0) One optimizer step. A part without any gradient is skipped: momentum does not change either."""
        keys, critic, (trained, by_policy, refs, value_weight) = self.updates, self.critic, part
        batches = [batch for group in by_policy for batch in group]
        if not batches:
            stats.skipped += 1
            return
        self.rate = self.learning_rate()
        stats.other |= keys.pack.figures(batches)
        fitted = None if critic is None else self.crew.call(self, RLWorker.update_critic, by_policy[0], value_weight)
        norms = [] if fitted is None else [fitted.grad_norm]
        stats.other |= {} if fitted is None else fitted.other
        if refs:
            seed = derive_seed(keys.seed, self.step, stats.updates)
            inputs = [Shared(self.objective.prepare(g, seed, r)) for g, r in zip(by_policy, refs, strict=True)]
            seen = list[Tensor]()
            for group, given in zip(by_policy, inputs, strict=True):
                figures, watched = self.crew.call(self, RLWorker.gradients, group, given, self.kl.coef, value_weight)
                stats.take(group[0].policy, figures)
                seen += watched
            if keys.token_figures:
                self.seen = figures_of(batches, seen, trained) | self.seen
            if stats.updates == 0:
                self.compare(everything, sum(len(b.tokens) for b in batches), stats)
            keep = self.sampling and stats.updates == 0
            stats.grad_norm = self.crew.call(self, RLWorker.optim_step, self.rate, keep)
            stats.updates += 1
            norms.append(stats.grad_norm)
        self.check_finite(stats, *norms)

    def compare(self, samples: list[Sample], computed: int, stats: Stats) -> None:
        """Compare the log-probs of engine and learner on the step's samples, before the weights change. Raises
        `BirlError` if those of any version differ by more than `max_gap`."""
        fresh = stats.sums["fresh"]
        gaps = {self.learner.version: (stats.sums["gap"] / fresh, int(fresh))} if fresh else {}
        if self.past.compares:
            result = compare(self.past, samples, computed, gaps, self.updates.pack.capacity)
            gaps, stats.other = result.gaps, stats.other | result.figures
        check(stats, gaps, self.learner.version, self.updates.max_gap)

    def rest(self) -> None:
        """(every rank) The engine gives memory back for training."""
        self.sampled.rest()

    def gradients(
        self, batches: Sequence[Batch], inputs: Sequence[LossInputs], kl_coef: float, value_weight: float
    ) -> tuple[Stats, list[Tensor]]:
        """(every rank) Add the gradients of its micro-batches. Returns the figures of all ranks and, on rank 0 if
        `token_figures`, log-prob and entropy of each token."""
        figures, kept, ranks = Stats(), dict[int, Tensor](), self.learner.ranks
        losses = [self.objective.loss(given, kl_coef, value_weight) for given in inputs]
        losses = watched(losses, kept) if self.updates.token_figures else losses
        self.learner.learn(list(zip(batches, losses, strict=True)), figures)
        seen = range(len(batches) if self.updates.token_figures else 0)
        return figures, ranks.collect(seen, kept.__getitem__) if seen else []

    def optim_step(self, rate: float, keep: bool) -> float:
        """(every rank) `keep`: keep a copy of the weights before the step, for later comparisons."""
        if keep:
            self.past.keep()
        return self.learner.optim_step(rate)

    def update_critic(self, batches: Sequence[Batch], weight: float) -> Stats:
        assert self.critic is not None
        keys, loss = self.updates, critic_loss(self.objective.critic_keys.clip, weight)
        return fit(self.critic, batches, loss, keys.critic_passes, keys.critic_lr)

    def has_gradient(self, sample: Sample) -> bool:
        """False if the sample need not go through the model."""
        if self.updates.rollouts_only or not sample.mask.any():
            return False
        everything = self.updates.everything or self.objective.needs_reference() or sample.hinted is not None
        return everything or bool(np.any(sample.advantage))

    def host(self, token: str, context: int, longest: int) -> list[str]:
        """(every rank) The first rank of every other data-parallel group serves an engine. Returns the addresses."""
        address = ""
        if not self.crew.leads and self.crew.ranks.first:
            from birl.server.serve import hosted, service_of

            engine = self.engine_of(context, longest)
            address = hosted(service_of(self.policy, engine, token, self.dtype))
            print(f"birl: rank {self.crew.ranks.rank} also samples, at {address}", flush=True)
        return [a for a in self.crew.gather(address) if a]

    def refresh(self) -> None:
        """(every rank) Copy the learner's weights into those that are sampled from."""
        self.sampled.refresh()

    def gathered(self, names: Sequence[str]) -> list[Tensor]:
        """(every rank) The named tensors, whole, on rank 0."""
        return gathered(self.learner, names, DTYPES[self.dtype], self.crew.leads)

    def logprobs_of(self, batches: list[Batch]) -> list[list[float]]:
        """(every rank) The learner's log-probs, which the canary compares with the engines'."""
        return logprobs_of(self.learner, batches)
