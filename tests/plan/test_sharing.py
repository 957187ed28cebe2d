"""A GPU that the learner and a server have in turns: who gets how much, known before either is there."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.plan.run_memory import GIB
from birl.plan.sharing import CONTEXT, fraction_of

CARD = 80 * GIB


def model(layers: int = 28, hidden: int = 1536) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=6 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def settings(*words: str) -> schema.RL:
    keys = ("data.train=x.jsonl", "engine.kind=vllm", "engine.sleep=true", "learner.tokens_per_microbatch=8192")
    return load(schema.RL, [*keys, *words])


def share(of: torch.nn.Module, *words: str, card: int = CARD) -> float:
    return fraction_of(of, settings(*words), 512, 1024, card)


def test_the_optimizers_state_is_counted_before_it_is_there() -> None:
    small = model()
    size = sum(p.numel() for p in small.parameters())
    fraction = share(small)
    taken = fraction * CARD + 14 * size + CONTEXT  # bfloat16 and float32 weights, AdamW's two moments
    assert 0.95 * CARD < taken <= CARD
    offloaded = share(small, "optimizer.offload=cpu")
    assert min(0.9, fraction + 11.9 * size / CARD) <= offloaded <= 0.9


def test_it_is_never_more_than_what_was_asked_for() -> None:
    assert share(model(), "engine.memory_fraction=0.3") == 0.3


def test_a_learner_that_leaves_no_room_is_refused_with_what_would_help() -> None:
    large = model(layers=32, hidden=4096)
    with pytest.raises(BirlError, match=r"a training step needs .* GPU has 80\.0.*optimizer\.offload=cpu"):
        share(large)
    assert share(large, "optimizer.offload=cpu", card=141 * GIB) > 0.5
    with pytest.raises(BirlError, match=r"the server's weights alone are .*Take LoRA"):
        share(large, "optimizer.offload=cpu", card=30 * GIB)
