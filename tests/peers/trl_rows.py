"""birl beside TRL's own trainers: their methods, on objects made without a constructor."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.rewards import get_soft_overlong_punishment

from birl.algorithms import advantages as estimate
from birl.algorithms import corrections, selection, surrogates
from tests.peers.compare import Case, Pair, check, deviation, deviation_in_group, rescaled


def itself(x: Any, *_: Any, **__: Any) -> Any:
    return x


ONE_PROCESS = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    sync_gradients=True,
    gather=itself,
    gather_for_metrics=itself,
    reduce=itself,
    pad_across_processes=itself,
    unwrap_model=itself,
)


def bare(kind: type, **attributes: Any) -> Any:
    """A trainer of that class with these attributes, and those that every method here reads."""
    trainer = object.__new__(kind)
    common = {
        "accelerator": ONE_PROCESS,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    trainer.__dict__.update(common | attributes)
    return trainer


def scored(kind: type, case: Case, parts: Tensor, sampled: Tensor | None = None, **attributes: Any) -> dict:
    """What `_generate_and_score_completions` gives for these rewards [E, K] and the sampler's log-probs."""
    answers = [[1] * int(n) for n in case.answer_length]
    prompts = [[1, 1]] * len(answers)
    texts = ["x"] * len(answers)
    logps = None if sampled is None else [row[:n].tolist() for row, n in zip(sampled, case.answer_length, strict=True)]
    holes = [row[:n].long().tolist() for row, n in zip(case.mask, case.answer_length, strict=True)]
    generated = (prompts, answers, texts)
    if kind is GRPOTrainer:
        generated = (prompts, answers, holes, texts, logps, {}, None, None)
    names = [f"reward_{k}" for k in range(parts.shape[1])]
    args = SimpleNamespace(
        per_device_train_batch_size=len(answers),
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        report_to=[],
    )
    given = {
        **{"args": args, "environment_factories": None, "environments": None, "tools": None},
        **{"_generate": lambda _: generated, "_tokenizer": SimpleNamespace(pad_token_id=0), "pad_to_multiple_of": None},
        **{"mask_truncated_completions": False, "num_iterations": 1, "num_generations": int(case.group_size[0])},
        **{"use_vllm": sampled is not None, "vllm_importance_sampling_correction": True, "beta": 0.0},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (case.logp[:, : max(case.answer_length)], None, None),
        "_calculate_rewards": lambda *_: parts.clone(),
        "reward_weights": torch.ones(parts.shape[1]),
        "reward_funcs": names,
        "reward_func_names": names,
        "reward_clip_range": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "_logs": {"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": []},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
    }
    trainer = bare(kind, **(given | attributes))
    return trainer._generate_and_score_completions([{"prompt": "x"} for _ in answers])


SCORE = "GRPOTrainer._generate_and_score_completions"


SAMPLE = "sample deviation (n - 1) + 1e-4, birl population (n) + 1e-6; the paper says only std"


RLOO = "sample deviation (n - 1) + 1e-4, birl population (n) + 1e-6; the paper does not normalise"


CENTRED = (
    "divides by the deviation of the rewards, as Lite PPO's authors do; birl's scale batch by that of the centred "
    "rewards, as REINFORCE++ with a baseline; sample deviation and 1e-4 besides"
)


def even(seed: int) -> Case:
    """Groups of one size: TRL has no others."""
    return Case(seed, size=2 + seed % 4)


@check("GRPO advantage, scale none", "TRL", SCORE)
def _(seed: int) -> Pair:
    case = even(seed)
    found = scored(GRPOTrainer, case, case.rewards[:, None], scale_rewards="none")["advantages"]
    return Pair((found,), (estimate.centre(case.rewards, case.group, "group"),))


@check("GRPO advantage, scale group", "TRL", SCORE, SAMPLE)
def _(seed: int) -> Pair:
    case = even(seed)
    found = scored(GRPOTrainer, case, case.rewards[:, None])["advantages"]
    plain = estimate.scale(estimate.centre(case.rewards, case.group, "group"), case.group, "group")
    ours = rescaled(plain, deviation_in_group(case.rewards, case.group), case.group_size, eps=1e-4)
    return Pair((found,), (ours,), (plain,))


