"""Our decoder against transformers' own module: values, gradients, and what it must leave alone."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from birl import kernels
from birl.data.pack import pack
from birl.data.trees import Tree
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.models import forward
from birl.models.attention import NAME, Packed
from birl.models.decoder import MADE, Layer, decoder_for
from birl.models.forward import hidden_states
from birl.models.heads import add_score_head
from birl.models.load import load_model
from birl.models.matrix import LastingMemory
from birl.models.verify import verify
from birl.types import Sample
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(bool(kernels.problem()), reason=f"no kernels: {kernels.problem()}")
SHAPE: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1, "attn_implementation": NAME},
}
LATE_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
TREES = [Tree.of(9, (5, 8)), Tree.of(4), Tree.of(40, (3, 30, 1))]
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "qwen2, with biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": None})),
}


def made(name: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MAKERS[name]().eval()
        for parameter in model.parameters():  # biases and norms begin as constants
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def run(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with monkeypatch.context() as patch:
        if not ours:
            patch.setattr(forward, "decoder_for", lambda model: None)
        model.zero_grad()
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, 320, (sum(map(len, TREES)),), generator=generator)
        positions = torch.tensor([p for t in TREES for p in t.positions()])
        hidden = hidden_states(model, tokens, positions, Packed(TREES))
        (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
        return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_it_is_transformers_module_in_values_and_gradients(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(name)
    decoder = decoder_for(model)
    assert decoder is not None
    decoder.checkpointing = checkpointing
    (a, ours), (b, theirs) = run(model, monkeypatch, True), run(model, monkeypatch, False)
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    assert ours.keys() == theirs.keys()
    for key, wanted in theirs.items():
        assert (ours[key] - wanted).norm() <= 1e-5 * wanted.norm(), key
    verify(model)


@pytest.mark.parametrize(
    "name, change",
    [
        ("a window", lambda: MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": 8}))),
        ("a window in the last layer", lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **LATE_WINDOW))),
        ("another activation", lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu"))),
        ("heads of 16", lambda: tiny_model(heads=4, kv_heads=2)),
        ("biases in the feed-forward part", lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, mlp_bias=True))),
    ],
)
def test_other_shapes_run_through_transformers(name: str, change: Any) -> None:
    assert decoder_for(change()) is None


def test_what_looks_alike_but_computes_otherwise_is_refused() -> None:
    model = made("llama")
    for layer in model.model.layers:  # pyright: ignore
        plain = layer.forward
        layer.forward = lambda *a, plain=plain, **k: plain(*a, **k) * 1.5
    with pytest.raises(BirlError, match="other log-probs"):
        verify(model)


def samples() -> list[Sample]:
    rows = []
    for i, (prompt, answer) in enumerate([(9, 5), (9, 8), (40, 30), (40, 3)]):
        n = prompt + answer
        tokens = tuple((7 * j * (1 if j < prompt else i + 1) + prompt) % 320 for j in range(n))
        mask = (False,) * prompt + (True,) * answer
        rows.append(
            Sample(
                tokens=tokens, mask=mask, logprobs=(0.0,) * n, versions=(0,) * n, advantage=1.0, group=i // 2, episode=i
            )
        )
    return rows


def loss(logp: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
    return (logp * batch.weights).sum() + 0.1 * (entropy * batch.weights).sum(), {}


def gradients(folder: Path, dtype: torch.dtype, budget: int, **options: Any) -> dict[str, torch.Tensor]:
    learner = Learner(load_model(folder), dtype=dtype, **options)
    for batch in pack(samples(), [0.25] * 4, budget):
        learner.forward_backward(batch, loss, Stats())
    return {n: t.grad.clone() for n, t in learner.masters.tensors.items() if t.grad is not None}


def test_bfloat16_gradients_are_summed_in_the_float32_masters(tiny: Path) -> None:
    exact = gradients(tiny, torch.float32, 4096)
    whole, pieces = gradients(tiny, torch.bfloat16, 4096), gradients(tiny, torch.bfloat16, 75)
    assert whole.keys() == exact.keys()
    for name, wanted in exact.items():
        assert whole[name].dtype == torch.float32
        assert (whole[name] - wanted).norm() <= 0.1 * wanted.norm(), name
        assert (whole[name] - pieces[name]).norm() <= 0.05 * wanted.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_no_bit(tiny: Path, dtype: torch.dtype) -> None:
    kept, again = gradients(tiny, dtype, 4096), gradients(tiny, dtype, 4096, gradient_checkpointing=True)
    assert all(torch.equal(kept[n], again[n]) for n in kept)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_reward_model_of_an_untied_one_computes_in_one_type(lora: Lora | None) -> None:
    """Nothing trains the language model's head; left in float32, it chose the kernels for bfloat16 layers."""
    (batch,) = pack(samples(), [1.0] * 4, 4096)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = made("untied")
        verify(model)
        add_score_head(model, 0)
        learner = Learner(model, dtype=dtype, lora=lora)
        found.append(learner.forward(batch))
        assert {p.dtype for p in model.parameters()} == {dtype}
        decoder = decoder_for(model)
        assert decoder is not None and decoder.kernels.dtype == dtype
    torch.testing.assert_close(found[1], found[0], atol=0.02, rtol=0.02)


