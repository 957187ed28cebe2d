"""Tensor parallelism: every number is that of one rank, whatever is split over the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from birl.models import attention
from birl.parallel.ranks import Grid, Ranks
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import Outcome, same, trained

#: AdamW turns rounding errors of a gradient g into lr * error / (|g| + eps): with the usual 1e-8 that is not 1e-5
EPS = 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": 321,  # no multiple of anything
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
MODELS: dict[str, dict[str, Any]] = {
    "many heads": {"model_type": "llama", "num_key_value_heads": 4},
    "llama": {"model_type": "llama"},
    "llama untied, with biases": {
        "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 16, "tie_word_embeddings": False},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 16, **NO_CAPS},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16},
}  # fmt: skip


def made(name: str) -> nn.Module:
    """A small random model of an architecture; biases are random, too."""
    options = {**SIZES, **MODELS[name]}
    config = CONFIG_MAPPING[options.pop("model_type")](**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


def trained_on(ranks: Ranks, name: str, options: dict[str, Any]) -> Outcome:
    return trained(ranks, {"model": made(name), "eps": EPS, **options})


def both_ways(ranks: Ranks, name: str, options: dict[str, Any]) -> list[Outcome]:
    """With sequence-parallel regions, and without."""
    return [
        trained_on(Ranks(replace(ranks.grid, sequence=sequence), ranks.mesh), name, options)
        for sequence in (True, False)
    ]


@pytest.mark.parametrize("grid", [Grid(tp=2), Grid(tp=4), Grid(fsdp=2, tp=2), Grid(ddp=2, tp=2)], ids=str)
def test_split_layers_change_no_number(grid: Grid) -> None:
    options = {"gradient_checkpointing": grid.fsdp > 1}
    alone = trained_on(Ranks(), "many heads", {})
    for found in on_ranks(grid, both_ways, "many heads", options):
        for outcome in found:
            same(outcome, alone, 1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "many heads"])
def test_of_every_family(name: str) -> None:
    alone = trained_on(Ranks(), name, {})
    for found in on_ranks(Grid(tp=2), both_ways, name, {}):
        for outcome in found:
            same(outcome, alone, 1e-5)
