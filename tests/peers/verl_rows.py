"""birl beside verl's own functions."""

import sys
from unittest.mock import MagicMock

import torch
from torch import Tensor

from birl.algorithms import advantages as estimate
from birl.algorithms import kl, values
from birl.algorithms.pass_at_k import pass_at_k
from tests.peers.compare import Case, Pair, check, deviation, deviation_in_group, rescaled

# verl's protocol imports ray at the top; none of the functions here uses it.
sys.modules.setdefault("ray", MagicMock(__spec__=None))

from verl.trainer.ppo import core_algos as verl  # noqa: E402
from verl.utils import torch_functional as verl_functional  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402

CORE = "core_algos."
SAMPLE = "sample deviation (n - 1), birl population (n); the paper says only std"
OFF = 1e9  # a bound that never binds


def actor(policy_loss: PolicyLossConfig | None = None, **keys) -> ActorConfig:
    keys = {"clip_ratio_c": OFF} | keys
    loss = policy_loss or PolicyLossConfig()
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **keys)


def first(case: Case, found: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The first trained token's advantage of each answer, [B]; they must all be the same in it."""
    advantage = found[0]
    spread = torch.where(case.mask, advantage - advantage[:, :1], 0)
    assert spread.abs().max() < 1e-9, "an answer's tokens have different advantages"
    return (advantage[:, 0],)


def outcome(case: Case) -> dict:
    return {
        "token_level_rewards": case.at_the_end(case.rewards),
        "response_mask": case.mask.double(),
        "index": case.group.numpy(),
    }


# Advantages


@check("GRPO advantage, scale none", "verl", CORE + "compute_grpo_outcome_advantage")
def _(seed: int) -> Pair:
    case = Case(seed)
    found = verl.compute_grpo_outcome_advantage(**outcome(case), norm_adv_by_std_in_grpo=False)
    return Pair(first(case, found), (estimate.centre(case.rewards, case.group, "group"),))


@check(
    "GRPO advantage, a group of one",
    "verl",
    CORE + "compute_grpo_outcome_advantage",
    "a group of one keeps its reward as its advantage; in birl it has 0, which is r - mean as in the paper",
)
def _(seed: int) -> Pair:
    case = Case(seed, alone=True)
    found = verl.compute_grpo_outcome_advantage(**outcome(case), norm_adv_by_std_in_grpo=False)
    plain = estimate.centre(case.rewards, case.group, "group")
    return Pair(first(case, found), (torch.where(case.group_size == 1, case.rewards, plain),), (plain,))


def scaled_by_group(case: Case, eps: float) -> tuple[Tensor, Tensor]:
    """GRPO's advantage by birl: with the sample deviation and eps, and as it is."""
    plain = estimate.scale(estimate.centre(case.rewards, case.group, "group"), case.group, "group")
    return rescaled(plain, deviation_in_group(case.rewards, case.group), case.group_size, eps=eps), plain


@check("GRPO advantage, scale group", "verl", CORE + "compute_grpo_outcome_advantage", SAMPLE)
def _(seed: int) -> Pair:
    case = Case(seed)
    ours, plain = scaled_by_group(case, 1e-6)
    return Pair(first(case, verl.compute_grpo_outcome_advantage(**outcome(case))), (ours,), (plain,))


@check("GRPO advantage, vectorized, scale group", "verl", CORE + "compute_grpo_vectorized_outcome_advantage", SAMPLE)
def _(seed: int) -> Pair:
    case = Case(seed)
    ours, plain = scaled_by_group(case, 1e-6)
    return Pair(first(case, verl.compute_grpo_vectorized_outcome_advantage(**outcome(case))), (ours,), (plain,))


@check("RLOO advantage", "verl", CORE + "compute_rloo_outcome_advantage")
def _(seed: int) -> Pair:
    case = Case(seed)
    found = verl.compute_rloo_outcome_advantage(**outcome(case))
    return Pair(first(case, found), (estimate.centre(case.rewards, case.group, "leave_one_out"),))


@check("RLOO advantage, vectorized, a group of one too", "verl", CORE + "compute_rloo_vectorized_outcome_advantage")
def _(seed: int) -> Pair:
    case = Case(seed, alone=True)
    found = verl.compute_rloo_vectorized_outcome_advantage(**outcome(case))
    return Pair(first(case, found), (estimate.centre(case.rewards, case.group, "leave_one_out"),))


@check("OPO advantage", "verl", CORE + "compute_opo_outcome_advantage")
def _(seed: int) -> Pair:
    case = Case(seed)
    found = verl.compute_opo_outcome_advantage(**outcome(case))
    return Pair(first(case, found), (estimate.centre(case.rewards, case.group, "optimal", lengths=case.lengths),))


@check("ReMax advantage", "verl", CORE + "compute_remax_outcome_advantage")
def _(seed: int) -> Pair:
    case = Case(seed)
    greedy = case.normal(int(case.group.max()) + 1)
    found = verl.compute_remax_outcome_advantage(case.at_the_end(case.rewards), greedy[case.group], case.mask.double())
    return Pair(first(case, found), (estimate.centre(case.rewards, case.group, "greedy", greedy=greedy),))


def whitened(each: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Advantages [B] -> over tokens as verl has them, [B]: birl's `whiten`, with verl's deviation, and as it is."""
    tokens = each[case.sample]
    plain = values.whiten(tokens)
    found = rescaled(plain, deviation(tokens), len(tokens), eps=1e-8, inside=True)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), case.lengths.cumsum(0)[:-1]])
    return found[start], plain[start]


TOKENS = "statistics over tokens, as in the paper, birl's over answers; sample variance + 1e-8 under the root"


@check("REINFORCE++ advantage", "verl", CORE + "compute_reinforce_plus_plus_outcome_advantage", TOKENS)
def _(seed: int) -> Pair:
    case = Case(seed)
    given = outcome(case)
    del given["index"]
    found = verl.compute_reinforce_plus_plus_outcome_advantage(**given, config=MagicMock(gamma=1.0))
    plain = estimate.scale(estimate.centre(case.rewards, case.group, "batch"), case.group, "batch")
    return Pair(first(case, found), (whitened(case.rewards, case)[0],), (plain,))


@check(
    "REINFORCE++ with baseline, advantage",
    "verl",
    CORE + "compute_reinforce_plus_plus_baseline_outcome_advantage",
    TOKENS,
)
def _(seed: int) -> Pair:
    case = Case(seed)
    found = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(**outcome(case))
    centred = estimate.centre(case.rewards, case.group, "group")
    return Pair(first(case, found), (whitened(centred, case)[0],), (estimate.scale(centred, case.group, "batch"),))


@check(
    "GDPO advantage (float32 in verl)",
    "verl",
    CORE + "compute_gdpo_outcome_advantage",
    "sample deviations; the last one over tokens with 1e-8 under the root. The paper's batch is of answers, as in birl",
)
def _(seed: int) -> Pair:
    case = Case(seed)
    parts = (case.normal(len(case.group), 3) * 8).round() / 8
    parts = parts + torch.arange(len(case.group))[:, None] / 64  # no group of equal rewards
    weights = torch.tensor([1.0, 0.5, 2.0])
    names = ["a", "b", "c"]
    prompts = torch.zeros(len(case.group), 2)
    attended = torch.cat([torch.ones_like(prompts), case.inside], 1).long()
    found = verl.compute_gdpo_outcome_advantage(
        **(outcome(case) | {"response_mask": case.inside.float()}),
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": weights.tolist()},
        non_tensor_batch={name: parts[:, k].numpy() for k, name in enumerate(names)},
        batch={"prompts": prompts, "attention_mask": attended},
    )
    whole = Case(seed, holes=False)
    total = torch.zeros(len(case.group))
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        each = estimate.scale(estimate.centre(part, case.group, "group"), case.group, "group")
        total += weight * rescaled(each, deviation_in_group(part, case.group), case.group_size, eps=1e-6)
    plain = estimate.gdpo(parts, case.group, weights)
    return Pair((found[0][:, 0],), (whitened(total, whole)[0],), (plain,))


@check(
    "pass@k advantage",
    "verl",
    CORE + "compute_grpo_passk_outcome_advantage",
    "another method, arXiv:2503.19595: pass@n of all less pass@(n - 1) of the others; birl's is arXiv:2508.10751. "
    "Equal to that difference by birl's pass@k",
)
def _(seed: int) -> Pair:
    case = Case(seed)
    case.rewards = (case.uniform(len(case.group)) < 0.4).double()
    found = verl.compute_grpo_passk_outcome_advantage(**outcome(case), config={"norm_adv_by_std_in_grpo": False})
    gained = torch.zeros_like(case.rewards)
    for i, g in enumerate(case.group):
        inside = case.rewards[case.group == g]
        n, right, own = len(inside), int(inside.sum()), int(case.rewards[i])
        gained[i] = pass_at_k(n, right, n) - pass_at_k(n - 1, right - own, n - 1)
    return Pair(first(case, found), (gained,), (estimate.pass_at_k(case.rewards, case.group, 2),))


def generalized(seed: int) -> tuple[Case, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    case = Case(seed)
    rewards, value = case.normal(*case.mask.shape) * case.mask, case.normal(*case.mask.shape)
    theirs = verl.compute_gae_advantage_return(rewards, value, case.mask.double(), 0.97, 0.9)
    ours = values.gae(case.flat(rewards), case.flat(value), case.sample, gamma=0.97, lam=0.9)
    return case, (case.flat(theirs[0]), case.flat(theirs[1])), ours


@check("GAE, returns", "verl", CORE + "compute_gae_advantage_return")
def _(seed: int) -> Pair:
    _, theirs, ours = generalized(seed)
    return Pair((theirs[1],), (ours[1],))


@check(
    "GAE, whitened advantages",
    "verl",
    CORE + "compute_gae_advantage_return",
    "sample variance + 1e-8 under the root, birl the population's deviation + 1e-6; GAE's paper says only standardised",
)
def _(seed: int) -> Pair:
    _, theirs, ours = generalized(seed)
    plain = values.whiten(ours[0])
    found = rescaled(plain, deviation(ours[0]), len(plain), eps=1e-8, inside=True)
    return Pair((theirs[0],), (found,), (plain,))


@check("whitening without the shift", "verl", "torch_functional.masked_whiten", "sample variance + 1e-8 under the root")
def _(seed: int) -> Pair:
    case = Case(seed)
    x = case.normal(*case.mask.shape) + 0.5
    flat = case.flat(x)
    theirs = case.flat(verl_functional.masked_whiten(x, case.mask.double(), shift_mean=False))
    plain = values.whiten(flat, shift_mean=False)
    found = rescaled(plain - flat.mean(), deviation(flat), len(flat), eps=1e-8, inside=True) + flat.mean()
    return Pair((theirs,), (found,), (plain,))


@check("KL in the reward", "verl", CORE + "compute_rewards")
def _(seed: int) -> Pair:
    case = Case(seed)
    theirs = verl.compute_rewards(case.at_the_end(case.rewards), case.old, case.ref, 0.05)
    penalty = kl.k1(case.flat(case.old), case.flat(case.ref))
    return Pair((case.flat(theirs),), (values.token_rewards(case.flat(case.at_the_end(case.rewards)), penalty, 0.05),))
