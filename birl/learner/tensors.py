"""The tensors of a checkpoint: their bytes in files, and index.json with their locations. Nothing is pickled.

    tensors/__0_0.distcp     the parts that rank 0 wrote, concatenated, each with its bytes as in memory
    tensors/index.json       {"format": 2, "tensors": {NAME: {"shape": [2, 3], "dtype": "float32", "parts": [
                                 {"at": [0, 0], "shape": [2, 3], "file": "__0_0.distcp", "offset": 0}]}}}

torch.distributed.checkpoint plans which rank writes and reads which part; its own storage would unpickle its index, and
so run code from an untrusted folder.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from birl.errors import BirlError
from birl.models.digests import nonfinite
from birl.regular import inside, open_regular, read_json

INDEX = "index.json"
FORMAT = 2  # 1 was torch's own, with a pickle as its index
PARTS = 4096  # largest number of a tensor's parts: each pair of them is compared
FILE = re.compile(r"__\d+_\d+\.distcp")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class _Folder:
    """What torch asks of both, and a folder has no use for."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Writer(_Folder, StorageWriter):
    """What `dcp.save` writes with, into the folder `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with (self.path / plan.storage_data).open("wb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                place = (plan.storage_data, file.tell())
                size = file.write(memory(tensor.detach().cpu().contiguous()))
                results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for one in results for result in one}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            full = (chunk for chunk in entry.chunks if prod(chunk.sizes))  # ranks may have nothing of a tensor
            result = [(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in full]
            tensors[name] = {
                "shape": list(entry.size),
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "parts": [
                    {"at": list(chunk.offsets), "shape": list(chunk.sizes), "file": file, "offset": offset}
                    for chunk, (file, offset) in result
                ],
            }
        write_index(self.path, tensors)


class Reader(_Folder, StorageReader):
    """What `dcp.load` reads with, from the folder `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.index = path, read_index(path)
        self.tensors: dict[str, TensorStorageMetadata] = self.index.state_dict_metadata  # pyright: ignore

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            by_file[self.index.storage_data[item.storage_index][0]].append(item)
        for name, items in by_file.items():
            with open_regular(inside(self.path, name)) as file:
                for item in items:
                    _, offset, shape, dtype = self.index.storage_data[item.storage_index]
                    part = torch.empty(shape, dtype=dtype)
                    file.seek(offset)
                    if file.readinto(memory(part)) != part.nbytes:
                        raise BirlError(f"{name} ends within {item.storage_index.fqn}.")
                    if nonfinite({item.storage_index.fqn: part}):
                        raise BirlError(f"{name}: {item.storage_index.fqn} holds NaN or infinity.")
                    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(dimension, start, length)
                    into = planner.resolve_tensor(item).detach()
                    into.copy_(part)
                    planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def memory(tensor: Tensor) -> memoryview:
    """Writable view of the bytes of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore


def write_index(folder: Path, tensors: dict[str, Any]) -> None:
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "tensors": tensors}, file)
        file.flush()
        os.fsync(file.fileno())


def read_index(folder: Path) -> Metadata:
    """Read index.json as torch.distributed.checkpoint's `Metadata`; `storage_data`: part -> file, offset, shape, type.
    Raises `BirlError` unless every tensor is complete and every part lies within its file."""
    if not (folder / INDEX).is_file() and (folder / ".metadata").exists():
        run = folder.parent.parent.parent
        raise BirlError(
            f"{folder.parent} was written by an earlier version of birl, whose index is a pickle, and nothing is "
            f"unpickled here. `birl checkpoints {run} convert` writes it anew."
        )
    try:
        result = read_json(folder / INDEX)
        expect(isinstance(result, dict) and result.get("format") == FORMAT, f"its format is not {FORMAT}")
        expect(isinstance(result.get("tensors"), dict), "it has no tensors")
        places: dict[MetadataIndex, Any] = {}
        used: dict[str, list[tuple[int, int]]] = defaultdict(list)
        tensors: Any = {name: _tensor(name, entry, places, used) for name, entry in result["tensors"].items()}
        for name, spans in used.items():
            _within(inside(folder, name), sorted(spans))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BirlError(f"{folder / INDEX} cannot be read: {reason}.") from error
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def expect(fact: object, otherwise: str) -> None:
    if not fact:
        raise ValueError(otherwise)


def _tensor(
    name: str, entry: Any, places: dict[MetadataIndex, Any], used: dict[str, list[tuple[int, int]]]
) -> TensorStorageMetadata:
    """Parse one tensor of the index; add its parts to `places`, and their byte ranges to `used`, by file."""
    expect(isinstance(entry, dict) and entry.keys() == {"shape", "dtype", "parts"}, f"{name} has other fields")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    shape, parts = _sizes(entry["shape"]), entry["parts"]
    if dtype is None or shape is None or not isinstance(parts, list):
        raise ValueError(f"{name} has no shape, type and parts")
    expect(len(parts) <= PARTS, f"{name} has more than {PARTS} parts")
    chunks = []
    for part in parts:
        fields = {"at", "shape", "file", "offset"}
        expect(isinstance(part, dict) and part.keys() == fields, f"a part of {name} has other fields")
        at, sizes, file, offset = _sizes(part["at"]), _sizes(part["shape"]), part["file"], _sizes([part["offset"]])
        if at is None or sizes is None or not len(at) == len(sizes) == len(shape):
            raise ValueError(f"a part of {name} has another number of dimensions")
        if not isinstance(file, str) or not FILE.fullmatch(file) or not offset:
            raise ValueError(f"a part of {name} is in no file of a checkpoint")
        fits = all(a + n <= m for a, n, m in zip(at, sizes, shape, strict=True))
        where = MetadataIndex(name, at, len(chunks))
        expect(fits and where not in places, f"a part of {name} does not fit into it")
        places[where] = (file, offset[0], sizes, dtype)
        used[file].append((offset[0], offset[0] + prod(sizes) * dtype.itemsize))
        chunks.append(ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)))
    expect(_whole(shape, chunks), f"the parts of {name} are not all of it")
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)


def _sizes(value: object) -> tuple[int, ...] | None:
    """`value` as at most 32 integers from 0 to 2^62 - 1; None if it is something else."""
    if not isinstance(value, list) or len(value) > 32:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 2**62 for n in value) else None


def _whole(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the chunks cover the tensor: as many elements as it has, and no overlap."""
    full = [chunk for chunk in chunks if prod(chunk.sizes)]
    if sum(prod(chunk.sizes) for chunk in full) != prod(shape):
        return False
    begin = np.array([chunk.offsets for chunk in full], dtype=np.int64).reshape(len(full), len(shape))
    end = begin + np.array([chunk.sizes for chunk in full], dtype=np.int64).reshape(begin.shape)
    over = np.ones((len(full), len(full)), dtype=bool)  # each overlaps itself
    for first, last in zip(begin.T, end.T, strict=True):
        over &= (first[:, None] < last) & (first < last[:, None])
    return int(over.sum()) == len(full)


def _within(file: Path, spans: list[tuple[int, int]]) -> None:
    """Raises `ValueError` if parts of a file overlap, or if the file ends before the last of them."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
    for (_, end), (start, _) in pairwise(spans):
        expect(end <= start, f"parts share bytes of {file.name}")
    expect(spans[-1][1] <= size, f"{file.name} has {size} bytes instead of {spans[-1][1]}")