@check("Lite PPO advantage, birl's scale rewards", "TRL", SCORE, SAMPLE)
def _(seed: int) -> Pair:
    case = even(seed)
    found = scored(GRPOTrainer, case, case.rewards[:, None], scale_rewards="batch")["advantages"]
    centred = estimate.centre(case.rewards, case.group, "group")
    plain = estimate.scale(centred, case.group, "rewards", rewards=case.rewards)
    ours = rescaled(plain, deviation(case.rewards), len(plain), eps=1e-4)
    return Pair((found,), (ours,), (plain,))


@check("group mean, birl's scale batch", "TRL", SCORE, CENTRED)
def _(seed: int) -> Pair:
    case = even(seed)
    found = scored(GRPOTrainer, case, case.rewards[:, None], scale_rewards="batch")["advantages"]
    centred = estimate.centre(case.rewards, case.group, "group")
    plain = estimate.scale(centred, case.group, "batch")
    lite = plain * (deviation(centred) + estimate.EPS) / (deviation(case.rewards) + estimate.EPS)
    return Pair((found,), (rescaled(lite, deviation(case.rewards), len(plain), eps=1e-4),), (plain,))


@check("GDPO advantage", "TRL", SCORE, SAMPLE)
def _(seed: int) -> Pair:
    case = even(seed)
    parts, weights = case.normal(len(case.group), 3), torch.tensor([1.0, 0.5, 2.0])
    kind = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    found = scored(GRPOTrainer, case, parts, **kind)["advantages"]
    total = torch.zeros(len(case.group))
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        each = estimate.scale(estimate.centre(part, case.group, "group"), case.group, "group")
        total += weight * rescaled(each, deviation_in_group(part, case.group), case.group_size, eps=1e-4)
    last = estimate.scale(estimate.centre(total, case.group, "batch"), case.group, "batch")
    ours = rescaled(last, deviation(total), len(total), eps=1e-4)
    return Pair((found,), (ours,), (estimate.gdpo(parts, case.group, weights),))


@check("RLOO advantage", "TRL", "RLOOTrainer._generate_and_score_completions")
def _(seed: int) -> Pair:
    case = even(seed)
    found = scored(RLOOTrainer, case, case.rewards[:, None], normalize_advantages=False)["advantages"]
    return Pair((found,), (estimate.centre(case.rewards, case.group, "leave_one_out"),))


@check("RLOO advantage, normalised", "TRL", "RLOOTrainer._generate_and_score_completions", RLOO)
def _(seed: int) -> Pair:
    case = even(seed)
    found = scored(RLOOTrainer, case, case.rewards[:, None], normalize_advantages=True)["advantages"]
    centred = estimate.centre(case.rewards, case.group, "leave_one_out")
    plain = estimate.scale(centred, case.group, "batch")
    return Pair((found,), (rescaled(plain, deviation(centred), len(plain), eps=1e-4),), (plain,))


@check("DAPO overlong penalty", "TRL", "rewards.get_soft_overlong_punishment")
def _(seed: int) -> Pair:
    lengths = torch.arange(1, 40)
    theirs = get_soft_overlong_punishment(30, 5 + seed)([[1] * int(n) for n in lengths])
    ours = estimate.overlong_penalty(lengths.double(), limit=30, buffer=5 + seed, penalty=1.0)
    return Pair((torch.tensor(theirs),), (ours,))


