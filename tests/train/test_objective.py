"""What a preset's loss is when older weights have sampled, against plain floats: its keys from the paper."""

from collections.abc import Callable
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.algorithms import estimators
from birl.config import schema
from birl.config.decided import proximal, remembers
from birl.config.keys import documentation
from birl.config.load import load
from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.train.build_worker import objective_of
from birl.train.objective import ALL_SURROGATES, LossInputs, surrogate_of
from birl.types import Sample

PRESETS = Path(schema.__file__).parents[1] / "presets" / "algorithm"
BEHAVIOUR = [[-0.5, -1.2, -2.0], [-0.3, -0.9]]
PROXIMAL = [[-0.25, -1.3, -1.2], [-0.9, -0.3]]  # the learner's, before the first of two updates
LOGP = [[-0.1, -1.9, -1.1], [-1.3, -0.2]]
ADVANTAGES = [1.0, -0.7]

Gradient = Callable[[float, float, float, float], float]


def batch(remembered: bool = False) -> Batch:
    samples = [
        Sample(
            tokens=(1, *range(2, 2 + len(old))),
            mask=(False, *[True] * len(old)),
            logprobs=(0.0, *old),
            versions=(0,) * (len(old) + 1),
            advantage=advantage,
            group=i,
            episode=0,
            proximal=(0.0, *before) if remembered else None,
        )
        for i, (old, before, advantage) in enumerate(zip(BEHAVIOUR, PROXIMAL, ADVANTAGES, strict=True))
    ]
    (made,) = pack(samples, [1.0] * len(samples), 64)
    return made


def gradient(*words: str, ref_logp: Tensor | None = None) -> list[float]:
    """-dL/dl_t of each token, whatever the denominator: its weight in the batch is 1."""
    config = load(schema.RL, ["data.train=x", "rollout.max_staleness=4", *words])
    learner: Any = SimpleNamespace(version=3)
    logp = torch.tensor([x for own in LOGP for x in own], requires_grad=True)
    now = torch.stack([logp.detach(), torch.zeros_like(logp)])
    surrogate = surrogate_of(config.algorithm)
    objective = objective_of(
        config, learner, surrogate, reference=None, logp_and_entropy=lambda batches: [now] * len(batches)
    )
    made = batch(remembers(config))
    known = LossInputs(ref_logp=ref_logp)
    if objective.needs_statistics():
        (known,) = objective.prepare([made], 0, [None])
    kl_coef = config.algorithm.kl_coef if ref_logp is not None else 0.0
    loss, _ = objective._loss(logp, torch.zeros_like(logp), made, known=known, kl_coef=kl_coef, value_weight=0.0)
    loss.backward()
    assert logp.grad is not None
    return (-logp.grad / made.weights).tolist()


def tokens() -> list[tuple[float, float, float, list[float], list[float]]]:
    return [
        (new, old, advantage, now, before)
        for now, before, advantage in zip(LOGP, BEHAVIOUR, ADVANTAGES, strict=True)
        for new, old in zip(now, before, strict=True)
    ]


def dppo(new: float, old: float, a: float, *_: Any) -> float:
    """2602.04879 eq. 11-12: the gradient w A, none where |pi - mu| > 0.15 on the side that A pushes to."""
    far = exp(new) - exp(old)
    masked = abs(far) > 0.15 and (a > 0) == (far > 0)
    return 0.0 if masked else exp(new - old) * a


def cispo(new: float, old: float, a: float, *_: Any) -> float:
    """2506.13585 eq. 4-5: sg(min(w, 5)) A grad log pi."""
    return min(exp(new - old), 5.0) * a


def gspo(new: float, old: float, a: float, now: list[float], before: list[float]) -> float:
    """2507.18071 eq. 7: s A / |o| a token (the sum over the answer has 1 / |o| in front of each), clipped."""
    s = exp(sum(n - b for n, b in zip(now, before, strict=True)) / len(now))
    clipped = (a > 0 and s > 1 + 4e-4) or (a < 0 and s < 1 - 3e-4)
    return 0.0 if clipped else s * a


def m2po(new: float, old: float, a: float, *_: Any) -> float:
    """2510.01161 algorithm 1 with a bound that leaves only what pulls back: w A uncut, however far."""
    binding = (a > 0) == (new > old)
    return 0.0 if binding else exp(new - old) * a


