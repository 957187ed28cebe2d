import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birl.algorithms.selection import clip_cov, covariance, kl_cov, top_entropy
from tests.algorithms.cases import Tokens, close, double, tokens

values = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.5001, 1.3, 2.0, 7.0]), max_size=12)
shares = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.8, 1.0])


@given(entropy=values, share=shares)
def test_top_entropy_is_its_definition(entropy: list[float], share: float) -> None:
    found = top_entropy(double(entropy), share).tolist()
    count = math.ceil(round(share * len(entropy), 6))
    if count == 0:
        assert not any(found)
        return
    tau = sorted(entropy, reverse=True)[count - 1]
    assert found == [h >= tau for h in entropy]
    assert count <= sum(found) <= count + entropy.count(tau) - 1


def test_first_tokens_of_a_prompt_are_taken_together_whatever_micro_batch_they_are_in() -> None:
    """One state, computed three times."""
    entropy = torch.tensor([1.3, 1.3000002, 0.2, 1.2999997, 0.5], dtype=torch.float32)
    assert top_entropy(entropy, 0.2).tolist() == [True, True, False, True, False]


def test_a_share_that_is_not_exact_does_not_add_a_token() -> None:
    assert top_entropy(torch.arange(100.0), 0.07).sum() == 7  # 0.07 * 100 is 7.000000000000001
    assert kl_cov(torch.arange(100.0), share=0.29).sum() == 29  # 0.29 * 100 is 28.999999999999996


@given(case=tokens())
def test_covariance_is_its_definition(case: Tokens) -> None:
    n = len(case.logp)
    mean = [sum(x) / n if n else 0.0 for x in (case.logp, case.advantages)]
    expected = [(p - mean[0]) * (a - mean[1]) for p, a in zip(case.logp, case.advantages, strict=True)]
    found = covariance(double(case.logp).requires_grad_(), double(case.advantages))
    close(found, expected)
    assert not found.requires_grad


@given(cov=values, share=shares, seed=st.integers(0, 5))
def test_clip_cov_draws_from_the_band(cov: list[float], share: float, seed: int) -> None:
    draw = [
        clip_cov(double(cov), share=share, low=0.1, high=1.3, generator=torch.Generator().manual_seed(seed)).tolist()
        for _ in range(2)
    ]
    assert draw[0] == draw[1]
    band = [0.1 <= c <= 1.3 for c in cov]
    assert all(b for b, held in zip(band, draw[0], strict=True) if held)
    assert sum(draw[0]) == min(math.floor(round(share * len(cov), 6)), sum(band))


def test_clip_cov_draws_evenly() -> None:
    generator, cov = torch.Generator().manual_seed(0), torch.tensor([0.5, 0.5, 9.0, 0.5, 0.5])
    hits = sum(clip_cov(cov, share=0.2, low=0.0, high=1.0, generator=generator).double() for _ in range(400))
    assert isinstance(hits, torch.Tensor) and hits.sum() == 400 and hits[2] == 0
    assert all(60 < h < 140 for h in hits[[0, 1, 3, 4]].tolist())


@given(cov=values, share=shares)
def test_kl_cov_takes_the_largest(cov: list[float], share: float) -> None:
    count = math.floor(round(share * len(cov), 6))
    chosen = set(sorted(range(len(cov)), key=lambda t: (-cov[t], t))[:count])
    assert kl_cov(double(cov), share=share).tolist() == [t in chosen for t in range(len(cov))]


def test_a_share_outside_is_refused() -> None:
    x = torch.zeros(3)
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="share"):
            top_entropy(x, share)
        with pytest.raises(ValueError, match="share"):
            kl_cov(x, share=share)
