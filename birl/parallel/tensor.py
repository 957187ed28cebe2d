"""Tensor parallelism applied to a transformers model: every layer is split over the ranks of the axis `tp`.

    columns   q, k, v, gate, up: a rank has some rows of the weight [N, K], thus some heads or some inner features
    fused     several of these in one matrix: a rank stores some rows, and computes with its own of each of them
    rows      o, down: a rank has the columns that belong to those, and its output is a summand of the whole one
    tokens    embedding and head: a rank has a part of the vocabulary; tied, they stay one parameter
    heads     sinks of attention: a rank has those of its heads
    over      norms over all heads of a token: every rank gathers the others' heads, and keeps its own
    latent    what all heads of latent attention read: every rank has all of their weights, and computes them
    whole     layers that keep a state, for all tokens, and experts, for the tokens between the blocks: every rank has
              all of their weights

The parameters become DTensors over the axis, so that FSDP and checkpoints know the whole; a module computes with its
plain part. `regions.py` has the collectives between the split blocks, `models/logprobs.py` those after the head. Norms,
biases of `rows` and score heads are on every rank.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from fnmatch import fnmatch
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from birl.errors import BirlError
from birl.models import vision
from birl.models.logprobs import first_row
from birl.models.paged import Slot
from birl.models.slots import slots_of
from birl.models.states import CACHE, CCA
from birl.parallel.experts import experts_of
from birl.parallel.ranks import Ranks
from birl.parallel.regions import Regions, gather

# gathering a parameter that FSDP and tp shard along the same dimension takes two collectives; it warns each time
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# model types whose attention reads the number of heads from their config, not from the projections' output
FIXED = {"stablelm"}
WHOLE, FUSED, HEADS, OVER, LATENT = "whole", "fused", "heads", "over", "latent"
BY_HEAD = "replicated_with_grad_allreduce"
# fused layers, by the last name of a module -> the layer that takes their output
JOINED = {"gate_up_proj": "down_proj", "qkv_proj": "o_proj"}
# for models without a plan in transformers, by the last name of a module
PLAN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), "colwise"),
    **dict.fromkeys(("o_proj", "out_proj", "down_proj", "w2"), "rowwise"),
    **dict.fromkeys(("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"), BY_HEAD),
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), LATENT),
    **{"q_b_proj": "colwise", "kv_b_proj": "colwise", "input_linear": FUSED, "output_linear": "rowwise"},
}
#: transformers' names of other ways to split -> birl's: of matrices in `JOINED`; of others beside a norm of queries
GATHERED = {"colwise_gather_output": FUSED, "rowwise_split_input": "rowwise"}
NORMED = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise", "mla_kv_a_proj": LATENT}


def split(model: nn.Module, ranks: Ranks, regions: Regions) -> list[str]:
    """Split a model with whole weights, in place, before FSDP does. Returns the names of replicated parameters whose
    gradient is a summand on each rank (`ShardedMasterWeights` adds them up), as only a rank's own heads or tokens used
    them. A vision tower is replicated, and computed by all ranks. Raises `BirlError` for a model that cannot be
    split."""
    assert ranks.mesh is not None
    body: Any = vision.language_model(model) or cast(Any, model).base_model
    kinds = check(model, ranks.grid.tp)
    mesh = ranks.mesh["tp"]
    styles = {"colwise": Columns(), HEADS: Columns(), FUSED: Fused(), "rowwise": Rows(regions)}
    for path in (path for path, kind in kinds.items() if kind == FUSED):
        share(body.get_submodule(path.rpartition(".")[0]), body.get_submodule(path), mesh)
    parallelize_module(body, mesh, {path: styles[kind] for path, kind in kinds.items() if kind in styles})
    embedding, head = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(embedding, mesh, Vocabulary(regions))
    if tied:
        head.weight = embedding.weight
    parallelize_module(head, mesh, Columns())
    for block in {path.rpartition(".")[0] for path, kind in kinds.items() if kind in ("colwise", FUSED)}:
        body.get_submodule(block).register_forward_pre_hook(_entering(regions), with_kwargs=True)
    for norm in (body.get_submodule(path) for path, kind in kinds.items() if kind == OVER):
        over_heads(norm, regions.group)
    body.register_forward_hook(_ending(regions))
    if regions.sequence:
        for mixer in (m for _, m in body.named_modules() if keeps_state(m)):
            mixer.register_forward_pre_hook(_entering(regions), with_kwargs=True)
            mixer.register_forward_hook(_keeping(regions))
    within = [body.get_submodule(path) for path, kind in kinds.items() if kind not in (*styles, WHOLE)]
    inside = {id(p) for module in within for p in module.parameters()}
    between = [*body.parameters(), *vision.tower(model).values()] if regions.sequence else []
    inside |= {id(p) for p in between if not isinstance(p, DTensor)}
    return [name for name, p in model.named_parameters() if id(p) in inside]


def check(model: nn.Module, tp: int) -> dict[str, str]:
    """Return how each module is split (`plan`). Raises `BirlError` for a model that cannot be split over `tp` ranks;
    needs no weights."""
    body: Any = vision.language_model(model) or cast(Any, model).base_model
    slots = slots_of(model)
    if body.config.model_type in FIXED:
        raise BirlError(
            f"parallel.tp={tp}: the attention of {type(model).__name__} counts on all of its heads, of which a rank "
            "has a part. Set parallel.tp=1, and parallel.fsdp to split the weights."
        )
    kinds = plan(body, slots)
    if not {*kinds.values()} - {WHOLE}:
        raise BirlError(
            f"parallel.tp={tp}: birl knows no layers of {type(model).__name__} that ranks could share out. Set "
            "parallel.tp=1, and parallel.fsdp to split the weights."
        )
    inner = [body.get_submodule(path).in_features for path, kind in kinds.items() if kind == "rowwise"]
    sizes = [(s.heads, "query heads") for s in slots] + [(s.kv_heads, "key/value heads") for s in slots]
    sizes += [(size, "inner features") for size in inner]
    most = math.gcd(*(size for size, _ in sizes))
    for size, what in sizes:
        if size % tp:
            raise BirlError(
                f"parallel.tp={tp} does not divide the {size} {what} of this model ({body.config.model_type}), which "
                f"the ranks would have to share out. Set parallel.tp to a divisor of {most}, and parallel.fsdp for "
                "the rest."
            )
    return kinds


def plan(body: nn.Module, slots: Sequence[Slot]) -> dict[str, str]:
    """Path -> kind of each module of the layers that has parameters, except norms between the blocks: by transformers'
    own plan if it has one, else by `PLAN`. Raises `BirlError` for a module in neither."""
    own: dict[str, str] = getattr(body.config, "base_model_tp_plan", None) or {}
    wide = {(s.key,) for s in slots}
    over = {(n * s.key,) for s in slots for n in (s.heads, s.kv_heads)} - wide
    result: dict[str, str] = {}
    spread = {id(experts) for experts in experts_of(body)}
    unsplit = [
        f"{path}."
        for path, module in body.named_modules()
        if keeps_state(module) or any(id(child) in spread for child in module.children())
    ]
    for path, module in body.named_modules():
        shapes = [p.shape for p in module.parameters(recurse=False)]
        last = path.rpartition(".")[2]
        if not path.startswith("layers.") or not shapes:
            continue
        if f"{path}.".startswith(tuple(unsplit)):
            result[path] = WHOLE
            continue
        if [name for name, _ in module.named_parameters(recurse=False)] == ["sinks"]:
            result[path] = HEADS
            continue
        kind = next((k for pattern, k in own.items() if fnmatch(path, pattern)), PLAN.get(last))
        beside = {name for name, _ in body.get_submodule(path.rpartition(".")[0]).named_children()}
        joined = any(name in beside and last in (name, JOINED[name]) for name in JOINED)
        kind = (GATHERED if joined else NORMED if {"q_norm", "kv_a_layernorm"} & beside else {}).get(kind or "", kind)
        if kind == BY_HEAD and [tuple(shape) in over for shape in shapes] == [True]:
            kind = OVER
        if kind is None and all(len(shape) == 1 for shape in shapes) and path.count(".") == 2:
            continue  # a norm between the blocks
        matrix = kind in ("colwise", "rowwise", FUSED)
        vector = kind in (OVER, LATENT) or [tuple(shape) in wide for shape in shapes] == [True]
        if kind not in {*PLAN.values(), OVER} or not (isinstance(module, nn.Linear) if matrix else vector):
            raise BirlError(
                f"parallel.tp: {path} of {type(body).__name__} is nothing that birl can split over several ranks. Set "
                "parallel.tp=1, and parallel.fsdp to split the weights."
            )
        result[path] = kind
    return result


def keeps_state(module: nn.Module) -> bool:
    """Whether a module keeps a state, except if it computes attention's queries, which are split over ranks."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(CACHE) and CCA not in names


