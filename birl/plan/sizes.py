"""Sizes that a run's memory follows from: of the model (`Module`), of its trained parameters (`Trained`), and of the
largest step (`Load`). They come from modules and configuration; the model may be on the meta device."""

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from birl import kernels
from birl.config import schema
from birl.kernels.tensors import PAGE
from birl.learner.adamw8bit import stored as moments_in_8_bits
from birl.learner.lora import targets
from birl.learner.muon import hidden
from birl.learner.policy import DTYPES
from birl.models.decoder import shaped
from birl.models.fused_layers import fused_layers
from birl.models.quantized import quantized_layers
from birl.models.shape import Shape
from birl.models.slices import quantizable
from birl.models.slots import slots_of, state_bytes
from birl.samples import LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The largest load of a step, if all answers have the maximum length."""

    microbatch: int  # tokens of the largest
    several: bool  # more than one in an update, so that later ones begin with the gradient of earlier ones
    sequences: int  # generated concurrently
    group: int  # number of these that share a prompt
    prompt: int  # tokens
    longest: int  # tokens of a sequence with its prompt
    support: int = 0  # size of the kept set of top-k, top-p or min-p; 0: no such limit
    waits: bool = False  # more sequences in a step than are generated concurrently


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A model as it is computed: numbers that only its modules know, and whether birl's kernels are used. `wide`: bytes
    of the compute type."""

    shape: Shape
    parameters: int
    linear: int  # parameters of matrix products, with the head
    kv_heads: int  # as the cache has them
    head_dim: int
    cached: int  # elements in the cache per token
    state: int  # bytes that layers keep per sequence beside the cache (recurrent state)
    wide: int
    on_kernels: bool
    paged_kernels: bool  # whether attention over the cache uses kernels
    on_fused: bool  # the kernels for CUDA
    quantizable: int  # parameters that lora.quantize applies to
    matrix: int  # size of the largest of these weights

    @classmethod
    def of(cls, model: nn.Module, dtype: str, gpu: bool = False) -> "Module":
        slots, kind = slots_of(model), DTYPES[dtype]
        size = max(s.key for s in slots)
        gpu = gpu or next(model.parameters()).is_cuda
        compiled = not gpu and kernels.load(kind, size) is not None
        weights: list[int] = [
            m.weight.numel() for m in (*quantized_layers(model).values(), *quantizable(model).values())
        ]
        return cls(
            shape=Shape.of_model(model),
            parameters=sum(p.numel() for p in model.parameters()),
            linear=sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
            kv_heads=max(s.kv_heads for s in slots),
            head_dim=size,
            cached=sum(s.elements for s in slots),
            state=state_bytes(model),
            wide=kind.itemsize,
            on_kernels=compiled and shaped(model),
            paged_kernels=compiled or gpu,
            on_fused=gpu and fused_layers(model),
            quantizable=sum(weights),
            matrix=max(weights, default=0),
        )

    @property
    def page(self) -> int:
        """Bytes of a page of the cache in all layers."""
        return PAGE * self.cached * self.wide

    @property
    def kept(self) -> int:
        """Bytes per token that a layer keeps for its backward pass: `Kept` in models/decoder.py, or what autograd keeps
        of transformers' layer."""
        rows = 2 * (self.shape.heads + self.kv_heads) * self.head_dim  # queries, keys, values and their result
        if self.on_kernels:
            return 8 * self.shape.hidden + 8 + self.wide * (rows + 2 * self.shape.inner) + 4 * self.shape.heads
        if self.on_fused:  # keys and values once more, gathered
            more = (self.shape.heads + 2 * self.kv_heads) * self.head_dim
            return self.wide * (4 * self.shape.hidden + rows + more + 3 * self.shape.inner) + 4 * (2 + self.shape.heads)
        return 8 * self.shape.hidden + self.wide * (4 * self.shape.hidden + rows + 4 * self.shape.inner)

    @property
    def input(self) -> int:
        """`kept` with checkpointing: the layer's input only. The residual stream of the kernels is float32."""
        return self.shape.hidden * (4 if self.on_kernels else self.wide)

    @property
    def backward(self) -> int:
        """Bytes per token of one layer's backward workspace."""
        return 4 * self.shape.hidden + self.wide * 4 * (self.shape.hidden + self.shape.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Numbers of parameters that are trained, that have a summed gradient, and that AdamW updates. They differ with
    LoRA: of the merged weights only the largest has a whole gradient at once. `state`: bytes of AdamW's moments."""

    weights: int
    gradient: int
    stepped: int
    state: int
    head: bool  # has a gradient

    @classmethod
    def of(cls, model: nn.Module, config: schema.Lora, optimizer: str) -> "Trained":
        moments = moments_in_8_bits if optimizer == "adamw8bit" else (lambda shape: 8 * prod(shape))
        if config.rank == 0:
            shapes = [p.shape for p in model.parameters()]
            everything, state = sum(map(prod, shapes)), sum(map(moments, shapes))
            if optimizer == "muon":  # one momentum
                matrices = hidden(model)
                state -= sum(4 * p.numel() for name, p in model.named_parameters() if name in matrices)
            return cls(weights=everything, gradient=everything, stepped=everything, state=state, head=True)
        weights: list[Any] = [model.get_submodule(name).weight for name in targets(model, config.targets)]
        shapes = [s for w in weights for s in ((config.rank, w.shape[1]), (len(w), config.rank))]
        shapes += [(len(w),) for w in weights if config.dora]
        sizes, stepped, state = [w.numel() for w in weights], sum(map(prod, shapes)), sum(map(moments, shapes))
        return cls(weights=sum(sizes), gradient=stepped + max(sizes), stepped=stepped, state=state, head=False)


def load_of(config: schema.RL, prompt: int, longest: int) -> Load:
    """The load of one process. `prompt`: tokens of a prompt; `longest`: of a sequence, validation included."""
    rollout, parallel = config.rollout, config.parallel
    groups = -(-rollout.prompts // config.algorithm.updates_per_batch)  # of one update
    tokens = -(-groups // parallel.shares) * (prompt + rollout.group_size * rollout.max_tokens)
    tokens = -(-tokens // parallel.splits)
    count = -(-tokens // config.learner.tokens_per_microbatch)
    validates = config.validation.every > 0 and (config.data.validation or config.data.validation_split > 0)
    ahead = rollout.max_staleness - config.weights.sync_every + 2  # steps whose groups are in progress at once
    wanted = ahead * -(-rollout.prompts // parallel.shares) * rollout.group_size
    sequences = min(config.engine.max_batch, wanted)
    truncates = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    return Load(
        microbatch=-(-tokens // count),
        several=count > 1,
        sequences=config.engine.max_batch if validates else sequences,
        group=1 if validates else rollout.group_size,
        prompt=prompt,
        longest=longest,
        support=(rollout.top_k or LARGEST) if truncates else 0,
        waits=wanted > sequences,
    )
