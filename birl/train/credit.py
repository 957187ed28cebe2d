"""Groups -> samples with advantages: how reward is credited.

    episodes   rewards + length penalties - KL in the reward -> one advantage each (algorithms/advantages.py)
    turns      the same with what each turn and those after it earned, among the turns of the same number
    returns    reward - the KL of this token and those after it, normalised over all tokens of the batch
    tokens     with a critic: rewards and values -> GAE; with a teacher: + its log-prob - ours; the proximal policy

Each agent of an episode with several counts as an episode of its own, compared with the same agent in the group. Means
and deviations over a batch are taken over one policy, and in a mixture over one environment.

Log-probs and values of reference, critic and teacher are computed here for the whole batch, before any update.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from birl.algorithms import advantages as estimate
from birl.algorithms import kl as estimators
from birl.algorithms import values as critics
from birl.algorithms.custom import NamedFunction, part
from birl.algorithms.estimators import ADVANTAGES, BY_TOKEN, TENSORS
from birl.data.pack import Batch, hinted
from birl.data.sequences import empty_samples, pairs
from birl.errors import BirlError
from birl.learner.token_figures import behaviour, by_sample, per_token, spread
from birl.parallel.ranks import Packer, Shared
from birl.rollout import assemble
from birl.rollout.assemble import Unit
from birl.types import Group, Outcome, Sample, Task

if TYPE_CHECKING:
    from birl.config import schema
    from birl.rollout.hints import Hints

Episode = tuple[Group, int]
#: micro-batches -> of each the log-probs, or values, of its trained tokens [N]
BatchScorer = Callable[[Sequence[Batch]], list[Tensor]]
#: micro-batches, their samples -> of each sample the log-probs of its trained tokens
Teacher = Callable[[Sequence[Batch], Sequence[Sample]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """`by_episode`: (group index, episode) -> advantage, of token-level advantages the mean. `kl`: KL to the reference,
    summed over an episode's tokens, mean over episodes; NaN if the reward has no KL term."""

    samples: list[Sample]
    by_episode: dict[tuple[int, int], float]
    kl: float = float("nan")
    episodes: int = 0


