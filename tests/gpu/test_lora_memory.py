"""LoRA on a card that is not there: what is on it, and whether a model of 7 billion parameters fits."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from birl.config import schema
from birl.config.load import load
from birl.models import attention
from birl.plan.run_memory import GIB, predict
from birl.plan.sizes import load_of
from tests.gpu.card import CUDA, card

QWEN_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(("words", "fits"), [(("lora.rank=16",), True), (("lora.rank=16", "lora.dora=true"), False)])
def test_seven_billion_parameters_train_within_24_gib(
    words: tuple[str, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DoRA's gradients need the base weights, 2 bytes a parameter more."""
    keys = (
        "data.train=x.jsonl",
        "engine.kind=vllm",
        "engine.sleep=true",
        "learner.gradient_checkpointing=true",
        "learner.tokens_per_microbatch=8192",
    )
    config: schema.RL = load(schema.RL, [*keys, *words])
    with card(monkeypatch, lambda name, args: None), CUDA:
        model = AutoModelForCausalLM.from_config(QWEN_7B, attn_implementation=attention.NAME, dtype=torch.bfloat16)
        assert sum(p.numel() for p in model.parameters()) > 7.5e9
        phases = predict(model, config, load_of(config, 512, 1536), card=24 * GIB)
    need = sum(phases["training"].values())
    assert (need < 24 * GIB) == fits, need / GIB
