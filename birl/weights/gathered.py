"""Sharded weights for engines: gathered in buckets, written, and freed. No rank ever holds more of the full model than
one bucket."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from birl.learner.learner import Learner
from birl.models.digests import digest
from birl.models.heads import HEADS
from birl.models.released import Part, buffers, nbytes, parts, reverted, shapes_of
from birl.parallel.layout import drop_gathered

BUCKET = 2**28  # bytes that are gathered at once, unless a single weight is larger
NAMES = {  # dtype names of safetensors
    **{torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"},
}


@torch.no_grad()
def gathered(learner: Learner, names: Sequence[str], dtype: torch.dtype, leads: bool) -> list[Tensor]:
    """(every rank) Weights in the engines' dtype, full on the rank that `leads`, nothing on the others."""
    drop_gathered(learner.outputs)
    parameters, result = dict(learner.model.named_parameters()), []
    for name in names:
        weight = parameters[name].to(dtype)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if leads:
            result.append(whole.to(learner.device))
    return result


class Gathered:
    """The full weights of a sharded model. `gather(names)` returns these parameters in the engines' `dtype`, from all
    ranks, in the given order. They are sent by the module's names, or `originally` by those of the model's own files
    (`released.py`). `digests` are those of the weights written or measured last."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        gather: Callable[[Sequence[str]], list[Tensor]],
        originally: bool = False,
    ) -> None:
        self.model, self.gather, self.originally, self.digests = model, gather, originally, {}
        shapes = {n: (tuple(p.shape), dtype) for n, p in model.named_parameters() if n.split(".")[0] not in HEADS}
        self.buffers = buffers(model) if originally else {}  # on every rank
        shapes |= shapes_of(self.buffers)
        self.parts = parts(model, shapes) if originally else [Part([n], {n: one}) for n, one in shapes.items()]
        self.shapes = {name: one for part in self.parts for name, one in part.shapes.items()}
        self._part = {name: part for part in self.parts for name in part.shapes}
        self._rest: dict[str, Tensor] = {}  # gathered tensors that were not taken yet

    def take(self, names: Sequence[str]) -> list[Tensor]:
        """These weights, by the names that are sent. Other tensors made of the same parameters are kept until they are
        taken, so that a layer's experts are gathered once for all of its buckets."""
        new = {id(part): part for name in names if name not in self._rest for part in (self._part[name],)}
        self._rest |= self._gathered(list(new.values()))
        return [self._rest.pop(name) for name in names]

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """All current weights, name by name."""
        self._rest = {}
        several: list[Part] = []
        size = 0
        for part in self.parts:
            one = nbytes(part.shapes, part.shapes)
            if several and size + one > BUCKET:
                yield from self._in_order(several)
                several, size = [], 0
            several.append(part)
            size += one
        yield from self._in_order(several)

    def _in_order(self, several: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        tensors = self._gathered(several)
        for part in several:
            for name in part.shapes:
                yield name, tensors.pop(name)

    def _gathered(self, several: Sequence[Part]) -> dict[str, Tensor]:
        """Gathered weights of these parts, by the names that are sent."""
        names = [name for part in several for name in part.names if name not in self.buffers]
        result = dict(zip(names, self.gather(names), strict=True)) if names else {}
        result |= {n: self.buffers[n] for part in several for n in part.names if n in self.buffers}
        return reverted(self.model, result) if self.originally else result

    def measure(self) -> None:
        """Set `digests` from the current weights."""
        self.digests = {name: digest(tensor) for name, tensor in self.pieces()}

    def write(self, file: Path) -> None:
        """Write one safetensors file: eight bytes with the length of a JSON header, the header, the data."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, (shape, dtype) in self.shapes.items():
            end = place + nbytes([name], self.shapes)
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
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
    """The tensors of a safetensors file, each read on access."""

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
