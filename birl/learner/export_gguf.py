"""Export a model folder in Hugging Face format as a .gguf file for llama.cpp and programs built on it.

Names of tensors, keys and types come from the `gguf` package; each architecture follows llama.cpp's
convert_hf_to_gguf.py: rows of q and k of a Llama in the order of its rotary embedding, a BPE tokenizer, and the name of
its pre-tokenizer.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from birl.errors import BirlError
from birl.models.gguf import FACTORS, factors
from birl.models.load import load_tokenizer, quiet
from birl.regular import clear, read_json


class Form(NamedTuple):
    """`name`: llama.cpp's name of the architecture. `paired`: its rotary embedding rotates neighbours, not halves.
    `activation` and `biases` (of attention and feed-forward part): those that llama.cpp computes with, whatever a file
    has."""

    name: str
    paired: bool = False
    activation: str = "silu"
    biases: bool = False


#: by model_type; llama.cpp has Mistral's layers as Llama's
FORMS = {
    "llama": Form("LLAMA", paired=True, biases=True),
    "mistral": Form("LLAMA", paired=True),
    "qwen2": Form("QWEN2"),
    "qwen3": Form("QWEN3"),
    "phi3": Form("PHI3"),
    "starcoder2": Form("STARCODER2", activation="gelu_pytorch_tanh", biases=True),
    "granite": Form("GRANITE", paired=True),
    "olmo2": Form("OLMO2"),
}
#: types of weights; norms and biases are always float32
TYPES = ("f16", "bf16", "f32", "q8_0")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: pre-tokenizer steps -> llama.cpp's name of the pre-tokenizer
SPLITS = {
    ("bytes with words",): "gpt-2",
    ("digits", "bytes with words"): "smollm",
    (WORDS % "", "bytes"): "qwen2",
    (WORDS % "{1,3}", "bytes"): "llama-bpe",
}


def to_gguf(folder: Path, target: Path, kind: str = "f16") -> None:
    """Write `target`, with weights of a type in `TYPES`. Raises `BirlError` if the model or tokenizer is not supported,
    if the type cannot hold the weights, and if `target` exists."""
    check(folder, target, kind)
    from gguf import MODEL_ARCH, GGUFWriter, LlamaFileType, get_tensor_name_map

    config: Any = AutoConfig.from_pretrained(folder)
    form = form_of(folder, config)
    names = get_tensor_name_map(MODEL_ARCH[form.name], config.num_hidden_layers)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        writer = GGUFWriter(part / "model", form.name.lower(), use_temp_file=True)
        describe(writer, config, target.stem)
        writer.add_file_type(LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
        add_tokenizer(writer, folder, config.vocab_size)
        for name, tensor in tensors(folder):
            goal = names.get_name(name, (".weight", ".bias"))
            if goal is None:
                raise BirlError(f"{folder}: llama.cpp has no name for {name}.")
            own = turned(name, tensor, config) if form.paired else tensor
            data, as_type = coded(name, own, kind)
            writer.add_tensor(goal, data, raw_dtype=as_type)
        if config.rope_parameters.get("rope_type") == "llama3":
            writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
            writer.add_tensor(FACTORS, factors(config).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (part / "model").rename(target)
    finally:
        clear(part)


def check(folder: Path, target: Path, kind: str) -> None:
    """Check all that a model's folder shows without its weights. Raises `BirlError`."""
    if kind not in TYPES:
        raise BirlError(f"--type {kind}: expected one of {', '.join(TYPES)}.")
    if importlib.util.find_spec("gguf") is None:
        raise BirlError(f"Writing {target.name} needs another package: pip install 'birl[gguf]'")
    form_of(folder, AutoConfig.from_pretrained(folder))
    split_of(folder)


