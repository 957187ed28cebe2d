"""Checkpoints: torch.distributed.checkpoint for the tensors, JSON for the rest, a manifest with digests, an atomic
rename.

    checkpoints/step-000010/
        tensors/            weights, buffers, optimizer state (torch.distributed.checkpoint)
        state.json          counters, data position, log offsets
        manifest.json       bytes and SHA-256 of every file above; written last

A folder without the `.part` suffix is complete: a crash while saving leaves the previous checkpoint as the newest. What
does not match the model in any key, shape or type is refused.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from birl.errors import BirlError
from birl.parallel.ranks import Ranks

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint folder."""

    path: Path
    step: int


def save(root: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], ranks: Ranks | None = None) -> Path:
    """Write a checkpoint of `step` under `root`; with `ranks` all of them, each its own parts. Raises `BirlError` when
    the disk is full; nothing but a `.part` folder is left."""
    ranks = ranks or Ranks()
    target = root / f"step-{step:06d}"
    part = root / f"{target.name}.part"
    try:
        if ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        with _quiet():  # the ranks plan together before the first file is opened
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(part / "tensors"), no_dist=ranks.alone)
        if ranks.rank > 0:
            return target
        (part / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}, indent=1))
        files = {str(f.relative_to(part)): {"bytes": f.stat().st_size, "sha256": digest(f)} for f in _files(part)}
        (part / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        for file in _files(part):
            _sync(file)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        _sync(root)
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        shutil.rmtree(part, ignore_errors=True)
        raise BirlError(
            f"Could not save the checkpoint {target}: {_reason(error)} ({_free(root)} free on that disk). The newest "
            f"complete checkpoint is untouched. Make room, for example with `birl checkpoints {root.parent} prune 1`, "
            "and run the same command again to go on from it."
        ) from error
    return target


def load(path: Path, tensors: dict[str, Tensor], ranks: Ranks | None = None) -> dict[str, Any]:
    """Read a checkpoint into the given tensors, in place, and return its state; with `ranks` each its own parts,
    however many had written it. Every key, shape and type must match both ways, and every file its digest; otherwise
    nothing is written and `BirlError` names what is wrong."""
    damage = verify(path)
    if damage:
        raise BirlError(
            f"The checkpoint {path} is damaged: {'; '.join(damage)}. Resume from an older one: resume=FOLDER."
        )
    reader = dcp.FileSystemReader(path / "tensors")
    found = {k: (tuple(m.size), m.properties.dtype) for k, m in reader.read_metadata().state_dict_metadata.items()}  # pyright: ignore
    wanted = {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()}
    problems = [f"{k} is missing in the checkpoint" for k in sorted(wanted.keys() - found.keys())]
    problems += [f"{k} is not in the model" for k in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{k} is {_shape(found[k])} in the checkpoint and {_shape(wanted[k])} in the model"
        for k in sorted(found.keys() & wanted.keys())
        if found[k] != wanted[k]
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise BirlError(f"The checkpoint {path} does not belong to this model: {'; '.join(problems[:5])}{more}.")
    with _quiet():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=ranks is None or ranks.alone)
    return read_state(path)


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """All tensors whose name starts with `prefix`, which is cut off. "model." gives the float32 weights by the model's
    own names, without needing the model."""
    reader = dcp.FileSystemReader(path / "tensors")
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tuple(m.size), dtype=m.properties.dtype)  # pyright: ignore
        for name, m in entries.items()
        if name.startswith(prefix)
    }
    with _quiet():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


def verify(path: Path) -> list[str]:
    """What is wrong with the files of a checkpoint; empty when all digests hold."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return [f"{manifest} is missing" if path.is_dir() else f"there is no folder {path}"]
    problems = []
    for name, expected in json.loads(manifest.read_text())["files"].items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
        elif digest(file) != expected["sha256"]:
            problems.append(f"{name} has another SHA-256 than when it was written")
    return problems


def saved(root: Path) -> list[Saved]:
    """All complete checkpoints, oldest first."""
    names = [(p, re.fullmatch(r"step-(\d+)", p.name)) for p in root.glob("step-*")]
    return sorted((Saved(p, int(m[1])) for p, m in names if m), key=lambda s: s.step)


def latest(root: Path) -> Path | None:
    found = saved(root)
    return found[-1].path if found else None


def prune(root: Path, keep_last: int, keep: set[int]) -> list[Path]:
    """Delete all but the newest `keep_last` (0: keep all) and the steps in `keep`, and what crashes left
    half-written."""
    removed = list(root.glob("step-*.part"))
    if keep_last > 0:
        removed += [s.path for s in saved(root)[:-keep_last] if s.step not in keep]
    for path in removed:
        shutil.rmtree(path)
    return removed


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """The first line of the innermost error. torch.distributed.checkpoint hides it in `failures`: rank -> (error,
    traceback)."""
    failures = getattr(error, "failures", None)
    if failures:
        return _reason(next(iter(failures.values()))[0])
    if isinstance(error, OSError):
        return error.strerror or str(error)
    inner = error.__cause__ or error.__context__
    return _reason(inner) if inner is not None else str(error).splitlines()[0]


def _free(path: Path) -> str:
    return f"{shutil.disk_usage(path if path.exists() else path.parent).free / 2**30:.1f} GiB"


def _shape(entry: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')}"


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():  # "torch.distributed is not initialized": we know
        warnings.simplefilter("ignore")
        yield