class Columns(ParallelStyle):
    """[N, K] by rows: a rank computes some outputs from all inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in dict(module.named_parameters(recurse=False)):
            place(module, name, 0, device_mesh)
        inner = module.forward

        def forward(*args: Any, **options: Any) -> Any:
            with parts(module):
                return inner(*args, **options)

        module.forward = forward
        return module


def share(block: Any, linear: nn.Module, mesh: DeviceMesh) -> None:
    """Set the sizes of the matrices in a fused layer, and this rank's number of heads in the attention module."""
    sizes = [cast(nn.Linear, linear).out_features // 2] * 2
    if linear is getattr(block, "qkv_proj", None):
        config = block.config = copy(block.config)  # of Phi-3, which reads the number of heads there
        heads = config.num_attention_heads, block.num_key_value_heads, block.num_key_value_heads
        sizes = [n * block.head_dim for n in heads]
        config.num_attention_heads, block.num_key_value_heads = (n // mesh.size() for n in heads[:2])
    cast(Any, linear).sizes = sizes


class Fused(ParallelStyle):
    """[N, K] of several matrices: a rank gathers the others' rows, and computes some outputs of each (`share`)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in dict(module.named_parameters()):
            place(module, name, 0, device_mesh)

        def own(parameter: DTensor | None) -> Tensor | None:
            if parameter is None:
                return None
            whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            pieces = whole.split(cast(Any, module).sizes)
            return torch.cat([piece.chunk(device_mesh.size())[device_mesh.get_local_rank()] for piece in pieces])

        def forward(x: Tensor) -> Tensor:
            linear = cast(Any, module)
            return nn.functional.linear(x, cast(Tensor, own(linear.weight)), own(linear.bias))

        module.forward = forward
        return module


class Rows(ParallelStyle):
    """[N, K] by columns: a rank computes a summand of all outputs from its inputs. The bias is added once, to the
    sum."""

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.regions = regions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place(module, "weight", 1, device_mesh)
        inner = module.forward

        def forward(x: Tensor) -> Tensor:
            with parts(module, without="bias"):
                total = self.regions.leave(inner(x))
            return total if module.bias is None else total + cast(Tensor, module.bias)

        module.forward = forward
        return module


class Vocabulary(ParallelStyle):
    """An embedding split by tokens: a rank looks up its own tokens, and returns zeros for the others."""

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.regions = regions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place(module, "weight", 0, device_mesh)
        module.padding_idx = None  # pyright: ignore  nothing is padded, and its index differs by rank
        inner = module.forward

        def forward(tokens: Tensor) -> Tensor:
            first = first_row(cast(DTensor, module.weight))
            with parts(module):
                own = tokens - first
                absent = (own < 0) | (own >= len(cast(Tensor, module.weight)))
                result = inner(own.masked_fill(absent, 0)).masked_fill(absent[..., None], 0.0)
            return self.regions.leave(result)

        module.forward = forward
        return module


def place(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Turn a replicated parameter into a DTensor sharded along `dim`."""
    old = module.get_parameter(name)
    if not isinstance(old, DTensor):
        new = distribute_tensor(old.data, mesh, [Shard(dim)], src_data_rank=None)  # without communication
        module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))


