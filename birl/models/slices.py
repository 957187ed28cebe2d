"""Sharded model loading: shapes first, then each rank's slices of the weights.

    sketched(folder)     all parameters on the meta device, buffers real; a folder that does not fit is refused here
    ... `parallel/shard.py` splits the parameters over the ranks ...
    fill(model)          each parameter gets memory, and this rank's part is read from the safetensors files

No rank ever holds the whole model, or reads more than its slices. A weight may be composed of several tensors in the
files, each a box in it: transformers fuses the experts of mixture-of-experts models.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from birl.errors import BirlError
from birl.models import attention, load
from birl.models.device import device_of
from birl.models.heads import HEADS
from birl.models.quantized import QuantizedLinear, quantized_layers

ROWS = 4096  # of two stored weights that are compared at once
ROUTERS = {"gate", "router", "shared_expert_gate"}  # of experts: small, and the last bit decides routing


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor in a file, and its place in a parameter: from `start`, of `shape`."""

    file: Path
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    stored: tuple[int, ...]  # shape in the file, which may lack a first dimension of 1
    turned: tuple[int, int] | None = None  # dimensions that are swapped in the parameter


@dataclass(frozen=True, slots=True)
class Pending:
    """Input of `fill`: for each parameter or buffer its boxes, and the target device."""

    boxes: dict[str, list[Box]]
    device: torch.device


def sketched(
    folder: Path,
    device: torch.device,
    beside: AbstractSet[str] = frozenset(),
    without: AbstractSet[str] = frozenset(),
    *,
    pictures: bool = False,
) -> nn.Module:
    """`load_model` without the weights. Raises `BirlError` for what that would refuse."""
    load.check_files(folder)
    try:
        model = _built(AutoConfig.from_pretrained(folder, trust_remote_code=False), pictures)
    except Exception as error:
        raise load.not_loadable(folder, error) from error
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    targets = _targets(model)
    boxes, unexpected = _boxes(folder, model, targets)
    names = {id(t): n for n, t in targets.items()}
    missing = {names[id(t)] for t in targets.values()} - {names[id(targets[n])] for n in boxes} - without
    mismatched = {
        (name, _extent(pieces), tuple(targets[name].shape))
        for name, pieces in boxes.items()
        if _extent(pieces) != tuple(targets[name].shape)
    }
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    report = {
        "missing_keys": missing,
        "unexpected_keys": {k for k in unexpected - beside if not any(p.search(k) for p in ignored)},
        "mismatched_keys": mismatched,
    }
    load.check_report(folder, model, report)
    check_ties(folder, targets, boxes)
    for name, tensor in model.named_buffers():
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._buffers[own] = tensor.to(device)
    model.pending = Pending(boxes, device)
    return model.eval()


def check_ties(folder: Path, targets: dict[str, Tensor], boxes: dict[str, list[Box]]) -> None:
    """Raise `BirlError` if a tied weight is stored with other values than the weight that it is tied to."""
    first: dict[int, str] = {}
    read = _reads()
    for name in boxes:
        other = first.setdefault(id(targets[name]), name)
        if other != name and not _same(boxes[name][0], boxes[other][0], read):
            raise load.two_values(folder, *sorted((name, other)))


def _same(one: Box, other: Box, read: "Read") -> bool:
    rows = (slice(i, i + ROWS) for i in range(0, one.shape[0], ROWS))
    return all(torch.equal(read(one.file, one.key, (r,)), read(other.file, other.key, (r,))) for r in rows)


def sketched_reward_model(folder: Path, device: torch.device) -> nn.Module:
    """`load_reward_model` without the weights, except for those of the head, a single row."""
    weight = load.reward_head(folder)
    return load.with_head(sketched(folder, device, **load.REWARD_MODEL), weight)


