"""Tiny random decoders of many families, with heads of 16: no kernels of birl's for the CPU are made for them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from birl.models import attention

COMMON: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = ["full_attention", "sliding_attention", "full_attention"]
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": KINDS},
    "phi3": {"partial_rotary_factor": 0.5},
    "phi": {"num_key_value_heads": 4},
    "glm": {},
    "glm4": {"attention_bias": True},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"sliding_window": None},
    "ernie4_5": {},
    "seed_oss": {},
    "exaone4": {"sliding_window": 8, "layer_types": KINDS},
}
MIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": EXPERTS,
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
FAMILIES = DENSE | MIXED


def family(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> PreTrainedModel:
    """A model of this type; norms and biases are no constants."""
    config = AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind], **options})
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data += (0.1 * torch.randn(parameter.shape)).to(dtype)
    return model
