"""Converts a model folder whose weights are stored in 4 or 8 bits with scales to plain bfloat16 weights, once, into a
cache."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from birl.errors import BirlError
from birl.hub import WEIGHTS
from birl.models.gguf import converted
from birl.regular import read_json

if TYPE_CHECKING:
    from torch import Tensor

# quant_method in config.json -> name suffixes of the tensors that are scales; the methods that birl converts
SCALES = {"fp8": ("_scale_inv", "activation_scale"), "mxfp4": ("_scales",)}
TRAINED = {"bitnet"}  # quant_method of weights that are stored as they are trained


def plain(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Return a model folder with trainable weights: this one, or its converted copy. Raises `BirlError` if the weights
    are stored in a format that birl does not read."""
    try:
        method = str(quantization(read_json(folder / "config.json"))["quant_method"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return folder  # not quantised; or the next reader reports the error
    if method in TRAINED:
        return folder
    if method not in SCALES:
        raise BirlError(
            f"{folder}: its weights are quantised by {method} (quantization_config in its config.json), which birl "
            f"does not read; it reads {' and '.join(SCALES)}. Name the model that it was made of; lora.quantize=nf4 "
            "trains adapters on 4 bits of that."
        )
    return converted(folder, say, dequantize)


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Remove and return quantization_config of a model's config, or its text's. Raises `KeyError` if there is none."""
    return config.pop("quantization_config", None) or config["text_config"].pop("quantization_config")


def dequantize(source: Path, folder: Path) -> None:
    """Convert file by file, with the same file names, so that at most one file is in memory."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from birl.models.load import check_files, weight_files  # which imports this module

    check_files(source)
    files, config = weight_files(source), read_json(source / "config.json")
    given = quantization(config)
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)

    def read(key: str) -> "Tensor | None":
        if key not in where:
            return None
        with safe_open(where[key], framework="pt") as opened:
            return opened.get_tensor(key)

    written, total = dict[str, str](), 0
    for file in files:
        own = [k for k, place in where.items() if place == file and not k.endswith(SCALES[given["quant_method"]])]
        tensors = dict(value_of(key, read, given) for key in own)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        written |= dict.fromkeys(tensors, file.name)
        total += sum(t.nbytes for t in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": written}
        (folder / WEIGHTS[1]).write_text(json.dumps(index, indent=1))
    config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (WEIGHTS[1], "config.json"):
            shutil.copyfile(file, folder / file.name)


def value_of(key: str, read: "Callable[[str], Tensor | None]", given: dict[str, Any]) -> "tuple[str, Tensor]":
    """Name and value of the weight that the tensor `key` is or encodes; bfloat16 if it was encoded. Raises `BirlError`
    if its scales are missing or do not fit."""
    import torch

    codes = read(key)
    assert codes is not None
    if given["quant_method"] == "mxfp4" and key.endswith("_blocks"):
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        name = key.removesuffix("_blocks")
        scales = read(f"{name}_scales")
        if scales is not None and scales.shape == codes.shape[:-1]:
            return name, convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16).contiguous()
        raise unfit(key, scales)
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return key, codes
    scales = read(f"{key}_scale_inv")
    if scales is None:
        raise unfit(key, scales)
    factor = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    sizes = (given.get("weight_block_size") or ()) if factor.numel() > 1 else ()
    for dim, size in zip((-2, -1), sizes, strict=False):
        if factor.shape[dim] != -(-codes.shape[dim] // size):
            raise unfit(key, scales)
        factor = factor.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
    if factor.numel() > 1 and not sizes:
        raise unfit(key, scales)
    return key, (codes.float() * factor).to(torch.bfloat16)


def unfit(key: str, scales: "Tensor | None") -> BirlError:
    what = "are missing" if scales is None else f"have another shape than its blocks: {tuple(scales.shape)}"
    return BirlError(f"The scales of {key} {what}. Download the model again.")
