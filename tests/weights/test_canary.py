"""The canary: an engine that computes with something else than the learner's weights of now stops the run."""

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.errors import Malformed, WeightsFailed
from birl.learner.learner import Learner
from birl.models.load import load_model
from birl.types import Completion, Held, SamplingParams, Stop, Update
from birl.weights.canary import Canary
from tests.weights.test_weights import sender, train


async def test_the_canary_finds_an_engine_that_computes_with_something_else(
    tiny: Path, tmp_path: Path, compute
) -> None:
    """vLLM #52689, TRL #5312: the right bytes are there, and a copy in another layout is what is used."""
    found, local = sender(tiny, tmp_path, compute, "reload")
    await found.publish()
    train(found.learner)
    original = local.engine.load

    async def stale_copy(update: Update) -> Held:
        held = await original(update)
        local.engine.runner.model.model.norm.weight.data += 0.5  # type: ignore[union-attr, operator]
        return held

    local.engine.load = stale_copy  # type: ignore[method-assign]
    with pytest.raises(WeightsFailed, match="computes other log-probs") as caught:
        await found.publish()
    assert caught.value.cause == "numbers"
    await local.engine.close()


SPOKEN = {
    "constant": lambda c: replace(c, logprobs=(-1.0,) * len(c.ids)),
    "shifted": lambda c: replace(c, logprobs=tuple(p - 2 for p in c.logprobs.tolist())),
    "slightly": lambda c: replace(c, logprobs=tuple(p - 0.05 for p in c.logprobs.tolist())),
    "infinite": lambda c: replace(c, logprobs=(*c.logprobs.tolist()[:-1], math.inf)),
    "positive": lambda c: replace(c, logprobs=tuple(-p for p in c.logprobs.tolist())),
    "nan": lambda c: replace(c, logprobs=(math.nan, *c.logprobs.tolist()[1:])),
    "replaced": lambda c: replace(c, tokens=tuple((t + 7) % 60 + 5 for t in c.ids)),
}


async def test_a_canary_that_is_not_answered_rightly_stops_at_once(tiny: Path, tmp_path: Path, compute) -> None:
    """Another answer would be no better: `timeout` is not waited for."""
    found, local = sender(tiny, tmp_path, compute, "reload")

    async def generate(*_: object) -> Completion:
        raise Malformed("http://one returned no completion: 'tokens'")

    local.generate = generate  # type: ignore[method-assign]
    found.timeout = 1e6
    with pytest.raises(WeightsFailed, match="gives the canary no answer: http://one returned no completion") as caught:
        await found.publish()
    assert caught.value.cause == "mismatch"
    await local.engine.close()


