"""Each preset's loss against plain Python floats, and its on-policy gradient against REINFORCE's."""

import math
import random
from functools import partial

import pytest
import torch

from birl.algorithms.kl import ESTIMATORS
from birl.algorithms.policy import policy_loss
from birl.algorithms.reduce import DENOMINATORS
from birl.algorithms.surrogates import clip

LENGTHS = [3, 1, 4]
GROUPS = [0, 0, 1]
PRESETS = {  # clip_low, clip_high, denominator
    "grpo": (0.2, 0.2, "sequence"),
    "dr_grpo": (0.2, 0.2, "constant"),
    "dapo": (0.2, 0.28, "token"),
}
LIMIT = 8


def tokens(seed: int) -> tuple[list[float], list[float], list[float], list[float], list[int]]:
    rng = random.Random(seed)
    n = sum(LENGTHS)
    logp = [rng.uniform(-3, -0.1) for _ in range(n)]
    old = [p + rng.uniform(-0.6, 0.6) for p in logp]
    ref = [p + rng.uniform(-0.6, 0.6) for p in logp]
    sample = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    advantage = [rng.uniform(-1, 1) for _ in LENGTHS]
    return logp, old, ref, [advantage[s] for s in sample], sample


def reference(low: float, high: float, denominator: str, kl: str, coef: float, seed: int) -> float:
    logp, old, ref, advantage, sample = tokens(seed)
    total = 0.0
    for p, o, r, a, s in zip(logp, old, ref, advantage, sample, strict=True):
        ratio = math.exp(p - o)
        loss = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        d = r - p
        loss += coef * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1, "abs": abs(d)}[kl]
        count = {"token": sum(LENGTHS), "sequence": len(LENGTHS) * LENGTHS[s], "constant": len(LENGTHS) * LIMIT}
        total += loss / count[denominator]
    return total


def loss_of(preset: str, logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, sample: list[int], **kl):
    low, high, denominator = PRESETS[preset]
    per_sample = DENOMINATORS[denominator](LENGTHS, GROUPS, LIMIT)
    weights = torch.tensor([per_sample[s] for s in sample])
    options = {"ref_logp": None, "kl": "k3", "kl_coef": 0.0} | kl
    return policy_loss(
        logp,
        torch.zeros_like(logp),
        old_logp=old,
        advantages=advantage,
        sample=torch.tensor(sample),
        weights=weights,
        surrogate=partial(clip, clip_low=low, clip_high=high),
        **options,
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kl", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_loss_is_its_definition(preset: str, kl: str, seed: int) -> None:
    logp, old, ref, advantage, sample = tokens(seed)
    found, _ = loss_of(
        preset,
        torch.tensor(logp),
        torch.tensor(old),
        torch.tensor(advantage),
        sample,
        ref_logp=torch.tensor(ref),
        kl=kl,
        kl_coef=0.1,
    )
    assert found.item() == pytest.approx(reference(*PRESETS[preset], kl, 0.1, seed), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_gradient_is_reinforce(preset: str) -> None:
    values, _, _, advantage, sample = tokens(0)
    logp = torch.tensor(values, requires_grad=True)
    loss, figures = loss_of(preset, logp, logp.detach(), torch.tensor(advantage), sample)
    loss.backward()
    per_sample = DENOMINATORS[PRESETS[preset][2]](LENGTHS, GROUPS, LIMIT)
    expected = [-a * per_sample[s] for a, s in zip(advantage, sample, strict=True)]
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert figures["clip_fraction"].sum() == 0


def test_clipped_tokens_have_no_gradient_and_are_the_ones_counted() -> None:
    logp = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, figures = policy_loss(
        logp,
        torch.zeros(4),
        old_logp=torch.zeros(4),
        advantages=advantage,
        sample=torch.arange(4),
        weights=torch.ones(4),
        surrogate=partial(clip, clip_low=0.2, clip_high=0.2),
    )
    loss.backward()
    assert logp.grad is not None
    assert [g != 0 for g in logp.grad.tolist()] == [False, True, True, False]
    assert figures["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]