def test_log_probs_do_not_depend_on_the_packing_by_a_single_bit(tiny: Path) -> None:
    learner = Learner(load_model(tiny), dtype=torch.bfloat16)
    whole = torch.cat([learner.forward(b) for b in pack(samples(), [1.0] * 4, 4096)])
    alone = torch.cat([learner.forward(b) for s in samples() for b in pack([s], [1.0], 4096)])
    assert torch.equal(whole, alone)


def test_the_frozen_reference_is_the_policy_it_was_copied_from(tiny: Path) -> None:
    """`model.to(bfloat16)` rounds the rotary frequencies too; the KL to the reference then began above 0."""
    policy = Learner(load_model(tiny), dtype=torch.bfloat16)
    reference = Learner(load_model(tiny), dtype=torch.bfloat16, trainable=False)
    for batch in pack(samples(), [1.0] * 4, 4096):
        assert torch.equal(policy.forward(batch), reference.forward(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stale_weights_are_never_used(tiny: Path, dtype: torch.dtype) -> None:
    """The laid-out copies follow every way in which weights change: a step, a load, a new tensor."""
    learner = Learner(load_model(tiny), dtype=dtype)
    (batch,) = pack(samples(), [1.0] * 4, 4096)

    def same_as_fresh() -> torch.Tensor:
        found = learner.forward(batch)
        MADE.pop(learner.model)
        assert torch.equal(found, learner.forward(batch))
        return found

    seen = [same_as_fresh()]
    learner.forward_backward(batch, loss, Stats())
    learner.optim_step(1e-2)
    seen.append(same_as_fresh())
    for tensor in learner.tensors().values():
        if tensor.ndim == 2:
            tensor.mul_(0.9)
    learner.loaded(7)
    seen.append(same_as_fresh())
    for parameter in learner.model.parameters():
        parameter.data = parameter.data * 1.1
    seen.append(same_as_fresh())
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_packed_weights_lie_together_in_large_pages_until_the_last_is_gone() -> None:
    memory = LastingMemory()
    first, second = memory.take(100, torch.bfloat16).fill_(1), memory.take(3, torch.int8).fill_(2)
    assert first.data_ptr() % 2**21 == 0 and second.data_ptr() - first.data_ptr() == 256
    assert first.sum() == 100 and second.sum() == 6
    mapping = weakref.ref(memory.mapping)
    large = memory.take(2**26, torch.int8)
    assert large.data_ptr() % 2**21 == 0
    del memory, first, large
    assert mapping() is not None
    del second
    assert mapping() is None
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    decoder = decoder_for(model)
    assert decoder is not None
    places = [m.layout().data.data_ptr() for layer in decoder.layers for m in (layer.qkv, layer.output, layer.down)]
    assert max(places) - min(places) < 2**21


def test_decoding_looks_at_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred calls of PyTorch's `__getattr__` took a twentieth of a step of few sequences."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    tokens = torch.arange(9)
    hidden = hidden_states(model, tokens, tokens, Packed([Tree.of(9)]))
    monkeypatch.setattr(Layer, "parameters", lambda self: pytest.fail("looked at"))
    with torch.no_grad():
        assert torch.equal(hidden_states(model, tokens, tokens, Packed([Tree.of(9)])), hidden)
