"""Folders of tiny random vision-language models: transformers' own classes, image processors and a tokenizer that is
made here."""

import io
import json
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from tests.tiny import tiny_tokenizer

WORDS = 352
TEXT: dict[str, Any] = {
    **{"vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
TOWER: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4, "out_hidden_size": 48},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.2},
}
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWENS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
#: by family: the tokens around a picture, as its chat template writes it, and other special tokens
MARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(QWENS, ("<|vision_start|><|image_pad|><|vision_end|>", QWEN)),
    "smolvlm": (
        "<image>",
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>",
         *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2))),
    ),
    "mistral3": ("[IMG]", ("[IMG]", "[IMG_BREAK]", "[IMG_END]")),
    "internvl": ("<IMG_CONTEXT>", ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")),
    "lfm2_vl": ("<image>", ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
         *(f"<|img_row_{r}_col_{c}|>" for r in (1, 2) for c in (1, 2)))),
}  # fmt: skip
GEMMA = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
SOUND = {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
MARKS |= {"gemma3": ("<boi>", tuple(GEMMA.values()))}
GEMMAS4 = ("gemma4", "gemma4_unified")
MARKS |= dict.fromkeys(GEMMAS4, ("<img>", (*GEMMA.values(), *SOUND.values(), "<|video|>")))
NAMED = {"gemma3": GEMMA, **dict.fromkeys(GEMMAS4, GEMMA | SOUND)}
NAMED["internvl"] = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
NAMED["internvl"] |= {"context_image_token": "<IMG_CONTEXT>"}


def template(mark: str) -> str:
    return (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '"
        + mark
        + "' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    mark, specials = MARKS[kind]
    result = tiny_tokenizer(vocab=320, template=template(mark))
    result.add_special_tokens({"additional_special_tokens": list(specials)})
    if kind in NAMED:
        result._set_model_specific_special_tokens(NAMED[kind])
    return result


def config(kind: str, words: PreTrainedTokenizerFast) -> Any:
    def token(text: str) -> int:
        return cast(int, words.convert_tokens_to_ids(text))

    if kind in QWENS:
        tower = dict(TOWER)
        text = {**TEXT, **AXES}
        text |= EXPERTS if kind.endswith("moe") else {}
        if kind.startswith("qwen3_vl"):
            tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        elif kind.startswith("qwen3_5"):
            tower |= {"num_position_embeddings": 64}
            text |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
            text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
            text |= {"rope_parameters": {**AXES["rope_parameters"], "partial_rotary_factor": 1.0}}
        else:
            tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
            text["hidden_size"] = tower["out_hidden_size"] = 64  # heads of 16
            del text["head_dim"]
        ids = {"image_token_id": token(QWEN[2]), "video_token_id": token(QWEN[3])}
        ids |= {"vision_start_token_id": token(QWEN[0]), "vision_end_token_id": token(QWEN[1])}
        return AutoConfig.for_model(kind, text_config=text, vision_config=tower, **ids)
    tower = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"patch_size": 4, "initializer_range": 0.2},
    }
    if kind == "mistral3":
        own = {"vision_config": {**tower, "model_type": "pixtral", "image_size": 32, "head_dim": 16}}
        text = {**TEXT, "model_type": "mistral"}
        return AutoConfig.for_model(kind, text_config=text, **own, image_token_index=token("[IMG]"))
    if kind == "internvl":
        own = {"vision_config": {**tower, "image_size": [16, 16], "patch_size": [4, 4]}, "downsample_ratio": 0.5}
        text = {**TEXT, "model_type": "qwen2", "hidden_size": 64}
        del text["head_dim"]
        return AutoConfig.for_model(kind, text_config=text, **own, image_token_id=token("<IMG_CONTEXT>"))
    if kind == "smolvlm":
        own = {"vision_config": {**tower, "image_size": 16}, "scale_factor": 2}
        text = {**TEXT, "model_type": "llama"}
        return AutoConfig.for_model(kind, text_config=text, **own, image_token_id=token("<image>"))
    if kind == "lfm2_vl":
        own = {"vision_config": {**tower, "model_type": "siglip2_vision_model", "num_patches": 16}}
        text = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
        return AutoConfig.for_model(
            kind, text_config=text, **own, image_token_id=token("<image>"), projector_hidden_size=32
        )
    if kind in ("gemma3", *GEMMAS4):
        return gemma(kind, tower, {f"{name}_id": token(text) for name, text in GEMMA.items()})
    raise KeyError(kind)


