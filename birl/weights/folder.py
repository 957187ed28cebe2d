"""A version of the weights as a folder in Hugging Face format: complete or not there.

ROOT/v000012/          model.safetensors, config.json, the tokenizer: whatever the model folder has beside weights
ROOT/latest.json       {"version", "folder", "anew", "digests"}: what servers look into with weights.method=volume
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from birl.errors import BirlError, WeightsFailed, first_line
from birl.regular import clear, inside, read_json, write_whole
from birl.types import Update
from birl.weights.gathered import Gathered

LATEST = "latest.json"
FOLDER = re.compile(r"v[0-9]{6,18}")
KEPT = 2  # the current one and the one before, which an engine may still be reading


def write(root: Path, version: int, tensors: Mapping[str, Tensor] | Gathered, beside: Path) -> Path:
    """Write a version. Raises `WeightsFailed` if the disk is full; then nothing of this version is left."""
    target = root / f"v{version:06d}"
    part = root / f".{target.name}.{os.getpid()}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        clear(part)
        part.mkdir()
        for file in beside.iterdir():
            if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".gguf")):
                shutil.copyfile(inside(beside, file.name), part / file.name)
        if isinstance(tensors, Gathered):
            tensors.write(part / "model.safetensors")
        else:
            save_file({n: t.contiguous() for n, t in tensors.items()}, part / "model.safetensors", {"format": "pt"})
        clear(target)  # of an earlier process, with other weights of that number
        part.rename(target)
    except Exception as error:  # safetensors has its own error for a full disk
        clear(part)
        reason = getattr(error, "strerror", None) or first_line(error)
        raise WeightsFailed(
            "truncated",
            f"Version {version} of the weights could not be written to {root}: {reason}. Make room, or name another "
            "place with weights.folder=...; the same command resumes from the newest checkpoint.",
        ) from error
    return target


def announce(root: Path, update: Update) -> None:
    """Make this version the newest one that readers of `root` find."""
    row = {"version": update.version, "folder": Path(update.folder).name, "anew": update.anew}
    write_whole(root / LATEST, json.dumps({**row, "digests": dict(update.digests)}).encode())


def latest(root: Path) -> Update | None:
    """The version announced last, or None. Raises `WeightsFailed` if the file is damaged."""
    try:
        result = read_json(root / LATEST)
        version, digests, anew = result["version"], result["digests"], result["anew"]
        texts = isinstance(digests, dict) and all(isinstance(text, str) for text in digests.values())
        if type(version) is not int or not texts or type(anew) is not bool:
            raise ValueError("version, digests or anew have another type")
        if not FOLDER.fullmatch(result["folder"]):
            raise ValueError(f"folder is {result['folder']!r}, not a name such as v000012")
        return Update(version=version, digests=digests, folder=str(inside(root, result["folder"])), anew=anew)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, BirlError) as error:
        raise WeightsFailed("truncated", f"{root / LATEST} cannot be read: {error}") from error


def prune(root: Path, newest: int) -> None:
    """Delete all but `KEPT` versions up to `newest`, and later or incomplete ones of an earlier process."""
    result = {path: int(path.name[1:]) for path in root.glob("v*") if path.name[1:].isdigit()}
    kept = sorted((v for v in result.values() if v <= newest), reverse=True)[:KEPT]
    for path, version in result.items():
        if version not in kept:
            clear(path)
    for path in root.glob(".v*.part"):
        if path.name.split(".")[2] != str(os.getpid()):
            clear(path)


def remove(root: Path) -> None:
    """Remove everything that this module writes; the folder itself only if nothing else is in it."""
    for path in (*root.glob("v[0-9]*"), *root.glob(".v*.part")):
        clear(path)
    with suppress(OSError):
        (root / LATEST).unlink(missing_ok=True)
        root.rmdir()