def gmpo(new: float, old: float, a: float, now: list[float], before: list[float]) -> float:
    """2507.20673 eq. 4: the geometric mean of ratios bounded at e^0.4 or e^-0.4; a bounded token has none."""
    bounded = [min(n - b, 0.4) if a > 0 else max(n - b, -0.4) for n, b in zip(now, before, strict=True)]
    beyond = new - old > 0.4 if a > 0 else new - old < -0.4
    return 0.0 if beyond else exp(sum(bounded) / len(bounded)) * a


def sapo(new: float, old: float, a: float, *_: Any) -> float:
    """2511.20347: the gate's slope 4 p (1 - p) on w A, p = sigmoid(tau (w - 1)), tau 1 for A > 0 and 1.05 else."""
    w = exp(new - old)
    p = 1 / (1 + exp(-(1.0 if a > 0 else 1.05) * (w - 1)))
    return 4 * p * (1 - p) * w * a


def decoupled(new: float, old: float, a: float, *_: Any) -> float:
    """2505.24298 eq. 5 in the first update: the ratio is 1; the weight is cut at algorithm.correction_high."""
    return min(exp(new - old), 2.0) * a


def sao(new: float, old: float, a: float, *_: Any) -> float:
    """2607.07508 section 3.1: w A within the bounds, nothing beyond either of them, whatever A is."""
    w = exp(new - old)
    return w * a if 0.2 <= w <= 4 else 0.0


AGAINST_SAMPLER = [dppo, cispo, gspo, gmpo, sapo, m2po, decoupled, sao]
CLIPS = {  # preset -> 1707.06347 eq. 7's range, in DAPO (2503.14476) and what builds on it another one above
    **dict.fromkeys(
        ("dr_grpo", "grpo", "bnpo", "lite_ppo", "gdpo", "pass_at_k", "ppo", "decoupled", "echo"), (0.2, 0.2)
    ),
    **dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), (0.2, 0.2)),
    **{"dapo": (0.2, 0.28), "top_entropy": (0.2, 0.28), "clip_cov": (1.0, 1.0)},
}
#: refused where answers are old
UNBOUNDED = ("distill", "kl_cov", "maxrl", "opo", "opsd", "reinforce", "remax", "rloo", "sdft", "sdpo")
NEEDS = {"distill": ["algorithm.teacher=x"], "echo": ["env=guess_number"]}
PAIRS = ("online_dpo",)  # tests/algorithms/test_online.py


@pytest.mark.parametrize("preset", CLIPS)
def test_a_clip_starts_from_the_proximal_policy_weighed_against_what_sampled(preset: str) -> None:
    """2505.24298 eq. 5 in the second update: v min(u A, clip(u) A), u = pi / proximal, v = proximal / behaviour."""
    low, high = CLIPS[preset]
    expected = []
    for (new, old, a, *_), start in zip(tokens(), [x for own in PROXIMAL for x in own], strict=True):
        u, v = exp(new - start), min(exp(start - old), 2.0)
        clipped = u > 1 + high if a > 0 else u < 1 - low
        expected.append(0.0 if clipped else v * u * a)
    assert gradient(f"algorithm={preset}", "algorithm.updates_per_batch=2", *NEEDS.get(preset, ())) == pytest.approx(
        expected, rel=1e-5
    )
    if preset != "clip_cov":
        assert 0.0 in expected


@pytest.mark.parametrize("preset", UNBOUNDED)
def test_an_unbounded_preset_is_refused_where_answers_are_old(preset: str) -> None:
    with pytest.raises(BirlError, match="is not bounded"):
        gradient(f"algorithm={preset}", *NEEDS.get(preset, ()))


