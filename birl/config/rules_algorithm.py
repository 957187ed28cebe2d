"""Rules for `algorithm` and `critic`: which of their keys go together. Standard library only."""

from typing import Any

from birl.config.keys import documentation
from birl.config.schema import RL
from birl.config.words import without_effect

CRITIC = ("gae", "turn_gae")  # advantages that need one
BY_TOKEN = ("returns", *CRITIC)  # one advantage a token
UNCLIPPED = ("reinforce", "importance")
#: surrogates whose papers' ratio, mask or bound is against the policy that sampled, however old it is: GSPO
#: arXiv:2507.18071 eq. 7, GMPO arXiv:2507.20673 eq. 5, CISPO arXiv:2506.13585 eq. 4, SAPO arXiv:2511.20347 eq. 5, DPPO
#: arXiv:2602.04879 eq. 11. M2PO arXiv:2510.01161 is known by algorithm.second_moment
AGAINST_BEHAVIOUR = ("gspo", "gmpo", "cispo", "sapo", "dppo")
RATIOS = ("clip", *AGAINST_BEHAVIOUR)  # surrogates that differ only where the ratio is not 1

#: key of `algorithm` that was set -> (key that must have one of these values, or nothing reads it)
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "baseline": ("advantage", ("relative",)),
    "scale_rewards": ("advantage", ("relative",)),
    "pass_k": ("advantage", ("pass_at_k",)),
    "entropy_share": ("entropy_control", ("top_entropy", "clip_cov", "kl_cov")),
    "covariance_low": ("entropy_control", ("clip_cov",)),
    "covariance_high": ("entropy_control", ("clip_cov",)),
    "held_coef": ("entropy_control", ("kl_cov",)),
    "correction": ("proximal", ("recompute", "interpolate")),
    "correction_level": ("proximal", ("recompute", "interpolate")),
    "correction_low": ("correction", ("mask",)),
    "correction_high": ("proximal", ("recompute", "interpolate")),
    "reject_limit": ("reject", ("divergence", "off_policy")),
    "dual_clip": ("surrogate", ("clip",)),
    "clip_low": ("surrogate", ("clip", "gspo", "gmpo", "cispo")),
    "clip_high": ("surrogate", ("clip", "gspo", "gmpo", "cispo")),
    "kl_corrected": ("kl_in", ("loss",)),
}


def proximal(config: RL) -> str:
    """algorithm.proximal, with auto decided: answers of older weights are corrected by an importance weight, unless the
    surrogate's own ratio is against what sampled them."""
    keys = config.algorithm
    if keys.proximal != "auto":
        return keys.proximal
    if keys.surrogate in AGAINST_BEHAVIOUR or keys.second_moment > 0:
        return "behaviour"
    return "recompute" if config.rollout.max_staleness > 0 else "behaviour"


def remembers(config: RL) -> bool:
    """Is the proximal policy computed before the first update? Where there is one update only, it is the learner in
    that update, whose log-probs are there anyway."""
    updates = config.algorithm.updates_per_batch * config.algorithm.passes
    return proximal(config) == "recompute" and updates > 1


def algorithm_notes(config: RL) -> list[str]:
    """What a run says at its start of keys that have no effect in it, and are no mistake."""
    keys = config.algorithm
    if keys.surrogate not in RATIOS or proximal(config) != "recompute" or remembers(config):
        return []
    return [
        f"algorithm.surrogate={keys.surrogate} bounds nothing in this run: with one update a batch the ratio starts "
        "from the learner's own log-probs (algorithm.proximal=recompute) and is 1, whichever surrogate is set; "
        "algorithm.correction alone weighs answers of older weights. To bound their ratios, set "
        "algorithm.proximal=behaviour, or algorithm.updates_per_batch=2 or more."
    ]


def corrects(config: RL) -> bool:
    """Is there an importance weight of the proximal policy against the one that sampled?"""
    return proximal(config) != "behaviour" and config.algorithm.correction != "none"


