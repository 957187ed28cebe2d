"""Weights by the names in the model's checkpoint files, which other inference engines expect, as transformers'
`save_pretrained` writes them. A module may name a tensor differently, or fuse tensors that the files have one by one,
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
    """Tensors of a module that are converted together, and the shapes of the results, by the names that are sent."""

    names: Sequence[str]
    shapes: Shapes


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def nbytes(names: Iterable[str], shapes: Shapes) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in map(shapes.__getitem__, names))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that checkpoint files have, such as a router's score bias. Training does not change them."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: b for name, b in model.named_buffers() if name in kept}


def reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the module's tensors, by name, to the files' tensors and names."""
    return revert_weight_conversion(cast(Any, model), tensors)


def parts(model: nn.Module, shapes: Shapes) -> list[Part]:
    """The smallest sets of the module's tensors with these names that `reverted` can convert independently."""
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
        else:  # a piece of a tensor in the files
            joined.append(name)
    return [*result, Part(joined, rest)] if joined else result