@pytest.mark.parametrize("lie", SPOKEN)
async def test_the_canary_samples_too(tiny: Path, tmp_path: Path, compute, lie: str) -> None:
    """An engine that scores given tokens rightly, and reports something else of those that it draws."""
    found, local = sender(tiny, tmp_path, compute, "reload", max_gap=0.1)
    await found.publish()
    train(found.learner)
    honest = local.generate

    async def generate(ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        answer = await honest(ids, params)
        return answer if params.forced else SPOKEN[lie](answer)

    local.generate = generate  # type: ignore[method-assign]
    with pytest.raises(WeightsFailed, match=r"it samples than for the same|log-prob of token") as caught:
        await found.publish()
    assert caught.value.cause == "numbers"
    await local.engine.close()


@pytest.mark.parametrize(("noise", "ago"), [(0.0, 1), (0.0, 3), (0.004, 1)])
def test_an_engine_one_small_step_behind_is_stale(tiny: Path, compute, noise: float, ago: int) -> None:
    """It is nearer to the learner than weights.max_gap, and rounds otherwise than the learner; but lies where the
    learner was. One that is up to date and rounds as much goes on."""
    learner = Learner(load_model(tiny), dtype=torch.float32)
    prompts = [tuple(range(5, 45)), tuple(range(9, 60)), tuple(range(50, 10, -1))]
    canary, draw = Canary(learner, prompts, 0.1), random.Random(0)
    history: list[list[list[float]]] = []

    class Noisy:
        behind = 0

        async def generate(self, ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
            tokens = params.forced or (7,) * params.max_tokens
            own = next((i for i, p in enumerate(canary.prompts) if p[: len(ids)] == ids and len(ids) < len(p)), None)
            exact = (-2.0,) * len(tokens) if own is None else history[-1 - self.behind][own]
            said = tuple(p + draw.gauss(0, noise) for p in exact)
            return Completion(tokens=tokens, logprobs=said, versions=(0,) * len(tokens), stop=Stop.LENGTH)

    engine: Any = Noisy()
    for step in range(5):
        canary.compute()
        history.append(canary.expected)
        assert asyncio.run(canary.check(engine, "one")) < max(3 * noise, 1e-6)
        for master in learner.masters.tensors.values():
            master.grad = torch.randn(master.shape, generator=torch.Generator().manual_seed(step))
        learner.optim_step(1e-3 if noise else 3e-5)
    canary.compute()
    history.append(canary.expected)
    engine.behind = ago
    with pytest.raises(WeightsFailed, match=f"{ago} updates before") as caught:
        asyncio.run(canary.check(engine, "one"))
    assert caught.value.cause == "stale"


@pytest.mark.parametrize(("lr", "noise"), [(1e-5, 0.0), (1e-4, 0.0001), (1e-3, 0.004)])
def test_an_engine_that_keeps_the_weights_of_before_a_resume_is_stale(tiny: Path, lr: float, noise: float) -> None:
    """A server that is started anew has those of model.path, and may not have taken the checkpoint's."""
    learner = Learner(load_model(tiny), dtype=torch.float32)
    canary, draw = Canary(learner, [tuple(range(5, 45)), tuple(range(9, 60))], 0.1), random.Random(0)
    canary.begin()
    for step in range(20):
        for master in learner.masters.tensors.values():
            master.grad = torch.randn(master.shape, generator=torch.Generator().manual_seed(step))
        learner.optim_step(lr / 5)
    canary.compute()

    def heard(said: list[list[float]]) -> list[float]:
        return [value + draw.gauss(0, noise) for values in said for value in values]

    assert canary.stale(heard(canary.began)) == "that the run began with"
    assert canary.stale(heard(canary.expected)) == ""


def test_without_prompts_nothing_is_asked(tiny: Path) -> None:
    """weights.canary=0 stopped every run: "samples no tokens"."""
    canary = Canary(Learner(load_model(tiny)), [], 0.1)
    canary.begin()
    canary.compute()
    assert math.isnan(asyncio.run(canary.check(None, "one")))  # type: ignore[arg-type]


def test_what_an_engine_may_show_is_bounded_by_the_first_proof(tiny: Path, compute) -> None:
    """vLLM and SGLang show no digests: 0.05 nats off are within weights.max_gap, and not within rounding."""
    canary = Canary(Learner(load_model(tiny), dtype=torch.float32), [tuple(range(5, 205))], 0.1)
    assert canary.allowed(100) == 0.1
    canary.compute()
    canary.usual = 0.0001
    canary.compute()
    assert canary.allowed(100) == 0.005 and canary.allowed(4) == 0.02
    canary.usual = 0.01
    assert canary.allowed(100) == 0.05
    canary.usual = 0.09
    assert canary.allowed(100) == 0.1


def test_rounding_to_16_bits_grows_as_a_model_sharpens(tiny: Path, compute) -> None:
    """Without birl's kernels an untrained model showed 0.0005, 0.0053 three steps on, and a good run was stopped."""
    canary = Canary(Learner(load_model(tiny)), [tuple(range(5, 205))], 0.1)
    canary.compute()
    canary.usual = 0.0005
    canary.compute()
    assert canary.allowed(100) == 0.03
