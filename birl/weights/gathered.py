"""Weights of which every rank has parts, on their way to engines: gathered in buckets, written, and forgotten. No rank
ever has more of the whole model than one bucket.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from birl.models.digests import digest
from birl.models.heads import HEADS

BUCKET = 2**28  # bytes that are gathered at once, unless one weight alone is larger
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}  # as safetensors calls them


class Gathered:
    """`gather(names)` gives these weights in the engines' type, from all ranks, in the order asked for. `digests` are
    those of what was written last."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: Callable[[Sequence[str]], list[Tensor]]) -> None:
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n.split(".")[0] not in HEADS}
        self.dtype, self.gather, self.digests = dtype, gather, {}

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, name by name."""
        names: list[str] = []
        size = 0
        for name, shape in self.shapes.items():
            one = torch.Size(shape).numel() * self.dtype.itemsize
            if names and size + one > BUCKET:
                yield from zip(names, self.gather(names), strict=True)
                names, size = [], 0
            names.append(name)
            size += one
        yield from zip(names, self.gather(names), strict=True)

    def write(self, file: Path) -> None:
        """As one safetensors file: eight bytes with the length of a JSON header, the header, the numbers."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, shape in self.shapes.items():
            end = place + torch.Size(shape).numel() * self.dtype.itemsize
            header[name] = {"dtype": NAMES[self.dtype], "shape": list(shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.digests = {}
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in self.pieces():
                tensor = tensor.detach().cpu().contiguous()
                self.digests[name] = digest(tensor)
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


class Stored(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with self._opened() as opened:
            self.names = list(opened.keys())

    def __getitem__(self, name: str) -> Tensor:
        with self._opened() as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with safe_open(self.file, framework="pt") as opened:
            yield opened
