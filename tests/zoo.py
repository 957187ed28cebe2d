"""A tiny random model of every causal language model that transformers has and that can be built without downloads."""

from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from birl.models import attention
from birl.models.load import known

WORDS = 320
#: by the name of an option, in whatever config has a number there
SIZES: dict[str, int | float] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "query_pre_attn_scalar", "global_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "time_step_rank", "mamba_n_heads"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "hidden_size_per_layer_input"), 16),
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"linear_num_value_heads": 4, "mamba_n_groups": 1, "mamba_num_heads": 8, "expert_ffn_hidden_size": 32},
}
#: whatever the config has there
GIVEN: dict[str, Any] = {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MLA = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
MLA += ("dots3_note", "dots3_note_text")
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
OPTIONS: dict[str, dict[str, Any]] = {kind: {"num_key_value_heads": 4, "head_dim": 8} for kind in MLA} | {
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid"), HYBRID),
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": HYBRID | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "kimi_linear": {
        **HYBRID,
        **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        **{"linear_head_dim": 16, "linear_num_heads": 4},
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8},
    "gemma3n_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6},
        **{"num_kv_shared_layers": 2, "intermediate_size": [96] * 6, "laurel_rank": 8},
        **{"activation_sparsity_pattern": [0.9, *[0.0] * 5], "vocab_size_per_layer_input": WORDS},
    },
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
        **{"global_head_dim": 32, "num_kv_shared_layers": 2},
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 16},
    "hrm_text": {"initializer_range": 0.05},  # it runs its layers so often that more rounding than that would tell
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": {
        **{"no_rope_layers": [1, 0, 1], "floor_scale": 8},
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax": {"block_size": 8},
    "ministral": {"head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention", "recurrent"]},
    "nemotron": {"num_key_value_heads": 2},
    **{kind: {"rotary_dim": 8} for kind in ("gptj", "codegen")},
    "xlstm": {"num_blocks": 3, "hidden_size": 128, "embedding_dim": 128},  # its cache wants multiples of 64
}
#: too large whatever their config says, or not to be had by a config alone
LEFT_OUT = {
    **dict.fromkeys(("moss_transcribe_diarize", "phi4_multimodal", "xlm", "blt", "gemma3", "got_ocr2"), "large"),
    "gemma3n": "needs timm",
    **dict.fromkeys(("musicgen", "musicgen_melody", "gemma4_assistant", "gemma4_unified_assistant"), "parts of others"),
}
KINDS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in LEFT_OUT]


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in GIVEN:
            result[name] = GIVEN[name]
        elif name.startswith("vocab_size") and isinstance(value, int):
            result[name] = min(value, WORDS)
        elif name in SIZES and isinstance(value, int | float) and not isinstance(value, bool):
            result[name] = min(value, SIZES[name])
    return result


def build(kind: str, **options: Any) -> PreTrainedModel:
    """With birl's attention, and norms and biases that are no constants. Raises whatever transformers raises."""
    known(kind)
    whole = AutoConfig.for_model(kind)
    small = shrunk(whole)
    text = getattr(whole, "text_config", None)
    if isinstance(text, PreTrainedConfig):
        small["text_config"] = shrunk(text) | OPTIONS.get(text.model_type, {}) | {"model_type": text.model_type}
    config = AutoConfig.for_model(kind, **small | OPTIONS.get(kind, {}) | options)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cast(Any, AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, None
    model.generation_config.pad_token_id = 0
    model.config.use_cache = False
    return model
