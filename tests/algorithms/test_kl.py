import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.kl import ESTIMATORS, AdaptiveKL, corrected, k2, k3
from tests.algorithms.cases import EXACT, Tokens, close, differences, double, gradient_of, tokens


def reference(name: str, p: float, f: float) -> float:
    return {"k1": p - f, "k2": (p - f) ** 2 / 2, "k3": math.exp(f - p) - (f - p) - 1, "abs": abs(p - f)}[name]


@pytest.mark.parametrize("name", ESTIMATORS)
@given(case=tokens())
def test_estimators_are_their_definition(name: str, case: Tokens) -> None:
    logp = double(case.logp).requires_grad_()
    found = ESTIMATORS[name](logp, double(case.old))
    close(found, [reference(name, p, f) for p, f in zip(case.logp, case.old, strict=True)])
    expected = differences(lambda at: sum(reference(name, p, f) for p, f in zip(at, case.old, strict=True)), case.logp)
    close(gradient_of(found, logp), expected, EXACT)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(case=tokens())
def test_corrected_has_the_gradient_of_weight_and_estimate(name: str, case: Tokens) -> None:
    ref = case.uniform(-3, -0.1)
    logp = double(case.logp).requires_grad_()
    found = corrected(ESTIMATORS[name](logp, double(ref)), logp, double(case.old))

    def terms(at: list[float]) -> list[float]:
        return [math.exp(p - o) * reference(name, p, f) for p, o, f in zip(at, case.old, ref, strict=True)]

    close(found, terms(case.logp))
    close(gradient_of(found, logp), differences(lambda at: sum(terms(at)), case.logp), EXACT)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("sampled", [-0.1, -120.0])
def test_a_token_that_the_policy_has_given_up_has_a_finite_loss(name: str, sampled: float) -> None:
    logp = torch.tensor([-120.0, -0.1], dtype=torch.float32, requires_grad=True)
    found = ESTIMATORS[name](logp, torch.tensor([-0.1, -120.0]))
    for loss in (found, corrected(found, logp, torch.full((2,), sampled))):
        assert loss.isfinite().all() and gradient_of(loss, logp).isfinite().all()


def distributions(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("seed", range(4))
def test_corrected_k3_is_unbiased_in_value_and_gradient(seed: int) -> None:
    """The expectation over a whole vocabulary, sampled from the old policy, is the KL, and its gradient the KL's."""
    policy, old, reference_logits = distributions(seed)
    policy.requires_grad_()
    logp, ref = policy.log_softmax(0), reference_logits.log_softmax(0)
    divergence = (logp.exp() * (logp - ref)).sum()
    exact = torch.autograd.grad(divergence, policy, retain_graph=True)[0]

    def expected(sampler: torch.Tensor, estimate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = (sampler.exp().detach() * estimate).sum()
        return total.detach(), torch.autograd.grad(total, policy, retain_graph=True)[0]

    for behaviour in (old.log_softmax(0), logp.detach()):  # off-policy, and on-policy
        value, gradient = expected(behaviour, corrected(k3(logp, ref), logp, behaviour))
        torch.testing.assert_close(value, divergence.detach())
        torch.testing.assert_close(gradient, exact)
        # With the weight held fixed the gradient is another divergence's: KL(reference || policy).
        fixed = (logp - behaviour).exp().detach() * k3(logp, ref)
        _, gradient = expected(behaviour, fixed)
        other = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), policy, retain_graph=True)[0]
        torch.testing.assert_close(gradient, other)
        assert not torch.allclose(gradient, exact, atol=1e-3)
    _, gradient = expected(logp.detach(), k2(logp, ref))
    torch.testing.assert_close(gradient, exact)  # k2, on-policy: what its docstring says


@given(
    drawn=st.lists(st.tuples(st.floats(0, 50), st.integers(0, 512)), max_size=8),
    target=st.floats(0.1, 10),
    coef=st.floats(0.001, 1),
)
def test_adaptive_coefficient_is_the_papers(drawn: list[tuple[float, int]], target: float, coef: float) -> None:
    controller, expected = AdaptiveKL(coef, target, 1000), coef
    for kl, episodes in drawn:
        controller.update(kl, episodes)
        expected *= 1 + max(-0.2, min(0.2, (kl - target) / target)) * episodes / 1000
    assert controller.coef == pytest.approx(expected, rel=1e-9) and controller.coef > 0
    fixed = AdaptiveKL(coef, 0.0, 1)
    fixed.update(99.0, 512)
    assert fixed.coef == coef


def test_a_horizon_that_could_turn_the_sign_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        AdaptiveKL(0.1, 1.0, 20).update(0.0, 100)


def test_corrected_stays_finite() -> None:
    logp = torch.zeros(1, requires_grad=True)
    found = corrected(k3(logp, torch.zeros(1)), logp, torch.tensor([-500.0]))
    assert gradient_of(found, logp).isfinite().all()
