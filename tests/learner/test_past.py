"""Weights of earlier versions: put into the module and taken out again, to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from birl.data.pack import pack
from birl.learner.comparison import Past, compare, few
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.models.load import load_model
from birl.types import Sample
from tests.learner.test_learner import reinforce


def sample(versions: list[int], prompt: int = 4, group: int = 0) -> Sample:
    n = prompt + len(versions)
    return Sample(
        tokens=tuple(range(5, 5 + n)),
        mask=(*(False,) * prompt, *(True,) * len(versions)),
        logprobs=(0.0,) * n,
        versions=(*(-1,) * prompt, *versions),
        advantage=1.0,
        group=group,
        episode=0,
    )


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_version_gave_it_gives_again(tiny: Path, dtype: torch.dtype, lora: Lora | None) -> None:
    learner = Learner(load_model(tiny), dtype=dtype, lora=lora)
    past, batch, given = Past(learner, 2), pack([sample([0] * 6)], [1.0], 64), []
    for _ in range(4):
        past.keep()
        given.append(learner.forward(batch[0]))
        learner.learn([(batch[0], reinforce)], Stats())
        learner.optim_step(1e-2)
    now = learner.forward(batch[0])
    assert sorted(past.versions) == [2, 3] and not torch.equal(given[2], given[3])
    with past.instead() as put:
        for version in (3, 2, 3):
            put(version)
            assert torch.equal(learner.forward(batch[0]), given[version])
    assert torch.equal(learner.forward(batch[0]), now)


def test_each_version_is_compared_under_its_own_weights(tiny: Path) -> None:
    """The current one too, where tokens of earlier ones are compared beside it."""
    learner = Learner(load_model(tiny), dtype=torch.float32)
    past, batch, given = Past(learner, 2), pack([sample([0] * 6)], [1.0], 64)[0], []
    for version in range(3):
        given.append(learner.forward(batch).tolist())
        if version < 2:
            past.keep()
            learner.learn([(batch, reinforce)], Stats())
            learner.optim_step(1e-2)
    versions = [0, 0, 1, 1, 2, 2]
    logprobs = (*(0.0,) * 4, *(given[version][n] for n, version in enumerate(versions)))
    gaps = compare(past, [replace(sample(versions), logprobs=logprobs)], 10_000, {}, 64).gaps
    assert gaps.keys() == {0, 1, 2} and all(gap < 1e-5 and n == 2 for gap, n in gaps.values())


def test_versions_that_are_not_held_are_counted(tiny: Path) -> None:
    learner = Learner(load_model(tiny), dtype=torch.float32)
    past = Past(learner, 2)
    past.keep()
    learner.version = 5
    found = compare(past, [sample([0, 0, 3, 5, 5, 5]), sample([3, 3])], 10_000, {}, 64)
    assert {v: n for v, (_, n) in found.gaps.items()} == {0: 2, 5: 3} and found.figures == {"mismatch/unheld": 3 / 8}
    assert compare(past, [sample([5, 5])], 100, {5: (0.25, 2)}, 64).gaps == {5: (0.25, 2)}


def test_few_tokens_of_a_version_are_taken() -> None:
    several = [sample([0] * 30, prompt=p) for p in (9, 4, 7)] + [sample([0, 1, 1], prompt=2)]
    assert [len(s.tokens) for s in few(several, 0, 75)] == [39, 34] and sum(few(several, 0, 75)[0].mask) == 30
    assert [len(s.tokens) for s in few(several, 0, 75, start=1)] == [34, 37, 3]
    (least,) = few(several[:3], 0, 10)
    assert len(least.tokens) == 12 and sum(least.mask) == 8
    assert few(several, 1, 10)[0].mask.tolist() == [False, False, False, True, True]