def _credit(config: RL) -> list[str]:
    keys, found = config.algorithm, []
    if keys.credit == "trajectory":
        return without_effect(config, "algorithm.turn_discount", "algorithm.credit=trajectory; set it to turn")
    if keys.advantage != "relative" and ":" not in keys.advantage:
        found.append(f"algorithm.credit=turn: not with algorithm.advantage={keys.advantage}, but with relative.")
    if keys.baseline == "greedy":
        found.append("algorithm.credit=turn: a greedy episode has other turns; take another algorithm.baseline.")
    if keys.kl_coef > 0 and keys.kl_in == "reward":
        found.append("algorithm.credit=turn: the KL belongs to no turn; set algorithm.kl_in=loss.")
    return found


def algorithm_problems(config: RL) -> list[str]:
    algorithm, size, found = config.algorithm, config.rollout.group_size, []
    for key, (other, values) in NEEDS.items():
        value = proximal(config) if other == "proximal" else getattr(algorithm, other)
        if value not in values and ":" not in str(value):
            reason = f"algorithm.{other}={value} does not read it ({' or '.join(values)} does)"
            found += without_effect(config, f"algorithm.{key}", reason)
    found += _group_of_one(config) if size == 1 else []
    if algorithm.dynamic_sampling:
        found += _dynamic_sampling(config)
    else:
        found += without_effect(config, "algorithm.max_refill", "algorithm.dynamic_sampling is false")
    found += _kl(config) + _credit(config)
    if not algorithm.teacher:
        found += without_effect(config, "algorithm.teacher_coef", "algorithm.teacher is empty; name a model")
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= size:
        found.append(
            f"algorithm.pass_k={algorithm.pass_k}: with rollout.group_size={size} there is one set of answers, so "
            "nothing to compare; set a smaller algorithm.pass_k or a larger rollout.group_size."
        )
    if algorithm.advantage == "zero" and not algorithm.teacher:
        found.append("algorithm.advantage=zero: nothing would be learned without algorithm.teacher; name a model.")
    if algorithm.overlong_buffer == 0:
        found += without_effect(
            config, "algorithm.overlong_penalty", "algorithm.overlong_buffer=0; set a number of tokens"
        )
    if algorithm.overlong_buffer >= config.rollout.max_tokens > 0:
        found.append(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer}: must be less than rollout.max_tokens="
            f"{config.rollout.max_tokens}, or every answer is overlong; a fifth of it is "
            f"{config.rollout.max_tokens // 5}."
        )
    if algorithm.mask_truncated and config.rollout.truncated == "drop":
        found.append(
            "algorithm.mask_truncated=true: has no effect because rollout.truncated=drop drops those answers; use one."
        )
    return found + _surrogate(config) + _critic(config)


def _group_of_one(config: RL) -> list[str]:
    algorithm, found = config.algorithm, []
    if algorithm.advantage == "relative" and algorithm.baseline in ("group", "leave_one_out", "optimal"):
        found.append(
            "rollout.group_size=1: the mean of one reward is that reward, so every advantage would be 0; "
            "set rollout.group_size=8, or algorithm.baseline=none."
        )
    if algorithm.advantage == "relative" and algorithm.scale_rewards == "group":
        found.append(
            "rollout.group_size=1: algorithm.scale_rewards=group divides by the standard deviation of a group "
            "of one, which does not exist; set rollout.group_size=8, or algorithm.scale_rewards=none."
        )
    if algorithm.advantage in ("gdpo", "best_and_worst"):
        found.append(
            f"rollout.group_size=1: algorithm.advantage={algorithm.advantage} compares the answers to a prompt; set "
            "rollout.group_size=8."
        )
    return found