@torch.no_grad()
def fill(model: nn.Module, offload: bool = False) -> bool:
    """Give every parameter on the meta device memory (of the CPU with `offload`) and its values; for a DTensor this
    rank's part. Returns False for a model that has its weights."""
    pending: Pending | None = getattr(model, "pending", None)
    if pending is None:
        return False
    device = torch.device("cpu") if offload else pending.device
    made: dict[int, nn.Parameter] = {}
    boxes = {id(t): pending.boxes[n] for n, t in _targets(model).items() if n in pending.boxes}
    read = _reads()
    for module in list(model.modules()):
        for name, old in list(module._parameters.items()):
            if old is None or not old.is_meta or (name == "weight" and isinstance(module, QuantizedLinear)):
                continue
            if id(old) not in made:
                made[id(old)] = _made(old, device, boxes.get(id(old), ()), read)
            module._parameters[name] = made[id(old)]
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) in boxes:
                _read(buffer, (0,) * buffer.ndim, boxes[id(buffer)], read)
    model.pending = None  # pyright: ignore
    return True


def values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of each parameter, sorted by name and one at a time: gathered from the ranks, or, for a
    model without weights, read from the files; quantised ones in float32."""
    pending: Pending | None = getattr(model, "pending", None)
    known = {} if pending is None else pending.boxes
    boxes = {id(t): known[n] for n, t in _targets(model).items() if n in known}
    quantized, read = quantized_layers(model), _reads()
    for name, parameter in sorted(model.named_parameters()):
        if name in quantized:
            yield name, quantized[name].values()
        elif isinstance(parameter, DTensor):
            yield name, parameter.full_tensor()
        elif parameter.is_meta:
            value = torch.zeros(parameter.shape, dtype=parameter.dtype)
            _read(value, (0,) * value.ndim, boxes.get(id(parameter), ()), read)
            yield name, value
        else:
            yield name, parameter


def quantizable(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of attention and feed-forward parts, by name: all except heads, routers and empty ones."""
    head = model.get_output_embeddings()  # pyright: ignore
    return {
        name: m
        for name, m in model.named_modules()
        if type(m) is nn.Linear and m is not head and name not in HEADS and name.rpartition(".")[2] not in ROUTERS
        if 0 not in m.weight.shape
    }


def quantize(model: nn.Module, kind: str) -> nn.Module:
    """Replace the weights of these layers by codes (`models/quantized.py`), one after another, so that at most one of
    them exists in float32; a model without weights gets all other weights. Raises `BirlError`."""
    linears, device = quantizable(model), device_of(model)
    for name, value in values(model):
        layer = name.removesuffix(".weight")
        if layer in linears:
            parent, _, own = layer.rpartition(".")
            setattr(model.get_submodule(parent), own, QuantizedLinear(linears[layer], value, kind, device))
    fill(model)
    return model


def _built(config: Any, pictures: bool = False) -> Any:
    """The model with its parameters on the meta device. Its buffers are computed: no file has the rotary
    frequencies."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    how = attention.named(config)
    options: Any = {"dtype": torch.float32, "attn_implementation": how, "trust_remote_code": False}
    with load.quiet():  # one thread at a time
        nn.Module.register_parameter = on_meta  # pyright: ignore
        try:
            model = load.model_class(config, pictures).from_config(config, **options)
        finally:
            nn.Module.register_parameter = register
    model.tie_weights()
    load.keep_angles(model)
    return model


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, by every name that they have: tied ones have several."""
    kept = model.state_dict(keep_vars=True).keys()
    result = dict(model.named_parameters(remove_duplicate=False))
    return result | {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in kept}


def _boxes(folder: Path, model: Any, targets: dict[str, Tensor]) -> tuple[dict[str, list[Box]], set[str]]:
    """Name -> the tensors in the files that it is composed of; and the tensors that belong to no parameter."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    result: dict[str, list[Box]] = {}
    parts: dict[str, list[tuple[int, int, Path, str, tuple[int, ...]]]] = {}
    unexpected: set[str] = set()
    for file, key, shape in _stored(folder):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name not in targets:
            unexpected.add(key)
        elif pattern is None:
            result[name] = [Box(file, key, (0,) * len(shape), shape, shape)]
        elif turned := _turned(converters, pattern):
            same = shape == tuple(targets[name].shape)
            own = shape if same else swapped(shape, turned)
            result[name] = [Box(file, key, (0,) * len(shape), own, shape, None if same else turned)]
        else:
            which, experts = _source(converters, pattern)
            expert = int(re.findall(r"\.(\d+)\.", key)[-1]) if experts else -1
            parts.setdefault(name, []).append((expert, which, file, key, shape))
    model._weight_conversions = [m for m in mapping if m.was_used()]  # for saving with transformers
    for name, tensors in parts.items():
        place = 0
        for expert, which, file, key, shape in sorted(tensors, key=lambda t: t[:2]):
            place = 0 if which == 0 else place
            whole = (1, *shape) if expert >= 0 else shape
            start = (expert, place, 0) if expert >= 0 else (place, *[0] * (len(shape) - 1))
            result.setdefault(name, []).append(Box(file, key, start, whole, shape))
            place += shape[0]
    return result, unexpected


def _turned(converters: Sequence[WeightConverter], pattern: str) -> tuple[int, int] | None:
    """The dimensions of a converter that only swaps two dimensions if the file's shape differs; None for others."""
    for converter in converters:
        if pattern in converter.source_patterns and len(converter.operations) == 1:
            operation = converter.operations[0]
            if isinstance(operation, Transpose) and operation.check_dims:
                return operation.dim0, operation.dim1
    return None