def gemma(kind: str, tower: dict[str, Any], ids: dict[str, int]) -> Any:
    """Layers with windows shorter than a picture's place in the prompt, and one without."""
    text = {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 6}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    if kind == "gemma3":
        own = {"vision_config": {**tower, "image_size": 24}, "mm_tokens_per_image": 9}
        ids["image_token_index"] = ids.pop("image_token_id")
        return AutoConfig.for_model(kind, text_config={**text, "model_type": "gemma3_text"}, **own, **ids)
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "global_head_dim": 16}
    text |= {"use_bidirectional_attention": "vision"}
    if kind == "gemma4_unified":  # no tower: patches alone
        tower = {"patch_size": 4, "pooling_kernel_size": 2, "mm_posemb_size": 64}
        tower |= {"mm_embed_dim": 32, "output_proj_dims": 32}
        return AutoConfig.for_model(kind, text_config=text, vision_config=tower, audio_config=None, **ids)
    text |= {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8}
    tower |= {"pooling_kernel_size": 2, "position_embedding_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    return AutoConfig.for_model(kind, text_config=text, vision_config=tower, audio_config=None, **ids)


def image_processor(kind: str) -> dict[str, Any]:
    if kind in QWENS:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            **{"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
            "size": {"shortest_edge": 64, "longest_edge": 1024},
            **{"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD},  # vLLM has no defaults
        }
    if kind == "mistral3":
        return {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32}, "patch_size": 8}
    if kind == "internvl":
        sizes = {"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 3}
        return {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, **sizes}
    if kind == "smolvlm":
        sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
        return {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, **sizes}
    if kind == "gemma3":
        sizes = {"size": {"height": 24, "width": 24}, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2}
        sizes |= {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.6}
        return {"image_processor_type": "Gemma3ImageProcessor", **sizes}
    if kind in GEMMAS4:
        sizes = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
        return {"image_processor_type": PROCESSORS[kind]["processor_class"].replace("Proc", "ImageProc"), **sizes}
    if kind == "lfm2_vl":
        sizes = {"tile_size": 16, "encoder_patch_size": 4, "min_image_tokens": 2, "max_image_tokens": 4}
        sizes |= {"min_tiles": 2, "max_tiles": 4, "max_num_patches": 16, "downsample_factor": 2}
        return {"image_processor_type": "Lfm2VlImageProcessor", "do_image_splitting": True, **sizes}
    raise KeyError(kind)


#: what a processor's own configuration says, beside its image processor
PROCESSORS: dict[str, dict[str, Any]] = {
    "mistral3": {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "lfm2_vl": {"processor_class": "Lfm2VlProcessor"},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 9},
    "gemma4": {"processor_class": "Gemma4Processor"},
    "gemma4_unified": {"processor_class": "Gemma4UnifiedProcessor"},
}


def folder(path: Path | str, kind: str = "qwen3_vl", seed: int = 0) -> Path:
    """A model folder as the hub has them."""
    path = Path(path)
    words = tokenizer(kind)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForImageTextToText.from_config(config(kind, words))).float()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            elif not parameter.any():  # Gemma 3's projection
                parameter.normal_(0, 0.2)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(path)
    words.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(image_processor(kind)))
    if kind in PROCESSORS:
        (path / "processor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    return path


def drawn(text: str = "7", size: tuple[int, int] = (24, 16), color: str = "white") -> bytes:
    """A PNG file."""
    image = Image.new("RGB", size, color)
    ImageDraw.Draw(image).text((2, 2), text, fill="black")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
