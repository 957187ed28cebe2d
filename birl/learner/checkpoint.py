"""Checkpoints: tensors as bytes, the rest as JSON, a manifest with digests, an atomic rename. Nothing is pickled.

    checkpoints/step-000010/
        tensors/            weights, buffers, optimizer state (`learner/tensors.py`)
        state.json          counters, data position, log offsets
        manifest.json       bytes and SHA-256 of every file above; written last

A folder without the `.part` suffix is complete: a crash while saving leaves the previous checkpoint as the newest. A
checkpoint that differs from the model in any key, shape or type is refused.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from birl.errors import BirlError, first_line
from birl.learner.step_folders import read_state, saved
from birl.learner.tensors import INDEX, Reader, Writer, read_index
from birl.models.manifest import damage, digest
from birl.parallel.ranks import Ranks
from birl.regular import clear

T = TypeVar("T")
FORMAT = 2
MANIFEST = "manifest.json"


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    ranks: Ranks | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint of `step` under `root`; with `ranks` each rank writes its own parts, planned over `group`
    (None: the default one). Raises `BirlError` on all ranks if one fails, as with a full disk; at most a `.part` folder
    is left."""
    ranks = ranks or Ranks()
    target = root / f"step-{step:06d}"
    part = root / f"{target.name}.part"
    try:
        agreed(lambda: _prepare(part) if ranks.rank == 0 else None, ranks, group)
        with _quiet():
            dcp.save(dict(tensors), storage_writer=Writer(part / "tensors"), no_dist=ranks.alone, process_group=group)
        result = agreed(lambda: _entries(part, own_files(part, ranks.rank)), ranks, group)
        entries = {name: entry for one in result for name, entry in one.items()}
        whole = {"step": step, **state}
        agreed(lambda: complete(part, target, whole, entries) if ranks.rank == 0 else None, ranks, group)
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        clear(part)
        before = [entry.path.name for entry in saved(root)] if root.is_dir() else []
        rest = (
            f"{before[-1]}, the newest complete checkpoint, is untouched. Make room, for example with "
            f"`birl checkpoints {root.parent} prune 1`, or make the folder writable, and run the same command again to "
            "go on from it."
            if before
            else "There is no complete checkpoint yet. Make room, as with `birl checkpoints OTHER_RUN prune 1`, or "
            "make the folder writable, and run the same command again to begin anew."
        )
        raise BirlError(
            f"Could not save the checkpoint {target}: {_reason(error)} ({_free(root)} free on that disk). {rest}"
        ) from error
    return target


def agreed(work: Callable[[], T], ranks: Ranks, group: dist.ProcessGroup | None) -> list[T]:
    """Results of `work` on each rank. Raises on all ranks if it raises on one, so that none waits for a failed one."""
    if ranks.alone:
        return [work()]
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    result: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(result, (value, None if error is None else f"{_reason(error)}"), group=group)
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(result) if why is not None]:
        raise OSError(failed[0])
    return [value for value, _ in result]


def own_files(folder: Path, rank: int) -> list[Path]:
    """Tensor files of a checkpoint that this rank writes; rank 0 also writes the index."""
    result = list((folder / "tensors").glob(f"__{rank}_*"))
    return sorted([*result, folder / "tensors" / INDEX] if rank == 0 else result)


def check(path: Path, ranks: Ranks | None = None) -> None:
    """`verify`, but raises `BirlError` that names the problems."""
    if problems := verify(path, ranks):
        raise BirlError(
            f"The checkpoint {path} is damaged: {'; '.join(problems)}. Choose an older one (`birl checkpoints "
            f"{path.parent.parent}` lists them; resume=FOLDER goes on from it)."
        )


