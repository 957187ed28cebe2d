"""ECHO: what an environment wrote is predicted in the pass that trains what the model wrote."""

import numpy as np
import pytest
import torch

from birl.data.pack import Batch, pack
from birl.data.sequences import observations
from birl.learner.learner import Learner, Stats
from birl.text.pictures import FIRST
from birl.types import Sample
from tests.data.test_pack import branched, make
from tests.tiny import tiny_model


def both(logp: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of what the model wrote, and one of what it read."""
    trained = -(logp * batch.advantages * batch.weights).sum()
    if batch.observed_logprobs is None:
        return trained, {"entropy": entropy}
    return trained - (batch.observed_logprobs * batch.observed_weights).sum(), {"entropy": entropy}


def test_an_observation_comes_after_the_models_first_token_and_is_no_picture() -> None:
    sample = make((5, 6), (7, 8, 9), 0, 0)
    assert not len(observations(sample))
    turns = Sample(
        tokens=[5, 6, 7, 8, FIRST + 3, 9, 10, 11],
        mask=[False, False, True, False, False, False, True, True],
        logprobs=[0.0] * 8,
        versions=[-1, -1, 0, -1, -1, -1, 0, 0],
        advantage=1.0,
        group=0,
        episode=0,
    )
    assert observations(turns).tolist() == [3, 5]


@pytest.mark.parametrize("capacity", [10_000, 60])
def test_the_gradient_is_that_of_transformers_on_separate_sequences(capacity: int) -> None:
    samples = branched(7, count=16, longest=20)
    weights, read = ([1 / (i + n) for i in range(len(samples))] for n in (2, 5))
    assert sum(len(observations(s)) for s in samples) > 30

    reference = tiny_model()
    wanted = torch.zeros((), dtype=torch.float32)
    for sample, weight, other in zip(samples, weights, read, strict=True):
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        logp = reference(ids[None]).logits[0, :-1].log_softmax(-1)
        logp = torch.cat([logp.new_zeros(1), logp[torch.arange(len(ids) - 1), ids[1:]]])
        wanted = wanted - weight * float(sample.advantage) * logp[torch.from_numpy(sample.mask)].sum()
        wanted = wanted - other * logp[torch.from_numpy(observations(sample))].sum()
    wanted.backward()

    policy, stats = Learner(tiny_model(), dtype=torch.float32), Stats()
    batches = pack(samples, weights, capacity, observed=read)
    policy.learn([(batch, both) for batch in batches], stats)
    assert stats.loss == pytest.approx(wanted.item(), rel=1e-5)
    assert stats.count == sum(int(s.mask.sum()) for s in samples)  # observations are no trained tokens
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(policy.masters.tensors[name].grad, parameter.grad, atol=2e-5, rtol=1e-4, msg=name)


def test_what_is_not_asked_for_is_not_predicted() -> None:
    samples = branched(7)
    plain, asked = (pack(samples, [1.0] * len(samples), 10_000, observed=o)[0] for o in ((), [1.0] * len(samples)))
    assert plain.observed is None and len(plain.targets) < len(asked.targets)
    assert torch.equal(plain.tokens, asked.tokens) and torch.equal(
        plain.targets[plain.entry], asked.targets[asked.entry]
    )