def by_trl(case: Case, loss_type: str, kind: type = GRPOTrainer, inputs: dict | None = None, **keys: Any):
    """The trainer's `_compute_loss` -> value, gradient [N]."""
    options = {
        "use_bias_correction_kl": False,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    args = SimpleNamespace(**{name: keys.pop(name, default) for name, default in options.items()})
    given = {
        **{"args": args, "loss_type": loss_type, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None},
        **{"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28},
        **{"use_vllm": False, "vllm_importance_sampling_correction": True, "current_gradient_accumulation_steps": 1},
        **{"max_completion_length": case.limit, "_entropy_bonus_enabled": False},
    }
    data = {
        "prompt_ids": torch.ones(len(case.group), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(case.group), 2, dtype=torch.int64),
        "completion_ids": torch.ones_like(case.mask, dtype=torch.int64),
        "completion_mask": case.inside.long(),
        "tool_mask": case.mask.long(),
        "advantages": case.advantage,
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.ref,
        "num_items_in_batch": case.mask.sum(),
    }
    trainer = bare(kind, **(given | keys))

    def loss(logp: Tensor) -> Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
        return trainer._compute_loss(trainer.model, data | (inputs or {}))

    return case.theirs(loss)


LOSS = "GRPOTrainer._compute_loss"


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def loss_case(
    what: str, loss_type: str, denominator: str, surrogate, options: dict, *, kind: type = GRPOTrainer, **keys: Any
) -> None:
    limit = keys.pop("limit", None)
    settings = ", ".join([f"loss_type={loss_type}", *(f"{name}={value}" for name, value in keys.items())])

    @check(
        what,
        "TRL",
        f"{kind.__name__}._compute_loss({settings})" if kind is GRPOTrainer else f"{kind.__name__}._compute_loss",
    )
    def _(seed: int) -> Pair:
        case = Case(seed)
        ours = case.ours(surrogate, denominator, options=options, limit=limit)
        return Pair(by_trl(case, loss_type, kind, **keys), ours)


loss_case("PPO clip, denominator sequence", "grpo", "sequence", surrogates.clip, CLIP)


loss_case("PPO clip, denominator token", "bnpo", "token", surrogates.clip, CLIP)


loss_case("PPO clip, denominator token", "dapo", "token", surrogates.clip, CLIP)


loss_case("PPO clip, denominator constant", "dr_grpo", "constant", surrogates.clip, CLIP)


loss_case("PPO clip, sum of tokens, mean of answers", "luspo", "constant", surrogates.clip, CLIP, limit=1)


loss_case("dual clip, c above 1 + clip_high", "dapo", "token", surrogates.clip, CLIP | {"dual_clip": 1.5}, delta=1.5)


NARROW = {"clip_low": 0.03, "clip_high": 0.05}


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.05}


loss_case("GSPO, mean of answers", "grpo", "sequence", surrogates.gspo, NARROW, **SEQUENCE)


loss_case("GSPO, token mean", "bnpo", "token", surrogates.gspo, NARROW, **SEQUENCE)


loss_case("GMPO", "grpo", "sequence", surrogates.gmpo, CLIP, kind=GMPOTrainer)


loss_case("SAPO", "sapo", "sequence", surrogates.sapo, {"tau_positive": 1.0, "tau_negative": 1.05})


@check(
    "dual clip, c below 1 + clip_high",
    "TRL",
    LOSS + "(delta)",
    "delta then is the bound where A > 0, and 1 + epsilon_high the one where A < 0; the paper's c is for A < 0 only",
)
def _(seed: int) -> Pair:
    case = Case(seed)
    options = CLIP | {"clip_high": 0.6, "dual_clip": 1.2}
    plain = case.ours(surrogates.clip, options=options)
    ours = case.ours(surrogates.clip, options=options | {"clip_high": 0.2, "dual_clip": 1.6})
    return Pair(by_trl(case, "dapo", epsilon_high=0.6, delta=1.2), ours, plain)


@check(
    "CISPO",
    "TRL",
    LOSS + "(loss_type=cispo)",
    "the upper bound is epsilon_high itself, there is no lower one; the paper's eq. 5 has 1 - low and 1 + high, as "
    "birl. Equal with clip_high = epsilon_high - 1 and clip_low = 1",
)
def _(seed: int) -> Pair:
    case = Case(seed)
    theirs = by_trl(case, "cispo", epsilon_low=0.2, epsilon_high=1.3)
    ours, plain = (
        case.ours(surrogates.cispo, options={"clip_low": low, "clip_high": high})
        for low, high in ((1.0, 0.3), (0.2, 1.3))
    )
    return Pair(theirs, ours, plain)


@check("PPO clip times a correction", "TRL", LOSS + "(use_vllm)")
def _(seed: int) -> Pair:
    case = Case(seed)
    weights = case.uniform(*case.mask.shape) * 2
    inputs = {"importance_sampling_ratio": weights}
    theirs = by_trl(case, "dapo", inputs=inputs, use_vllm=True)
    return Pair(theirs, case.ours(surrogates.clip, options=CLIP, factor=case.flat(weights)))


def reference_case(what: str, corrected: bool) -> None:
    @check(what, "TRL", LOSS + "(beta" + (", use_bias_correction_kl)" if corrected else ")"))
    def _(seed: int) -> Pair:
        case = Case(seed)
        theirs = by_trl(case, "dapo", beta=0.3, use_bias_correction_kl=corrected)
        parts = {"ref_logp": case.flat(case.ref), "kl": "k3", "kl_coef": 0.3}
        parts |= {"kl_from": case.flat(case.old)} if corrected else {}
        return Pair(theirs, case.ours(surrogates.clip, options=CLIP, **parts))


reference_case("KL k3 in the loss", False)


reference_case("unbiased KL in the loss", True)


@check("off-policy sequence masking", "TRL", "GRPOTrainer.get_off_policy_mask")
def _(seed: int) -> Pair:
    case = Case(seed)
    kept = GRPOTrainer.get_off_policy_mask(case.advantage[:, None], case.logp, case.old, case.mask.double(), 0.05)
    ratio = case.flat(case.logp - case.old)
    ours = ~corrections.rejected_off_policy(ratio, case.sample, case.flat(case.advantages), limit=0.05)
    return Pair((case.flat(kept.expand(case.mask.shape)),), (ours.double(),))


@check(
    "80/20 rule",
    "TRL",
    "GRPOTrainer.get_high_entropy_mask",
    "the bound is an interpolated quantile: N - ceil((N - 1)(1 - share)) tokens, in birl ceil(share N); the paper says "
    "top share of all tokens",
)
def _(seed: int) -> Pair:
    case = Case(seed)
    entropy, share = case.uniform(*case.mask.shape).float().double(), 0.2337
    theirs = bare(GRPOTrainer).get_high_entropy_mask(entropy, case.mask.long(), 1 - share)
    flat = case.flat(entropy)
    count = len(flat) - torch.tensor((len(flat) - 1) * (1 - share)).ceil().item()
    found = (selection.top_entropy(flat, s).double() for s in (count / len(flat), share))
    return Pair((case.flat(theirs).double(),), (next(found),), (next(found),))


def importance_case(level: str, mode: str) -> None:
    what = {"truncate": "truncated", "mask": "masked"}[mode]

    @check(f"{what} importance sampling, {level}", "TRL", f"{SCORE}({level}_{mode})")
    def _(seed: int) -> Pair:
        case = even(seed)
        low, high = (0.7, 1.6) if mode == "mask" else (0.0, 1.6)
        bounds = {"vllm_importance_sampling_clip_min": low or None, "vllm_importance_sampling_clip_max": high}
        kind = {"vllm_importance_sampling_mode": f"{level}_{mode}"} | bounds
        found = scored(GRPOTrainer, case, case.rewards[:, None], case.old, **kind)["importance_sampling_ratio"]
        width = max(case.answer_length)
        theirs = found.expand(len(found), width)[case.mask[:, :width]]
        ratio = case.flat(case.logp - case.old)
        ours = corrections.importance(ratio, case.sample, level=level, mode=mode, low=low, high=high)
        return Pair((theirs,), (ours,))


for level in ("token", "sequence"):
    for mode in ("truncate", "mask"):
        importance_case(level, mode)
