"""Weights by the names of the model's own files, which engines of other projects know, as transformers'
`save_pretrained` writes them: a module may have another name for a tensor, or hold together what they have one by one,
such as the experts of a layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of a module, by name, and the shapes of those that they become together, by the names that are sent."""

    names: Sequence[str]
    shapes: Shapes


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def nbytes(names: Iterable[str], shapes: Shapes) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in map(shapes.__getitem__, names))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that files have, such as what a router adds to its scores. Training changes none of them."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: b for name, b in model.named_buffers() if name in kept}


def reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the module by their names -> tensors of the files by theirs."""
    return revert_weight_conversion(cast(Any, model), tensors)


def parts(model: nn.Module, shapes: Shapes) -> list[Part]:
    """The smallest that `reverted` takes by themselves, of tensors with these names in the module."""
    sketch = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    files = reverted(model, sketch)
    names, rest = {id(tensor): name for name, tensor in files.items()}, shapes_of(files)
    result, joined = [], []
    for name, tensor in sketch.items():
        same = names.get(id(tensor))
        own = shapes_of({same: tensor} if same else reverted(model, {name: tensor}))
        if own.items() <= rest.items():
            result.append(Part([name], own))
            for sent in own:
                del rest[sent]
        else:  # it is a piece of a tensor in the files
            joined.append(name)
    return [*result, Part(joined, rest)] if joined else result