@contextmanager
def parts(module: nn.Module, without: str = "") -> Iterator[None]:
    """Context in which a module's parameters are this rank's plain shards, and `without` is None. Gradients go to the
    DTensors. No operator ever sees a DTensor, which would cost more than a small product."""
    parameters: dict[str, Any] = module._parameters  # FSDP has put the gathered ones there
    kept = dict(parameters)
    try:
        for name, parameter in kept.items():
            if name == without:
                parameters[name] = None
            elif isinstance(parameter, DTensor):
                parameters[name] = parameter.to_local()
        yield
    finally:
        parameters.update(kept)


def _entering(regions: Regions):
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        if args:
            return (regions.enter(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": regions.enter(kwargs["hidden_states"])}

    return hook


def _keeping(regions: Regions):
    """Return a hook that keeps this rank's tokens of an output that every rank has computed for all tokens."""

    def hook(mixer: nn.Module, args: tuple[Any, ...], output: Any):
        first, *rest = output if isinstance(output, tuple) else (output,)
        own = first.chunk(regions.group.size(), dim=-2)[regions.group.rank()]
        return (own, *rest) if isinstance(output, tuple) else own

    return hook


def over_heads(norm: nn.Module, group: ProcessGroup) -> None:
    """Give a norm of [..., heads * D] the heads of all ranks; each keeps its own of the result."""
    norm.register_forward_pre_hook(lambda _, args: gather(args[0].movedim(-1, 0), group).movedim(0, -1))
    norm.register_forward_hook(lambda _, args, output: output.chunk(group.size(), -1)[group.rank()])


def _ending(regions: Regions):
    def hook(body: nn.Module, args: tuple[Any, ...], output: Any):
        output.last_hidden_state = regions.end(output.last_hidden_state)
        return output

    return hook