@dataclass(slots=True, kw_only=True)
class Credit:
    """Computes advantages, on rank 0. `max_tokens`: of an answer."""

    keys: "schema.Algorithm"
    critic_keys: "schema.Critic"
    max_tokens: int
    pack: Packer
    usage: assemble.Usage
    reference: BatchScorer | None = None
    critic: BatchScorer | None = None
    teacher: Teacher | None = None
    likely: Callable[[Sequence[Sample]], Sequence[Any]] | None = None  # `Sample.likely` of a served teacher
    hints: "Hints | None" = None  # privileged context of the teacher
    teacher_name: Callable[[Task], str] | None = None  # task -> name of its teacher
    learner: BatchScorer | None = None  # if the proximal policy is the learner before updates
    weights: Mapping[str, float] = field(default_factory=dict[str, float])  # of each reward function
    mixture: bool = False  # statistics of a batch are taken over each environment separately
    estimator: NamedFunction | None = field(init=False)

    def __post_init__(self) -> None:
        keys = self.keys
        self.estimator = None
        if keys.advantage not in BY_TOKEN:
            own = (keys.advantage_args, TENSORS, ("rewards", "group"))
            self.estimator = part("algorithm.advantage", keys.advantage, ADVANTAGES, keys, *own)

    def of(
        self, groups: Sequence[Group], greedy: dict[int, float], kl_coef: float, pretraining: bool = False
    ) -> Credited:
        """Samples with advantages. `greedy`: group index -> reward of the greedy answer (algorithm.baseline=greedy).
        `pretraining`: the critic alone is trained, with Monte Carlo returns (lambda = 1) as targets, since its own
        values mean nothing yet (VC-PPO, arXiv:2503.01491)."""
        lam = 1.0 if pretraining else self.critic_keys.lam
        kept = [(g, i) for group in groups for g in assemble.by_agent(group) for i in self.usage.usable(g)]
        if self.keys.baseline == "greedy":
            kept = [(g, i) for g, i in kept if greedy.get(g.index) is not None]
        apart: dict[tuple[str | None, str], list[Episode]] = {}
        for g, i in kept:
            env = g.task.columns.get("env") if self.mixture else None
            apart.setdefault((env, g.trajectories[i].turns[0].policy), []).append((g, i))
        results = [self._assign(episodes, greedy, kl_coef, lam) for episodes in apart.values()]
        order = {group.index: n for n, group in enumerate(groups)}
        samples = sorted(
            [*(s for made, _ in results for s in made), *empty_samples(kept)], key=lambda s: order[s.group]
        )
        kls = [kl for _, kl in results if kl is not None]
        return Credited(
            samples=self._kept_for_training(samples, kept),
            by_episode=_by_episode([s for s in samples if s.mask.any()]),
            kl=torch.cat(kls).mean().item() if kls else float("nan"),
            episodes=len(kept),
        )

    def _assign(
        self, kept: Sequence[Episode], greedy: dict[int, float], kl_coef: float, lam: float
    ) -> tuple[list[Sample], Tensor | None]:
        """Samples of these E episodes, over which statistics of the batch are taken; and the KL of each episode [E] if
        the reward has a KL term."""
        keys = self.keys
        penalties = self.penalties(kept)
        rewards = torch.tensor([g.trajectories[i].reward for g, i in kept], dtype=torch.float32) + penalties
        plain = [
            [self._with_hint(s, g, i) for s in assemble.samples(g.trajectories[i], 0.0, g.index, i)] for g, i in kept
        ]
        samples = [s for own in plain for s in own]
        owner = torch.tensor([e for e, own in enumerate(plain) for _ in own], dtype=torch.int64)
        batches = self.pack(samples, [0.0] * len(samples)) if self._needs_models() else []
        kl, episode_kl = self._kl(batches, samples), torch.zeros(len(kept), dtype=torch.float32)
        if kl is not None:
            episode_kl.index_add_(0, owner, torch.stack([k.sum() for k in kl]))
        if keys.advantage == "returns":
            result = self._returns(samples, rewards[owner], owner, kl, kl_coef)
        elif self.estimator is None:
            result = self._gae(batches, samples, kept, penalties, kl, kl_coef, lam)
        elif keys.credit == "turn":
            result = self._by_turn(kept, penalties, greedy)
        else:
            if kl is not None:
                rewards = rewards - kl_coef * episode_kl
            advantages = self._estimate(rewards, [(g, i, None) for g, i in kept], greedy)
            result = [replace(s, advantage=advantages[e].item()) for s, e in zip(samples, owner.tolist(), strict=True)]
        if self.likely is not None:
            top = self.likely([hinted(s) for s in samples])
            result = [replace(s, likely=tokens) for s, tokens in zip(result, top, strict=True)]
        if self.teacher is not None:
            result = self._add_teacher(batches, result)
        if self.learner is not None:
            result = self._add_proximal(batches, result)
        return result, None if kl is None else episode_kl

    def penalties(self, kept: Sequence[Episode]) -> Tensor:
        """Length penalty, added to each reward [E]."""
        keys = self.keys
        last = torch.tensor(
            [float(len(g.trajectories[i].turns[-1].completion.tokens)) for g, i in kept], dtype=torch.float32
        )
        result = estimate.overlong_penalty(
            last, limit=self.max_tokens, buffer=keys.overlong_buffer, penalty=keys.overlong_penalty
        )
        if keys.length_penalty:
            units: list[Unit] = [(g, i, None) for g, i in kept]
            right = torch.tensor([g.trajectories[i].score >= 1 for g, i in kept], dtype=torch.bool)
            result = result + keys.length_penalty * estimate.length_penalty(_lengths(units), right, _places(units))
        return result

    def _by_turn(self, kept: Sequence[Episode], penalties: Tensor, greedy: dict[int, float]) -> list[Sample]:
        """One advantage for each turn: its discounted reward-to-go, compared with the group's turns of that number."""
        units: list[Unit] = []
        returns: list[Tensor] = []
        for (g, i), penalty in zip(kept, penalties.tolist(), strict=True):
            rewards = torch.tensor(assemble.turn_rewards(g.trajectories[i]), dtype=torch.float32)
            rewards[-1] += penalty
            returns.append(estimate.rewards_to_go(rewards, self.keys.turn_discount))
            units += [(g, i, number) for number in range(len(rewards))]
        advantages = self._estimate(torch.cat(returns), units, greedy).split([len(r) for r in returns])
        return [
            self._with_hint(sample, g, i)
            for (g, i), by_turn in zip(kept, advantages, strict=True)
            for sample in assemble.samples(g.trajectories[i], by_turn.tolist(), g.index, i)
        ]

    def _with_hint(self, sample: Sample, group: Group, episode: int) -> Sample:
        """The sample with the name of its teacher, and with the teacher's privileged context."""
        if self.teacher_name is not None:
            sample = replace(sample, teacher=self.teacher_name(group.task))
        return sample if self.hints is None else self.hints.of(sample, group, episode)

    def _estimate(self, rewards: Tensor, units: Sequence[Unit], greedy: dict[int, float]) -> Tensor:
        """rewards [U] -> advantages [U]."""
        assert self.estimator is not None
        order = dict.fromkeys((g.index, g.agent, turn) for g, _, turn in units)
        parts, weights = assemble.reward_parts([g.trajectories[i] for g, i, _ in units], self.weights)
        tensors = {
            "lengths": _lengths(units),
            "greedy": torch.tensor([greedy.get(index, 0.0) for index, _, _ in order], dtype=torch.float32),
            "parts": torch.tensor(parts, dtype=torch.float32),
            "weights": torch.tensor(weights, dtype=torch.float32),
            "right": torch.tensor([g.trajectories[i].score >= 1 for g, i, _ in units], dtype=torch.bool),
        }
        try:
            result = self.estimator.bound(tensors)(rewards, _places(units))
        except ValueError as error:
            raise BirlError(f"algorithm.advantage={self.keys.advantage}: {error}.") from error
        if not isinstance(result, Tensor) or result.shape != rewards.shape or not result.isfinite().all():
            raise BirlError(
                f"algorithm.advantage={self.keys.advantage}: must give one finite number for each of "
                f"{len(rewards)} rewards as a tensor, not "
                f"{result.tolist() if isinstance(result, Tensor) else result!s:.200}."
            )
        return result

    def _needs_models(self) -> bool:
        return self._kl_in_reward() or any(m is not None for m in (self.critic, self.teacher, self.learner))

    def _kl_in_reward(self) -> bool:
        return self.keys.kl_coef > 0 and self.keys.kl_in == "reward"

    def _kl(self, batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Tensor] | None:
        """Estimates of the KL to the reference for the trained tokens of each sample, under the sampling weights."""
        if not self._kl_in_reward():
            return None
        assert self.reference is not None
        ref = by_sample(batches, self.reference(batches), len(samples))
        estimator = estimators.ESTIMATORS[self.keys.kl]
        return [estimator(b, r) for b, r in zip(map(behaviour, samples), ref, strict=True)]

    def _returns(
        self, samples: Sequence[Sample], rewards: Tensor, owner: Tensor, kl: list[Tensor] | None, kl_coef: float
    ) -> list[Sample]:
        """REINFORCE++, arXiv:2501.03262 eq. 8: A_t = r - beta sum_{i >= t} KL_i over the episode's tokens, less the
        mean and over the deviation of all tokens of the batch. `rewards`, `owner`: of each sample its episode's."""
        sizes = assemble.trained_lengths(samples)
        each = [torch.full((n,), r, dtype=torch.float32) for n, r in zip(sizes, rewards.tolist(), strict=True)]
        if kl is not None:
            later = torch.zeros(int(owner.max()) + 1, dtype=torch.float32)  # the KL of the episode's later tokens
            for i in reversed(range(len(samples))):
                ahead = kl[i].flip(0).cumsum(0).flip(0) + later[owner[i]]
                each[i] = each[i] - kl_coef * ahead
                later[owner[i]] += kl[i].sum()
        advantages = critics.whiten(torch.cat(each)).split(sizes)
        return [replace(s, advantage=spread(s, a)) for s, a in zip(samples, advantages, strict=True)]

    def _gae(
        self,
        batches: Sequence[Batch],
        samples: Sequence[Sample],
        kept: Sequence[Episode],
        penalties: Tensor,
        kl: list[Tensor] | None,
        kl_coef: float,
        lam: float,
    ) -> list[Sample]:
        """PPO: each turn's reward at its last token, the KL at each; advantages and returns by the critic's values."""
        assert self.critic is not None
        keys = self.critic_keys
        values = by_sample(batches, self.critic(batches), len(samples))
        sizes = [len(v) for v in values]
        sample = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes, dtype=torch.int64))
        flat = torch.cat(values)
        earned = torch.tensor(
            [
                reward
                for (g, i), p in zip(kept, penalties.tolist(), strict=True)
                for reward in assemble.earned(g.trajectories[i], p)
            ],
            dtype=torch.float32,
        )
        if kl is not None:
            earned = critics.token_rewards(earned, torch.cat(kl), kl_coef)
        if self.keys.advantage == "turn_gae":
            turns = [number for g, i in kept for number in assemble.token_turns(g.trajectories[i])]
            number = torch.tensor(turns, dtype=torch.int64)
            result = critics.turn_gae(earned, flat, sample, number, gamma=keys.gamma, lam=lam)
        else:
            result = critics.gae(earned, flat, sample, gamma=keys.gamma, lam=lam, alpha=keys.lam_alpha)
        advantage, returns = result
        if keys.whiten:
            advantage = critics.whiten(advantage)
        columns = zip(samples, advantage.split(sizes), returns.split(sizes), values, strict=True)
        return [replace(s, advantage=spread(s, a), returns=spread(s, r), values=spread(s, v)) for s, a, r, v in columns]

    def _add_teacher(self, batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Sample]:
        """On-policy distillation: adds teacher_coef (log p_teacher - log p_sampler), the negative of the sampled
        reverse KL, to each token's advantage; with hints, to samples that have one."""
        assert self.teacher is not None
        read = batches if self.hints is None else Shared(b.hinted or b for b in batches)
        result = []
        for sample, theirs in zip(samples, self.teacher(read, [hinted(s) for s in samples]), strict=True):
            own = torch.from_numpy(per_token(sample)[sample.mask])
            coef = self.keys.teacher_coef if self.hints is None or sample.hinted is not None else 0.0
            result.append(replace(sample, advantage=spread(sample, own + coef * (theirs - behaviour(sample)))))
        return result

    def _add_proximal(self, batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Sample]:
        """Decoupled PPO: the proximal policy of all updates of the batch is the learner before them."""
        assert self.learner is not None
        now = by_sample(batches, self.learner(batches), len(samples))
        return [replace(s, proximal=spread(s, p)) for s, p in zip(samples, now, strict=True)]

    def _kept_for_training(self, samples: Sequence[Sample], kept: Sequence[Episode]) -> list[Sample]:
        keys = self.keys
        cut = {(g.index, i) for g, i in kept if g.trajectories[i].outcome is Outcome.TRUNCATED}
        result = [s for s in samples if not (keys.mask_truncated and (s.group, s.episode) in cut)]
        return pairs(result) if keys.advantage == "best_and_worst" else result


def _by_episode(samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    result: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        result.setdefault((sample.group, sample.episode), []).append(sample)
    return {place: _mean(own) for place, own in result.items()}


def _mean(samples: Sequence[Sample]) -> float:
    """Of the advantages of their trained tokens."""
    whole = {s.advantage if isinstance(s.advantage, float | int) else None for s in samples}
    if len(whole) == 1 and (same := whole.pop()) is not None:
        return float(np.float32(same))
    values = np.concatenate([per_token(s)[s.mask] for s in samples]).astype(np.float64)
    same = values.min() == values.max()
    return float(values[0] if same else values.cumsum()[-1] / len(values))  # one after the other, in double precision


def _places(units: Sequence[Unit]) -> Tensor:
    return torch.tensor(assemble.places(units), dtype=torch.int64)


def _lengths(units: Sequence[Unit]) -> Tensor:
    return torch.tensor(assemble.unit_lengths(units), dtype=torch.float32)