def turned(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Reorder rows of q and k [heads * D, ...]: two that the rotary embedding rotates together become neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def coded(name: str, tensor: Tensor, kind: str) -> tuple[np.ndarray, Any]:
    """Encode a tensor as `kind`; vectors, and for q8_0 rows that do not divide into blocks of 32, as float32."""
    from gguf import GGMLQuantizationType, quants

    whole = tensor.ndim < 2 or (kind == "q8_0" and tensor.shape[-1] % 32 > 0)
    as_type = GGMLQuantizationType["F32" if whole else kind.upper()]
    if as_type is GGMLQuantizationType.F16 and tensor.abs().max() > torch.finfo(torch.float16).max:
        raise BirlError(f"{name} has values that float16 cannot hold. Use --type bf16.")
    return quants.quantize(tensor.float().contiguous().numpy(), as_type), as_type


def form_of(folder: Path, config: Any) -> Form:
    kind = config.model_type
    form = FORMS.get(kind)
    if form is None:
        raise BirlError(f"{folder}: {kind} has no form as GGUF here, only {', '.join(FORMS)}.")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope != "default" and not (rope == "llama3" and form.paired):
        raise BirlError(f"{folder}: rotary embeddings of the kind {rope} have no form as GGUF here.")
    kinds = getattr(config, "layer_types", None)
    if set(kinds or ()) - {"full_attention"} or (kinds is None and getattr(config, "sliding_window", None)):
        raise BirlError(f"{folder}: layers with a window have no form as GGUF here.")
    if config.hidden_act != form.activation:
        raise BirlError(f"{folder}: llama.cpp computes {kind} with {form.activation}, not with {config.hidden_act}.")
    lacks = not getattr(config, "use_bias", True)
    biased = any(getattr(config, f"{part}_bias", False) for part in ("attention", "mlp"))
    if lacks or (biased and not form.biases):
        raise BirlError(f"{folder}: llama.cpp {'needs' if lacks else 'has no'} biases in the layers of {kind}.")
    return form


def describe(writer: Any, config: Any, name: str) -> None:
    """Write the model's dimensions."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(int(size * (config.rope_parameters.get("partial_rotary_factor") or 1.0)))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if hasattr(config, "norm_epsilon"):  # of Starcoder2's LayerNorm
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def add_tokenizer(writer: Any, folder: Path, size: int) -> None:
    """Write the BPE tokenizer. Raises `BirlError` for other kinds, and for a pre-tokenizer unknown to llama.cpp."""
    from gguf import TokenType

    with quiet():
        tokenizer = load_tokenizer(folder)
    pre = split_of(folder)
    words, added = {i: w for w, i in tokenizer.get_vocab().items()}, tokenizer.added_tokens_decoder
    own = {i: TokenType.CONTROL if token.special else TokenType.USER_DEFINED for i, token in added.items()}
    kinds = [own.get(i, TokenType.NORMAL) if i in words else TokenType.UNUSED for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([words.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    merges = read_json(folder / "tokenizer.json")["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for name in ("bos", "eos", "pad", "unk"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def split_of(folder: Path) -> str:
    """llama.cpp's name of the tokenizer's pre-tokenizer."""
    try:
        told = read_json(folder / "tokenizer.json")
        kind, splits = told["model"]["type"], told["pre_tokenizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BirlError(f"{folder}: tokenizer.json cannot be read ({error!r}).") from error
    steps = splits["pretokenizers"] if splits and splits["type"] == "Sequence" else [splits]
    way = tuple(_split(step) for step in steps)
    if kind != "BPE" or told.get("normalizer") not in (None, {"type": "NFC"}) or way not in SPLITS:
        raise BirlError(
            f"{folder}: llama.cpp has no name for the way its tokenizer splits texts, or birl does not know it. birl "
            f"knows {', '.join(SPLITS.values())}."
        )
    return SPLITS[way]


def _split(step: Any) -> str:
    match step:
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return "bytes with words" if words else "bytes"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return pattern
    return "other"


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all safetensors files by name, one at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
