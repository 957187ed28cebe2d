"""Each surrogate against plain Python floats: values, gradients by finite differences, and what must not change
them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from birl.algorithms.surrogates import LOG_LIMIT, SEQUENCE, SURROGATES, Surrogate, clip
from birl.config.decided import UNCLIPPED
from tests.algorithms.cases import EXACT, Tokens, close, differences, double, gradient_of, ids, tokens

# Reference: (logp, stopped, case, options) -> losses, where `stopped` is what the papers put under a stop-gradient.
Reference = Callable[[list[float], list[float], Tokens, dict[str, Any]], list[float]]


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(ratio: float, a: float, options: dict[str, Any]) -> float:
    loss = -min(ratio * a, bounded(ratio, 1 - options["clip_low"], 1 + options["clip_high"]) * a)
    c = options.get("dual_clip", 0)
    return min(loss, -c * a) if c and a < 0 else loss


def clip_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    return [ppo(math.exp(p - o), a, options) for p, o, a in zip(logp, case.old, case.advantages, strict=True)]


def gspo_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    out = []
    for run in case.runs():
        s = math.exp(sum(stopped[t] - case.old[t] for t in run) / len(run))
        out += [ppo(s * math.exp(logp[t] - stopped[t]), case.advantages[t], options) for t in run]
    return out


def gmpo_of_sequence(logp: list[float], run: range, case: Tokens, options: dict[str, Any]) -> float:
    """-A (prod_t clipped ratio)^(1/|o|), as the paper has it for a sequence."""
    product = 1.0
    for t in run:
        ratio = math.exp(logp[t] - case.old[t])
        a = case.advantages[t]
        edge = bounded(ratio, math.exp(-options["clip_low"]), math.exp(options["clip_high"]))
        product *= min(ratio, edge) if a >= 0 else max(ratio, edge)
    return product ** (1 / len(run))


def gmpo_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    out = []
    for run in case.runs():
        value = gmpo_of_sequence(logp, run, case, options)
        out += [-case.advantages[t] * value for t in run]
    return out


def cispo_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    return [
        -bounded(math.exp(q - o), 1 - options["clip_low"], 1 + options["clip_high"]) * a * p
        for p, q, o, a in zip(logp, stopped, case.old, case.advantages, strict=True)
    ]


def sapo_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    out = []
    for p, o, a in zip(logp, case.old, case.advantages, strict=True):
        tau = options.get("tau_positive", 1.0) if a > 0 else options.get("tau_negative", 1.05)
        out.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(p - o) - 1))))
    return out


def reinforce_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    return [-p * a for p, a in zip(logp, case.advantages, strict=True)]


def importance_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    return [-math.exp(p - o) * a for p, o, a in zip(logp, case.old, case.advantages, strict=True)]


def dppo_reference(logp: list[float], stopped: list[float], case: Tokens, options: dict[str, Any]) -> list[float]:
    out = []
    for l_new, l_stopped, l_old, a in zip(logp, stopped, case.old, case.advantages, strict=True):
        p, q = math.exp(l_old), math.exp(l_stopped)
        if options["divergence"] == "tv":
            distance = abs(p - q)
        else:
            distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        away = a * (q - p) > 0
        out.append(0.0 if away and distance > options["threshold"] else -math.exp(l_new - l_old) * a)
    return out


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
CASES: list[tuple[str, dict[str, Any], Reference]] = [
    ("clip", CLIP, clip_reference),
    ("clip", CLIP | {"dual_clip": 1.4}, clip_reference),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.15}, gspo_reference),
    ("gmpo", {"clip_low": 0.4, "clip_high": 0.3}, gmpo_reference),
    ("cispo", CLIP, cispo_reference),
    ("cispo", {"clip_low": 5.0, "clip_high": 0.3}, cispo_reference),
    ("sapo", {}, sapo_reference),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 3.0}, sapo_reference),
    ("reinforce", {}, reinforce_reference),
    ("importance", {}, importance_reference),
    ("dppo", {"divergence": "tv", "threshold": 0.05}, dppo_reference),
    ("dppo", {"divergence": "kl", "threshold": 0.02}, dppo_reference),
]
EACH = pytest.mark.parametrize(("name", "options", "reference"), CASES)


def run(
    name: str, case: Tokens, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Surrogate, Tensor]:
    logp = double(case.logp).to(dtype).requires_grad_()
    old, advantages = double(case.old).to(dtype), double(case.advantages).to(dtype)
    return SURROGATES[name](logp, old, advantages, ids(case.sample), **options), logp


def weights_of(case: Tokens) -> list[float]:
    """One weight a sample, as every denominator gives."""
    return [w for n in case.lengths for w in [case.random.uniform(0.1, 1)] * n]


@EACH
@given(case=tokens())
def test_value_and_gradient_are_the_definition(
    name: str, options: dict[str, Any], reference: Reference, case: Tokens
) -> None:
    found, logp = run(name, case, options)
    close(found.loss, reference(case.logp, case.logp, case, options))
    weights = weights_of(case)

    def total(at: list[float]) -> float:
        return sum(w * v for w, v in zip(weights, reference(at, case.logp, case, options), strict=True))

    close(gradient_of(found.loss * double(weights), logp), differences(total, case.logp), EXACT)


@EACH
@given(case=tokens())
def test_on_policy_gradient_is_reinforce(
    name: str, options: dict[str, Any], reference: Reference, case: Tokens
) -> None:
    case.old = case.logp
    found, logp = run(name, case, options)
    close(gradient_of(found.loss, logp), [-a for a in case.advantages])
    assert not found.clipped.any()
    close(found.ratio, [1.0] * len(case.logp))


@EACH
@given(case=tokens())
def test_clipped_tokens_are_those_without_gradient(
    name: str, options: dict[str, Any], reference: Reference, case: Tokens
) -> None:
    found, logp = run(name, case, options)
    gradient = gradient_of(found.loss, logp).tolist()
    assert not found.ratio.requires_grad and not found.clipped.requires_grad and found.clipped.dtype == torch.bool
    if name == "cispo":
        low, high = 1 - options["clip_low"], 1 + options["clip_high"]
        assert found.clipped.tolist() == [not low <= w <= high for w in found.ratio.tolist()]
        found_zero = [g == 0 for g in gradient]
        assert found_zero == [a == 0 for a in case.advantages]
    else:
        expected = [c or a == 0 for c, a in zip(found.clipped.tolist(), case.advantages, strict=True)]
        assert [g == 0 for g in gradient] == expected
    if name in UNCLIPPED:
        assert not found.clipped.any()


@pytest.mark.parametrize("name", sorted(SEQUENCE))
@given(case=tokens())
def test_token_form_has_the_gradient_of_the_sequence_form(name: str, case: Tokens) -> None:
    options = {"clip_low": 0.1, "clip_high": 0.15}
    found, logp = run(name, case, options)
    weights = weights_of(case)

    def total(at: list[float]) -> float:
        out = 0.0
        for part in case.runs():
            if name == "gspo":  # eq. 5 of the paper, no stop-gradient anywhere
                s = math.exp(sum(at[t] - case.old[t] for t in part) / len(part))
                value = ppo(s, case.advantages[part[0]], options)
            else:
                value = -case.advantages[part[0]] * gmpo_of_sequence(at, part, case, options)
            out += len(part) * weights[part[0]] * value
        return out

    assert (found.loss.detach() * double(weights)).sum().item() == pytest.approx(total(case.logp), abs=1e-9)
    close(gradient_of(found.loss * double(weights), logp), differences(total, case.logp), EXACT)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_and_extremes_stay_finite(
    name: str, options: dict[str, Any], reference: Reference, dtype: torch.dtype
) -> None:
    logp = torch.tensor([0.0, 0.0, 0.0, -200.0, -200.0, 0.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([-200.0, -200.0, -200.0, 0.0, 0.0, 0.0], dtype=dtype)
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 1.0], dtype=dtype)
    found = SURROGATES[name](logp, old, advantages, torch.tensor([3, 4, 5, 6, 7, 8]), **options)
    gradient = gradient_of(found.loss, logp)
    for tensor in (found.loss, found.ratio, gradient):
        assert tensor.dtype == dtype and bool(tensor.isfinite().all())
    assert found.ratio.max() <= math.exp(LOG_LIMIT) * 1.001
    if name in ("clip", "gmpo", "importance", "dppo"):  # a bad answer far above its old probability
        assert found.clipped[1] and gradient[1] == 0


def test_dual_clip_bounds_the_loss_of_bad_answers_only() -> None:
    logp = torch.tensor([2.0, 2.0])
    found = clip(logp, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.tensor([0, 0]), **CLIP, dual_clip=3.0)
    assert found.loss.tolist() == pytest.approx([3.0, -1.28]) and found.clipped.tolist() == [True, True]
    with pytest.raises(ValueError, match="dual_clip"):
        clip(logp, logp, logp, torch.tensor([0, 0]), **CLIP, dual_clip=0.5)


def test_another_divergence_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="js"):
        SURROGATES["dppo"](one, one, one, torch.tensor([0]), divergence="js", threshold=0.1)


@EACH
@given(case=tokens())
def test_float32_agrees(name: str, options: dict[str, Any], reference: Reference, case: Tokens) -> None:
    single, single_logp = run(name, case, options, torch.float32)
    whole, logp = run(name, case, options)
    assert single.loss.dtype == single.ratio.dtype == torch.float32
    close(single.loss.double(), whole.loss.tolist(), 1e-4)
    close(gradient_of(single.loss, single_logp).double(), gradient_of(whole.loss, logp).tolist(), 1e-4)