def _kl(config: RL) -> list[str]:
    algorithm, found = config.algorithm, []
    if algorithm.kl_coef == 0:
        for key in ("kl_corrected", "kl_target"):  # kl and kl_in come with presets
            reason = "algorithm.kl_coef=0 leaves the KL term out; set algorithm.kl_coef=0.04"
            found += without_effect(config, f"algorithm.{key}", reason)
    elif algorithm.kl_target > 0 and algorithm.kl_in == "loss":
        found.append("algorithm.kl_target: steers the KL in the reward; set algorithm.kl_in=reward, or kl_target=0.")
    if algorithm.kl_target == 0:
        found += without_effect(config, "algorithm.kl_horizon", "algorithm.kl_target=0 keeps kl_coef fixed")
    episodes = config.rollout.prompts * config.rollout.group_size
    if algorithm.kl_target > 0 and algorithm.kl_horizon <= 0.2 * episodes:
        found.append(
            f"algorithm.kl_horizon={algorithm.kl_horizon}: too short for {episodes} episodes a step; set "
            f"{episodes} or more."
        )
    return found


def _surrogate(config: RL) -> list[str]:
    algorithm, found = config.algorithm, []
    name = algorithm.surrogate
    if name == "reinforce" and algorithm.updates_per_batch * algorithm.passes > 1:
        found.append(
            "algorithm.surrogate=reinforce: has no importance ratio, so only the first update of a batch would be "
            "right; set algorithm.updates_per_batch=1 and algorithm.passes=1, or another surrogate."
        )
    bounded = name == "importance" and algorithm.second_moment > 0  # M2PO, which is made for old answers
    if name in UNCLIPPED and config.rollout.max_staleness > 0 and not bounded:
        found.append(
            f"algorithm.surrogate={name}: is not bounded, and rollout.max_staleness={config.rollout.max_staleness} "
            "trains on answers of older weights; set algorithm.surrogate=clip or another bounded one."
        )
    if 0 < algorithm.dual_clip <= 1:
        found.append(f"algorithm.dual_clip={algorithm.dual_clip:g}: must be above 1, as in 3, or 0 for none.")
    if algorithm.correction_low > algorithm.correction_high:
        found.append("algorithm.correction_low is above algorithm.correction_high, so nothing would be left.")
    if (name == "online_dpo") != (algorithm.advantage == "best_and_worst"):
        found.append(
            "algorithm.surrogate=online_dpo and algorithm.advantage=best_and_worst belong together: set both, or "
            "algorithm=online_dpo."
        )
    if name == "online_dpo" and algorithm.denominator != "sequence":
        found.append("algorithm.surrogate=online_dpo: has one loss a pair; set algorithm.denominator=sequence.")
    return found


def _critic(config: RL) -> list[str]:
    critic, found = config.critic, []
    if config.algorithm.advantage not in CRITIC:
        reason = f"algorithm.advantage={config.algorithm.advantage} has no critic; set gae"
        for key in (k for k in documentation(RL) if k.startswith("critic.")):
            found += without_effect(config, key, reason)
    elif critic.shared:
        for key in ("critic.path", "critic.lr", "critic.freeze_steps"):
            found += without_effect(config, key, "critic.shared=true has no model of its own")
    else:
        found += without_effect(config, "critic.coef", "critic.shared=false; the critic has its own optimizer")
    return found


def _dynamic_sampling(config: RL) -> list[str]:
    found = []
    if config.algorithm.advantage == "relative" and config.algorithm.baseline == "none":
        found.append(
            "algorithm.dynamic_sampling=true: drops groups whose rewards are all the same, but with "
            "algorithm.baseline=none those "
            "do train; set algorithm.baseline=group or algorithm.dynamic_sampling=false."
        )
    elif config.rollout.group_size == 1:
        found.append(
            "algorithm.dynamic_sampling=true: a group of one always has equal rewards; set rollout.group_size=8."
        )
    if config.algorithm.max_refill == 0:
        found.append(
            "algorithm.max_refill=0: algorithm.dynamic_sampling=true may then replace nothing; set "
            "algorithm.max_refill=4."
        )
    return found