def swapped(items: Sequence[Any], dims: tuple[int, int]) -> tuple[Any, ...]:
    result, (a, b) = list(items), dims
    result[a], result[b] = items[b], items[a]
    return tuple(result)


def _source(converters: Sequence[WeightConverter], pattern: str) -> tuple[int, bool]:
    """Which of a converter's sources a pattern is, and whether it is of experts. Raises `BirlError` for a converter
    that does more than stack experts, and concatenate projections or convolutions."""
    for converter in converters:
        if pattern in converter.source_patterns:
            kinds = [(type(o), o.dim) for o in converter.operations if isinstance(o, MergeModulelist | Concatenate)]
            plain = len(kinds) == len(converter.operations)
            experts = [(MergeModulelist, 0)]
            if plain and kinds in (experts, [*experts, (Concatenate, 1)], [(Concatenate, 0)]):
                return converter.source_patterns.index(pattern), kinds[:1] == experts
    raise BirlError(
        f"The weights {pattern} are stored otherwise than the model has them, in a way that cannot be read in parts. "
        "Save the model with transformers first (from_pretrained, then save_pretrained(save_original_format=False)), "
        "or set parallel.fsdp=1."
    )


def _stored(folder: Path) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """Every tensor in the model's files: file, name, shape."""
    for file in load.weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  safetensors' file is no mapping
                yield file, key, tuple(opened.get_slice(key).get_shape())


def _extent(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape that boxes cover together."""
    return tuple(max(b.start[d] + b.shape[d] for b in boxes) for d in range(len(boxes[0].start)))


def _made(old: Tensor, device: torch.device, boxes: Sequence[Box], read: "Read") -> nn.Parameter:
    """A parameter that replaces one on the meta device. Zeros where the files have no values."""
    if isinstance(old, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, start = compute_local_shape_and_global_offset(old.shape, old.device_mesh, old.placements)
        local = torch.zeros(shape, dtype=old.dtype, device=device)
        new: Tensor = DTensor(local, old._spec, requires_grad=False)
    else:
        start = (0,) * old.ndim
        new = local = torch.zeros(old.shape, dtype=old.dtype, device=device)
    _read(local, start, boxes, read)
    return nn.Parameter(new, requires_grad=old.requires_grad)


# file, name, slices -> values
Read = Callable[[Path, str, tuple[slice, ...]], Tensor]


def _read(into: Tensor, start: Sequence[int], boxes: Sequence[Box], read: Read) -> None:
    """Copy the boxes' values into the region that begins at `start` and has the shape of `into`."""
    for box in boxes:
        low = [max(a, b) for a, b in zip(start, box.start, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(start, into.shape, box.start, box.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        there = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, box.start, strict=True))
        here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
        extra = len(box.shape) - len(box.stored)
        piece = read(box.file, box.key, swapped(there, box.turned) if box.turned else there[extra:])
        piece = piece.transpose(*box.turned) if box.turned else piece
        into[here].copy_(piece.view(into[here].shape))


def _reads() -> Read:
    """Returns a reader of slices that keeps one file open at a time, so that at most one is mapped."""
    opened = lru_cache(maxsize=1)(lambda file: safe_open(file, framework="pt"))

    def read(file: Path, key: str, where: tuple[slice, ...]) -> Tensor:
        result: Any = opened(file)
        return result.get_slice(key)[where] if where else result.get_tensor(key)

    return read
