"""`birl checkpoints RUN convert`: converts checkpoints of earlier versions, whose index is a pickle.

The index is read by an unpickler that allows only the dozen classes of such an index, the tensors by
`torch.load(weights_only=True)`. Nothing else in birl unpickles files.
"""

import io
import os
import pathlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from birl.errors import BirlError, first_line
from birl.learner import checkpoint, step_folders
from birl.learner.tensors import DTYPES, memory, write_index
from birl.regular import clear, inside, open_regular

OLD = ".metadata"


def _member(kind: Any, name: str) -> Any:
    """A member of an enum, which Python before 3.11.4 pickles as a call of getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it calls getattr for what no index of a checkpoint has")
    return kind[name]


ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", kind.__name__): kind
        for kind in (
            *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.StorageMeta),
            *(metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata._MEM_FORMAT_ENCODING),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # pyright: ignore
    **{
        (module, name): pathlib.PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in an old checkpoint, and its location."""

    name: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    length: int


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint has")
        return ALLOWED[module, name]


def convert(path: Path) -> bool:
    """Replace a checkpoint of the old format by one of the current format; False if it has that already. Raises
    `BirlError` if it is damaged or was not written by birl; then it is unchanged."""
    if not (path / "tensors" / OLD).exists():
        return False
    if problems := checkpoint.verify(path):
        raise BirlError(f"The checkpoint {path} is damaged: {'; '.join(problems)}.")
    state, part = step_folders.read_state(path), path.with_name(f"{path.name}.part")
    clear(part)
    try:
        (part / "tensors").mkdir(parents=True)
        _rewrite(path / "tensors", part / "tensors")
        checkpoint.complete(part, path, state)
    except BirlError:
        raise
    except OSError as error:
        raise BirlError(f"{path} could not be converted: {error.strerror or error}.") from error
    except Exception as error:  # whatever a hostile index makes of the classes that it may name
        raise BirlError(f"{path} is no checkpoint that birl has written: {first_line(error)}.") from error
    finally:
        clear(part)
    return True


def _rewrite(source: Path, target: Path) -> None:
    shapes, name = {}, "__0_0.distcp"
    with (target / name).open("wb") as into:
        for piece, shape in _pieces(source):
            entry = shapes.setdefault(piece.name, {"shape": list(shape), "dtype": piece.dtype, "parts": []})
            entry["parts"].append(
                {"at": list(piece.at), "shape": list(piece.shape), "file": name, "offset": into.tell()}
            )
            with open_regular(inside(source, piece.file)) as file:
                into.write(memory(_read(file, piece)))
        into.flush()
        os.fsync(into.fileno())
    write_index(target, shapes)


def _pieces(folder: Path) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Yield every part of every tensor, with the tensor's shape."""
    with open_regular(folder / OLD) as file:
        index = _Index(file).load()
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, entry in index.state_dict_metadata.items():
        for chunk in entry.chunks:
            if prod(chunk.sizes) == 0 and prod(entry.size):
                continue
            info = index.storage_data[metadata.MetadataIndex(name, chunk.offsets)]
            place = (str(info.relative_path), int(info.offset), int(info.length))
            piece = Piece(name, tuple(chunk.offsets), tuple(chunk.sizes), names[entry.properties.dtype], *place)
            yield piece, tuple(entry.size)


def _read(file: io.BufferedReader, piece: Piece) -> Tensor:
    file.seek(piece.offset)
    tensor = torch.load(io.BytesIO(file.read(piece.length)), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (piece.shape, DTYPES[piece.dtype]):
        raise ValueError(f"{piece.name} is not the tensor that the index says")
    return tensor.contiguous()
