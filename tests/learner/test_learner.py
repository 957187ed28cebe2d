"""Invariants 2, 5 and 8: packing, micro-batches and masked tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import FalconConfig, GPT2Config, OPTConfig

from birl.data.pack import Batch, pack
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.load import model_class
from tests.data.test_pack import branched, drawn, groups, make
from tests.tiny import tiny_model
from tests.zoo import build

WORDS: dict[str, Any] = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def learner(dtype: torch.dtype = torch.float32, **options: object) -> Learner:
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    return Learner(model, dtype=dtype, **options)  # type: ignore[arg-type]


def reinforce(logp: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logp * batch.advantages * batch.weights).sum(), {"entropy": entropy}


def gradients(batches: list[Batch]) -> tuple[dict[str, torch.Tensor], Stats]:
    policy, stats = learner(), Stats()
    for batch in batches:
        policy.forward_backward(batch, reinforce, stats)
    return {n: t.grad.clone() for n, t in policy.masters.tensors.items() if t.grad is not None}, stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_without_trained_tokens_has_no_gradient(dtype: torch.dtype) -> None:
    samples, policy, stats = groups(3), learner(dtype), Stats()
    nothing = [replace(s, mask=np.zeros_like(s.mask)) for s in samples]
    batches = [*pack(nothing, [1.0] * len(nothing), 10_000), *pack(samples, [1.0] * len(samples), 10_000)]
    assert not len(batches[0].source) and len(batches) == 2
    policy.learn([(batch, reinforce) for batch in batches], stats)
    alone = learner(dtype)
    alone.learn([(batches[1], reinforce)], Stats())
    for ours, theirs in zip(policy.masters.tensors.values(), alone.masters.tensors.values(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("capacity", [17, 40, 100])
def test_packing_changes_neither_loss_nor_gradient(capacity: int) -> None:
    samples = groups(3)
    weights = [1 / (i + 2) for i in range(len(samples))]
    whole, stats = gradients(pack(samples, weights, 10_000))
    split, split_stats = gradients(pack(samples, weights, capacity))
    alone, alone_stats = gradients([b for s, w in zip(samples, weights, strict=True) for b in pack([s], [w], 100)])
    assert stats.loss == pytest.approx(split_stats.loss, abs=1e-5) == alone_stats.loss
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(whole[name], alone[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["", "drawn from a part", "qwen3", "qwen3_moe", "lfm2", "qwen3_5_text"])
def test_trees_of_any_depth_change_neither_loss_nor_gradient(kind: str) -> None:
    """Dense on the kernels and without them, with experts, with states: against each sequence alone. Samples may have
    drawn the same token from different words."""
    plain = kind in ("", "drawn from a part")
    policy = learner() if plain else Learner(build(kind, initializer_range=0.05), dtype=torch.float32)
    samples = branched(5, count=16, longest=20)
    samples = drawn(samples) if kind == "drawn from a part" else samples
    weights = [1 / (i + 2) for i in range(len(samples))]
    alone = [b for s, w in zip(samples, weights, strict=True) for b in pack([s], [w], 100)]
    ways = {"alone": alone, "whole": pack(samples, weights, 10_000), "cut": pack(samples[::-1], weights[::-1], 70, 2)}
    assert max(len(tree.sizes) for tree in ways["whole"][0].trees) > 8
    assert sum(len(b.tokens) for b in alone) > 1.4 * len(ways["whole"][0].tokens)
    results = {}
    for name, batches in ways.items():
        stats = Stats()
        policy.learn([(batch, reinforce) for batch in batches], stats)
        tensors = policy.masters.tensors.items()
        results[name] = stats.loss, stats.count, {n: t.grad.clone() for n, t in tensors if t.grad is not None}
        policy.optimizer.zero_grad()
    for loss, count, found in (results["whole"], results["cut"]):
        assert (loss, count) == (pytest.approx(results["alone"][0], abs=1e-5), results["alone"][1])
        for name, wanted in results["alone"][2].items():
            scale = wanted.abs().max().item()
            torch.testing.assert_close(found[name], wanted, atol=1e-5 * max(scale, 1.0), rtol=1e-5, msg=name)


def test_a_masked_token_has_no_gradient_of_its_own() -> None:
    """Changing what is trained on a masked place (its log-prob, its advantage) changes nothing, since it is not in the
    batch."""
    base = make((1, 5, 9), (7, 8, 2), 0, 0)
    changed = type(base)(
        tokens=base.tokens,
        mask=base.mask,
        logprobs=(9.0, 9.0, 9.0, *base.logprobs[3:]),
        versions=(7, 7, 7, *base.versions[3:]),
        advantage=base.advantage,
        group=0,
        episode=0,
    )
    one, _ = gradients(pack([base], [1.0], 64))
    other, _ = gradients(pack([changed], [1.0], 64))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_log_probs_use_the_sampling_temperature() -> None:
    (batch,) = pack(groups(5), [1.0] * 12, 10_000)
    assert not torch.allclose(learner(temperature=0.6).forward(batch), learner(temperature=1.0).forward(batch))


def test_the_norm_is_global_and_clipping_uses_it() -> None:
    policy, stats = learner(max_grad_norm=0.5), Stats()
    for batch in pack(groups(6), [1.0] * 12, 40):
        policy.forward_backward(batch, reinforce, stats)
    expected = (
        torch.cat([t.grad.flatten() for t in policy.masters.tensors.values() if t.grad is not None]).norm().item()
    )
    assert expected > 0.5
    assert policy.optim_step(1e-3) == pytest.approx(expected, rel=1e-5)
    assert policy.version == 1


def test_gradient_checkpointing_changes_no_number() -> None:
    batches = pack(groups(7), [1.0] * 12, 40)
    plain, _ = gradients(batches)
    policy, stats = learner(gradient_checkpointing=True), Stats()
    for batch in batches:
        policy.forward_backward(batch, reinforce, stats)
    for name, tensor in policy.masters.tensors.items():
        torch.testing.assert_close(plain[name], tensor.grad)


DROPPING = {
    "around the layers and in their modules": GPT2Config(n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, **WORDS),
    "in the layers themselves": OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, **WORDS
    ),
    "in the layers, by their config": FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.5, attention_dropout=0.5, **WORDS
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_gradient_checkpointing_switches_no_dropout_on(name: str) -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = model_class(DROPPING[name]).from_config(DROPPING[name], attn_implementation=attention.NAME)
        policy = Learner(model, dtype=torch.float32, gradient_checkpointing=checkpointing)
        (batch,) = pack(groups(7), [1.0] * 12, 400)
        policy.forward_backward(batch, reinforce, Stats())
        found.append({n: t.grad for n, t in policy.masters.tensors.items()})
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, msg=lambda m, n=key: f"{n}: {m}")


def test_a_model_that_cannot_compute_its_layers_again_is_told() -> None:
    with pytest.raises(BirlError, match=r"learner\.gradient_checkpointing: CTRLLMHeadModel does not support"):
        Learner(build("ctrl"), dtype=torch.float32, gradient_checkpointing=True)


def test_micro_batch_gradients_are_summed_in_float32() -> None:
    """In bfloat16, 256 equal small gradients added one after another would get stuck; in float32 they do not."""
    (batch,) = pack([make((1, 5, 9), (7, 8, 2), 0, 0)], [1.0], 64)
    policy, stats = learner(torch.bfloat16), Stats()
    policy.forward_backward(batch, reinforce, stats)
    name = "model.layers.0.mlp.down_proj.weight"
    once = policy.masters.tensors[name].grad.clone()  # type: ignore[union-attr]
    for _ in range(299):
        policy.forward_backward(batch, reinforce, stats)
    torch.testing.assert_close(policy.masters.tensors[name].grad, once * 300, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    policy = learner()
    before = {n: t.clone() for n, t in policy.weights().items()}
    for tensor in policy.masters.tensors.values():
        tensor.grad = torch.full_like(tensor, float("nan"))
    assert not torch.tensor(policy.optim_step(1e-3)).isfinite()
    assert all(torch.equal(before[n], t) for n, t in policy.weights().items())