def fill(path: Path, tensors: dict[str, Tensor], ranks: Ranks | None = None) -> dict[str, Any]:
    """Read a checkpoint into the given tensors, in place, and return its state; with `ranks` each rank reads its own
    parts, regardless of the number of ranks and the split that wrote it. Every key, shape and type must match both
    ways; otherwise nothing is written and `BirlError` names the problems."""
    reader = Reader(path / "tensors")
    result = {k: (tuple(m.size), m.properties.dtype) for k, m in reader.tensors.items()}
    wanted = {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()}
    problems = [f"{k} is missing in the checkpoint" for k in sorted(wanted.keys() - result.keys())]
    problems += [f"{k} is not in the model" for k in sorted(result.keys() - wanted.keys())]
    problems += [
        f"{k} is {_shape(result[k])} in the checkpoint and {_shape(wanted[k])} in the model"
        for k in sorted(result.keys() & wanted.keys())
        if result[k] != wanted[k]
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        other = any(".exp_avg_scale" in k for k in wanted.keys() ^ result.keys())
        fix = " Its moments are in other bits or blocks: set optimizer.kind and parallel.tp as they were." * other
        raise BirlError(f"The checkpoint {path} does not belong to this model: {'; '.join(problems[:5])}{more}.{fix}")
    _read(reader, tensors, ranks is None or ranks.alone)
    return read_state(path)


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read all tensors whose name starts with `prefix`, which is removed. "model." gives the float32 weights by the
    model's names, without the model."""
    reader = Reader(path / "tensors")
    return read_some(reader, prefix, list(shapes(reader, prefix)))


def read_some(reader: Reader, prefix: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the tensors PREFIX + name, by name."""
    wanted = {prefix + name: reader.tensors[prefix + name] for name in names}
    tensors = {name: torch.empty(tuple(m.size), dtype=m.properties.dtype) for name, m in wanted.items()}
    _read(reader, tensors, True)
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


def _read(reader: Reader, tensors: Mapping[str, Tensor], alone: bool) -> None:
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=alone)
    except CheckpointException as error:  # of any rank, on all
        raise BirlError(f"{reader.path.parent} cannot be read: {_reason(error)}") from error


def shapes(reader: Reader, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors whose name starts with `prefix`, which is removed; reads no tensors."""
    entries = reader.tensors.items()
    return {name.removeprefix(prefix): tuple(m.size) for name, m in entries if name.startswith(prefix)}


def verify(path: Path, ranks: Ranks | None = None) -> list[str]:
    """Problems of a checkpoint's files; empty if all digests match and all can be read. The files are divided among
    `ranks`, and all get the same answer."""
    ranks = ranks or Ranks()
    old = (path / "tensors" / ".metadata").exists()  # of a version before `birl checkpoints RUN convert`
    required = ("state.json", "tensors/.metadata" if old else f"tensors/{INDEX}")
    shares = partial(damage, path, MANIFEST, required=required, first=ranks.rank, every=ranks.grid.size)
    for work in (shares, partial(_unreadable, path, old)):
        result = [problem for one in agreed(work, ranks, None) for problem in one]
        if result:
            return list(dict.fromkeys(result))
    return []


def _unreadable(path: Path, old: bool) -> list[str]:
    try:
        read_state(path)
        if not old:
            read_index(path / "tensors")
    except BirlError as error:
        return [str(error).partition(" What else")[0].rstrip(".").removeprefix(f"{path}/")]
    return []


def _prepare(part: Path) -> None:
    clear(part)
    part.mkdir(parents=True)


def _entries(folder: Path, files: list[Path]) -> dict[str, dict[str, Any]]:
    """Name -> bytes and SHA-256, as the manifest has them."""
    return {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": digest(f)} for f in files}


def complete(part: Path, target: Path, state: dict[str, Any], entries: dict[str, Any] | None = None) -> None:
    """Write everything but the tensors, and rename the folder to its final name. `entries`: manifest entries of the
    tensor files, if they are known."""
    (part / "state.json").write_text(json.dumps({**state, "format": FORMAT}, indent=1))
    entries = _entries(part, _files(part / "tensors")) if entries is None else entries
    entries = entries | _entries(part, [part / "state.json"])
    (part / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}, indent=1))
    for file in _files(part):
        _sync(file)
    clear(target)
    part.rename(target)
    _sync(target.parent)


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
        return error.strerror or str(error) or type(error).__name__
    inner = error.__cause__ or error.__context__
    return _reason(inner) if inner is not None else first_line(error)


def _free(path: Path) -> str:
    return f"{shutil.disk_usage(path if path.exists() else path.parent).free / 2**30:.1f} GiB"


def _shape(entry: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')}"


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():  # "torch.distributed is not initialized": we know
        warnings.simplefilter("ignore")
        yield