@pytest.mark.parametrize("preset", AGAINST_SAMPLER, ids=lambda f: f.__name__)
def test_a_stale_gradient_is_the_papers(preset: Callable[..., float]) -> None:
    words = [f"algorithm={preset.__name__}", "algorithm.scale_rewards=none"]
    if preset is m2po:
        words.append("algorithm.second_moment=1e-9")
    assert gradient(*words) == pytest.approx([preset(*t) for t in tokens()], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_corrected_kl_is_weighed_against_what_sampled(updates: int) -> None:
    """2512.02556 section 3.1: w k3 with w = pi / mu, mu what sampled; its gradient is w (k3 + 1 - ref / pi)."""
    words = ["algorithm=dr_grpo", f"algorithm.updates_per_batch={updates}", "algorithm.kl_coef=0.3"]
    ref = [-0.7, -1.0, -1.6, -0.8, -0.6]
    corrected = gradient(*words, "algorithm.kl_corrected=true", ref_logp=torch.tensor(ref))
    expected = []
    for plain, f, (new, old, *_) in zip(gradient(*words), ref, tokens(), strict=True):
        k3 = exp(f - new) - (f - new) - 1
        expected.append(plain - 0.3 * exp(new - old) * (k3 + 1 - exp(f - new)))
    assert corrected == pytest.approx(expected, rel=1e-5)


def test_m2po_against_the_learners_own_log_probs_keeps_the_whole_weight() -> None:
    words = ["algorithm=m2po", "algorithm.second_moment=1e-9", "algorithm.proximal=recompute"]
    assert gradient(*words) == pytest.approx([m2po(*t) for t in tokens()], rel=1e-5, abs=1e-7)
    assert max(exp(new - old) for new, old, *_ in tokens()) > 2


# preset -> its source, and the keys that this fixes: the paper's equation, or its authors' script
PAPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bnpo": ("TRL: loss_type bnpo of grpo_trainer.py", {"surrogate": "clip", "denominator": "token"}),
    "cispo": ("arXiv:2506.13585 eq. 4", {"clip_low": 1.0, "denominator": "token", "proximal": "behaviour"}),
    "clip_cov": (
        "PRIME-RL/Entropy-Mechanism-of-RL: recipe/dapo/7b_clip_cov.sh",
        {"clip_low": 1.0, "clip_high": 1.0, "entropy_share": 2e-4},
    ),
    "dapo": (
        "arXiv:2503.14476 eq. 8 and section 4.1",
        {
            "scale_rewards": "group",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "denominator": "token",
            "kl_coef": 0.0,
            "dynamic_sampling": True,
            "overlong_buffer": 51,  # a fifth of rollout.max_tokens
        },
    ),
    "decoupled": ("arXiv:2505.24298 eq. 5", {"proximal": "recompute", "clip_low": 0.2, "clip_high": 0.2}),
    "distill": ("arXiv:2306.13649 section 3.1, reverse KL", {"advantage": "zero", "teacher_coef": 1.0, "kl_coef": 0.0}),
    "dppo": (
        "verl (by its authors): examples/dppo_trainer/run_qwen30b_dppo.sh",
        {"scale_rewards": "none", "denominator": "constant", "surrogate_args": ["threshold=0.15"]},
    ),
    "dr_grpo": (
        "arXiv:2503.20783 section 3.2",
        {"baseline": "group", "scale_rewards": "none", "denominator": "constant", "kl_coef": 0.0},
    ),
    "echo": (
        "arXiv:2605.24517 section 3.1",
        {"observation_coef": 0.05, "scale_rewards": "group", "denominator": "sequence", "kl_coef": 0.0},
    ),
    "gdpo": ("arXiv:2601.05242, GRPO's loss", {"advantage": "gdpo", "surrogate": "clip", "denominator": "sequence"}),
    "gmpo": ("arXiv:2507.20673 section 4", {"clip_low": 0.4, "clip_high": 0.4, "proximal": "behaviour"}),
    "grpo": (
        "arXiv:2402.03300 eq. 3-4 and section 4.2",
        {"scale_rewards": "group", "denominator": "sequence", "kl": "k3", "kl_coef": 0.04, "kl_in": "loss"},
    ),
    "gspo": ("arXiv:2507.18071 section 5.1", {"clip_low": 3e-4, "clip_high": 4e-4, "denominator": "sequence"}),
    "kl_cov": (
        "PRIME-RL/Entropy-Mechanism-of-RL: recipe/dapo/7b_kl_cov.sh, k_percent",
        {"surrogate": "importance", "entropy_control": "kl_cov", "entropy_share": 2e-3, "held_coef": 1.0},
    ),
    "lite_ppo": (
        "arXiv:2508.08221, Lite PPO",
        {"baseline": "group", "scale_rewards": "rewards", "denominator": "token", "surrogate": "clip"},
    ),
    "m2po": ("arXiv:2510.01161 algorithm 1", {"second_moment": 0.04, "proximal": "behaviour", "kl_coef": 0.0}),
    "maxrl": ("arXiv:2602.02710: (r - mean) / mean", {"baseline": "group", "scale_rewards": "mean"}),
    "online_dpo": ("arXiv:2402.04792 algorithm 1", {"advantage": "best_and_worst", "surrogate": "online_dpo"}),
    "opo": (
        "arXiv:2505.23585, optimal baseline by length",
        {"baseline": "optimal", "scale_rewards": "none", "surrogate": "reinforce", "kl_coef": 0.0, "entropy_coef": 0.0},
    ),
    "opsd": (
        "arXiv:2601.18734; siyan-zhao/OPSD (its authors'): scripts/run_opsd.sh",
        {"teacher": "self", "teacher_rate": 0.0, "teacher_divergence": "jsd", "teacher_beta": 0.5, "advantage": "zero"},
    ),
    "pass_at_k": ("arXiv:2508.10751 eq. 11-15", {"advantage": "pass_at_k", "surrogate": "clip"}),
    "ppo": (
        "arXiv:1707.06347 eq. 7; arXiv:2203.02155 appendix C.4",
        {"advantage": "gae", "clip_low": 0.2, "clip_high": 0.2, "kl": "k1", "kl_coef": 0.02, "kl_in": "reward"},
    ),
    "reinforce": ("Williams 1992", {"baseline": "none", "scale_rewards": "none", "surrogate": "reinforce"}),
    "reinforce_pp": (
        "arXiv:2501.03262 eq. 8; OpenRLHF (its authors'): train_reinforce_llama_ray_hybrid_engine.sh",
        {"advantage": "returns", "surrogate": "clip", "kl": "k1", "kl_coef": 1e-4, "kl_in": "reward"},
    ),
    "reinforce_pp_baseline": (
        "OpenRLHF (its authors'): train_reinforce_baseline_hybrid_engine.sh",
        {"baseline": "group", "scale_rewards": "batch", "kl": "k2", "kl_coef": 1e-5, "kl_in": "loss"},
    ),
    "remax": (
        "arXiv:2310.10505 algorithm 1",
        {"baseline": "greedy", "scale_rewards": "none", "surrogate": "reinforce"},
    ),
    "rloo": (
        "arXiv:2402.14740, leave-one-out estimator",
        {"baseline": "leave_one_out", "scale_rewards": "none", "surrogate": "reinforce", "kl": "k1", "kl_in": "reward"},
    ),
    "sao": (
        "arXiv:2607.07508 section 3.1",
        {"advantage": "gae", "surrogate": "importance", "correction": "mask", "proximal": "recompute", "kl_coef": 0.0},
    ),
    "sapo": (
        "arXiv:2511.20347, the gate and its temperatures",
        {"surrogate": "sapo", "scale_rewards": "group", "denominator": "sequence", "proximal": "behaviour"},
    ),
    "sdft": (
        "arXiv:2601.19897 algorithm 1",
        {"teacher": "self", "teacher_rate": 0.01, "teacher_divergence": "reverse_kl", "advantage": "zero"},
    ),
    "sdpo": (
        "arXiv:2601.20802 eq. 1; lasgroup/SDPO (its authors'): README, self-distillation",
        {
            "teacher": "self",
            "teacher_rate": 0.05,
            "teacher_divergence": "jsd",
            "teacher_beta": 0.5,
            "teacher_top_k": 100,
        },
    ),
    "top_entropy": (
        "arXiv:2506.01939, DAPO's loss on the top fifth",
        {"entropy_control": "top_entropy", "entropy_share": 0.2, "clip_high": 0.28, "denominator": "token"},
    ),
}


