"""Decoders of Llama's shape on CUDA: transformers' arithmetic over the module's own parameters, in fewer kernels.

Four products a layer (queries, keys and values in one; gate and up in one), and what is between them fused
(`fused.py`). Autograd does the backward pass. The engine and the learner both go through `FusedDecoder.hidden_states`,
so they differ only where attention does: pages there, packed trees here. Any other architecture, and a machine without
Triton, runs through transformers' forward (`forward.py` decides).

Shapes: T tokens, H hidden size, I inner size, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from birl.models.attention import Layout
from birl.models.decoder import head_dim, llama_shaped
from birl.models.fused import add_norm, has_triton, power_of_two, rotary, swiglu

MADE: "WeakKeyDictionary[nn.Module, FusedDecoder | None]" = WeakKeyDictionary()


@dataclass(slots=True)
class Joined:
    """Linear layers with one input as one product. While `steady`, from a copy whose address never changes."""

    linears: Sequence[nn.Linear]
    weight: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor, copied: bool) -> Tensor:
        """[T, K] -> [T, sum of N]."""
        if copied:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        weights: list[Tensor] = [m.weight for m in self.linears]
        biases: list[Tensor] = [m.bias for m in self.linears if m.bias is not None]
        return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)

    def copy(self) -> None:
        weights = [m.weight.detach() for m in self.linears]
        biases = [m.bias.detach() for m in self.linears if m.bias is not None]
        if self.weight is None or self.weight.dtype != weights[0].dtype:
            self.weight = torch.cat(weights)
            self.bias = torch.cat(biases) if biases else None
            return
        torch.cat(weights, out=self.weight)
        if self.bias is not None:
            torch.cat(biases, out=self.bias)


@dataclass(slots=True)
class Layer:
    index: int
    norm1: Any
    qkv: Joined
    output: nn.Linear
    norm2: Any
    gate_up: Joined
    down: nn.Linear
    heads: int
    kv_heads: int
    scale: float


class FusedDecoder:
    """It owns no parameters, only the copies for generation. It must not hold the model itself: `MADE` would then keep
    that alive for ever."""

    def __init__(self, model: nn.Module, checkpointing: bool = False) -> None:
        self.body: Any = cast(Any, model).base_model
        self.head: nn.Module = cast(Any, model).get_output_embeddings()
        self.size = head_dim(model)
        self.layers = [self._layer(i, module) for i, module in enumerate(self.body.layers)]
        self.checkpointing = checkpointing
        self.copied = False  # within `steady`
        self.fresh = False  # the copies are those of the present weights

    def _layer(self, index: int, module: Any) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        return Layer(
            index=index,
            norm1=module.input_layernorm,
            qkv=Joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            output=attention.o_proj,
            norm2=module.post_attention_layernorm,
            gate_up=Joined([mlp.gate_proj, mlp.up_proj]),
            down=mlp.down_proj,
            heads=attention.q_proj.out_features // self.size,
            kv_heads=attention.k_proj.out_features // self.size,
            scale=attention.scaling,
        )

    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Last hidden state of each token, normed: tokens [T], positions [T] -> [T, H]."""
        x = F.embedding(tokens, self.body.embed_tokens.weight)
        cosine, sine = self.rotations(x, positions)
        delta: Tensor | None = None
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x, delta = checkpoint(self.forward, layer, x, delta, cosine, sine, layout, use_reentrant=False)  # pyright: ignore
            else:
                x, delta = self.forward(layer, x, delta, cosine, sine, layout)
        norm = self.body.norm
        return add_norm(x, delta, norm.weight, norm.variance_epsilon)[1]

    def forward(
        self, layer: Layer, x: Tensor, delta: Tensor | None, cosine: Tensor, sine: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is x + delta, in and out; the next norm adds them."""
        x, h = add_norm(x, delta, layer.norm1.weight, layer.norm1.variance_epsilon)
        qkv = layer.qkv(h, self.copied).view(len(x), -1, self.size)
        qkv = rotary(qkv, cosine, sine, layer.heads + layer.kv_heads)
        q, k, v = (part.transpose(0, 1)[None] for part in qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], 1))
        attended = layout.attend(layer.index, q, k, v, layer.scale, None)[0].flatten(1)
        x, h = add_norm(x, F.linear(attended, layer.output.weight), layer.norm2.weight, layer.norm2.variance_epsilon)
        return x, F.linear(swiglu(layer.gate_up(h, self.copied)), layer.down.weight)

    def rotations(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D / 2] in x's type, from the model's own module."""
        cosine, sine = self.body.rotary_emb(x, positions[None])
        half = self.size // 2
        return cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Within, the weights do not change: joined products read copies, which are renewed here if they must be."""
        if not self.fresh or self.layers[0].qkv.weight is None or self.layers[0].qkv.weight.dtype != self.dtype:
            with torch.no_grad():
                for layer in self.layers:
                    layer.qkv.copy()
                    layer.gate_up.copy()
            self.fresh = True
        self.copied = True
        try:
            yield
        finally:
            self.copied = False

    @property
    def dtype(self) -> torch.dtype:
        return self.body.embed_tokens.weight.dtype

    def addresses(self) -> tuple[int, ...]:
        """Of everything that a captured graph reads: all but the parameters that are copied."""
        copies = [t for m in self.layers for j in (m.qkv, m.gate_up) for t in (j.weight, j.bias) if t is not None]
        modules = (self.body, self.head)
        own = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return tuple(t.data_ptr() for t in (*copies, *own))


def fused_for(model: nn.Module) -> FusedDecoder | None:
    """The model on fused kernels, or None where they are not made for it."""
    if model not in MADE:
        MADE[model] = FusedDecoder(model) if fits(model) else None
    result = MADE[model]
    return result if result is not None and next(model.parameters()).is_cuda else None


def weights_changed(model: nn.Module) -> None:
    """The copies for generation are not those of the weights any more."""
    result = MADE.get(model)
    if result is not None:
        result.fresh = False


def fits(model: nn.Module) -> bool:
    body: Any = cast(Any, model).base_model
    if not (has_triton() and next(model.parameters()).is_cuda and hasattr(body, "layers") and len(body.layers)):
        return False
    size = head_dim(model)
    kind = getattr(body.rotary_emb, "rope_type", "default") if hasattr(body, "rotary_emb") else ""
    return (
        llama_shaped(model)
        and size == power_of_two(size)
        and 16 <= size <= 256
        and "dynamic" not in kind
        and kind != "longrope"  # both look at the positions' values, on the host
    )
