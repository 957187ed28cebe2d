"""Weights in int8: what they hold, and an engine that samples from them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Literal

import pytest
import torch

from birl import kernels
from birl.config import schema
from birl.data.trees import Tree
from birl.engine.open import open_engine, round_weights
from birl.errors import BirlError, WeightsFailed
from birl.learner.policy import Policy, load_policy
from birl.models.attention import Packed
from birl.models.decoder import decoder_for
from birl.models.forward import forget, hidden_states, logits
from birl.models.load import cast
from birl.models.quantized import rounded
from birl.models.slices import quantizable
from birl.types import Completion, SamplingParams, Update
from tests.tiny import tiny_moe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_number_moves_far_and_rounding_twice_is_rounding_once(dtype: torch.dtype) -> None:
    w = torch.randn(40, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    w[0, :32], w[1, 3], w[2] = 0, 1000, 1e-30
    held = rounded(w)
    assert held.dtype == dtype and torch.equal(rounded(held), held) and not torch.equal(held, w)
    for begin in range(0, 70, 32):
        block, own = w[:, begin : begin + 32].double(), held[:, begin : begin + 32].double()
        assert ((block - own).abs() <= block.abs().amax(1, keepdim=True) / 127).all()
    with pytest.raises(BirlError, match="NaN or infinity"):
        rounded(torch.full((2, 2), float("nan")))


def test_routers_head_and_embedding_stay() -> None:
    model = tiny_moe().bfloat16()
    before = deepcopy(model.state_dict())
    round_weights(model)
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed and changed <= {f"{name}.weight" for name in quantizable(model)}
    assert not any("embed" in n or "norm" in n or "lm_head" in n or n.endswith("mlp.gate.weight") for n in changed)


def answers(policy: Policy, weights: Literal["same", "int8"], count: int = 3) -> list[Completion]:
    """Of an engine with weights of its own; it refuses new ones where it has them in int8."""

    async def ask() -> list[Completion]:
        engine = open_engine(policy, schema.Engine(weights=weights, kv_cache_gb=0.01), 200, None)
        params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i) for i in range(count)]
        result = await asyncio.gather(*(engine.generate((5, 6, 7, 9 + i), p) for i, p in enumerate(params)))
        if weights == "int8":
            with pytest.raises(WeightsFailed, match="takes no new weights"):
                await engine.load(Update(version=1, digests={}, tensors=dict(policy.model.named_parameters())))
        await engine.close()
        return result

    return asyncio.run(ask())


def opened(folder: Path, compute: ThreadPoolExecutor) -> Policy:
    policy = load_policy(schema.Model(path=str(folder)), compute)
    cast(policy.model, torch.bfloat16).requires_grad_(False)
    return policy


def read_by(policy: Policy) -> torch.dtype:
    decoder = decoder_for(policy.model)
    assert decoder is not None
    return decoder.layers[0].down.layout().data.dtype


def test_the_engine_has_the_bits_of_the_rounded_weights(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """Alone and beside others; a module in bfloat16 with these weights, as the learner has it, gives the same tokens
    and log-probs."""
    if kernels.problem():
        pytest.skip("no kernels here")
    policy = opened(tiny, compute)
    before = answers(policy, "same")
    result = answers(policy, "int8")
    assert read_by(policy) == torch.int8 and result != before
    assert answers(policy, "int8", count=1) == result[:1]
    policy.model.in_int8 = False  # pyright: ignore
    forget(policy.model)
    assert answers(policy, "same") == result and read_by(policy) == torch.bfloat16


def test_without_kernels_it_is_the_same_policy(
    tiny: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = torch.tensor([5, 6, 7, 9, 100, 200])
    layout = Packed([Tree.of(6)])
    policy = opened(tiny, compute)
    round_weights(policy.model)
    by_kernels = logits(policy.model, hidden_states(policy.model, prompt, torch.arange(6), layout))
    monkeypatch.setattr(kernels, "load", lambda *_: None)
    forget(policy.model)
    result = logits(policy.model, hidden_states(policy.model, prompt, torch.arange(6), layout))
    assert (by_kernels - result).abs().mean() < 0.05 and len(answers(policy, "int8")) == 3