def test_each_preset_has_its_source() -> None:
    assert list(PAPERS) == sorted(path.stem for path in PRESETS.glob("*.yaml"))
    assert {*(f.__name__ for f in AGAINST_SAMPLER), *CLIPS, *UNBOUNDED, *PAIRS} == set(PAPERS)


@pytest.mark.parametrize("preset", PAPERS)
def test_a_preset_has_the_keys_of_its_paper(preset: str) -> None:
    source, keys = PAPERS[preset]
    words = [f"algorithm={preset}", *NEEDS.get(preset, ())]
    if "proximal" in keys:
        words.append("rollout.max_staleness=2")
    config = load(schema.RL, ["data.train=x", *words])
    found = {name: getattr(config.algorithm, name) for name in keys} | (
        {"proximal": proximal(config)} if "proximal" in keys else {}
    )
    assert found == keys, source


def test_ratios_of_the_table_are_far_enough_to_be_bounded() -> None:
    assert any(abs(new - old) > log(1.4) for new, old, *_ in tokens())


def test_the_configuration_knows_the_parts_of_the_package() -> None:
    """So that a misspelt one is told before torch is imported."""
    assert set(documentation(schema.RL)["algorithm.surrogate"].choices) == set(ALL_SURROGATES)
    assert set(documentation(schema.RL)["algorithm.advantage"].choices) == {
        *estimators.ADVANTAGES,
        *estimators.BY_TOKEN,
    }
