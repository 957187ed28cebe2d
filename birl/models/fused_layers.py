"""Fused decoder layers, configured from transformers' modules: one kind of layer with options.

    h = norm(x)   q, k, v = h W   norms of q and k   rotary   attention   output projection   norm   scaled, + x

and the same for the feed-forward part. Every norm may be missing; both parts may read one norm. The layer's class
determines which module is which norm; heads, scales and windows are recorded from the layer's call of attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birl.models.fused import GEMMA, LLAMA, OLMO, Form, Heads, add_norm, normed_heads, on_gpu, rotary, swiglu
from birl.models.quantized import LINEAR, QuantizedLinear
from birl.models.slots import Witness
from birl.parallel.layout import local

# names of the norms before and after attention, and before and after the feed-forward part
PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")
LAYERS = dict.fromkeys(
    (
        *("LlamaDecoderLayer", "Qwen2DecoderLayer", "MistralDecoderLayer", "Qwen3DecoderLayer", "Phi3DecoderLayer"),
        *("GlmDecoderLayer", "GraniteDecoderLayer", "SmolLM3DecoderLayer", "Starcoder2DecoderLayer"),
        *("SeedOssDecoderLayer", "Qwen3MoeDecoderLayer", "MixtralDecoderLayer", "Glm4MoeDecoderLayer"),
        *("Qwen2MoeDecoderLayer", "OlmoeDecoderLayer"),
    ),
    PLAIN,
) | {
    "Gemma3DecoderLayer": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "Glm4DecoderLayer": (
        *("input_layernorm", "post_self_attn_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "Olmo2DecoderLayer": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "PhiDecoderLayer": ("input_layernorm", "", "", ""),
}
FORMS = {"Gemma3RMSNorm": GEMMA, "Olmo2RMSNorm": OLMO}
PAIRS = {"GlmDecoderLayer", "Glm4DecoderLayer"}  # adjacent elements are rotated together
ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}


@dataclass(frozen=True, slots=True)
class Joined:
    """Linear layers with the same input, computed as one product. In one process their weights are the rows of one
    tensor, which `join` makes once. FSDP gathers every weight into separate memory; then each layer writes its columns
    of the result, and only these weights are kept for the backward pass. Quantised ones stay separate layers. T tokens,
    K inputs, N outputs of each."""

    linears: Sequence[nn.Linear]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, sum of N]."""
        if len(self.linears) == 1:
            return self.linears[0](x)
        if self.quantized:
            return torch.cat([m(x) for m in self.linears], -1)
        weights, biases = self.tensors()
        if whole(weights) is None:
            return cast(Tensor, _Products.apply(x, len(weights), *weights, *biases))
        bias = torch.cat(biases) if biases and whole(biases) is None else _Whole.apply(*biases) if biases else None
        return F.linear(x, cast(Tensor, _Whole.apply(*weights)), cast(Tensor | None, bias))

    @property
    def quantized(self) -> bool:
        return any(isinstance(m, QuantizedLinear) for m in self.linears)

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases; this rank's parts of DTensors."""
        weights: list[Tensor] = [local(m.weight) for m in self.linears]
        return weights, [local(m.bias) for m in self.linears if m.bias is not None]  # pyright: ignore

    @torch.no_grad()
    def join(self) -> None:
        """Move the weights, and the biases, to one tensor, if they are not in one. The parameters stay the same
        objects, at other addresses."""
        for tensors in self.tensors() if len(self.linears) > 1 and not self.quantized else ():
            if tensors and whole(tensors) is None:
                rows = torch.cat([t.detach() for t in tensors]).split([len(t) for t in tensors])
                for tensor, part in zip(tensors, rows, strict=True):
                    tensor.data = part


def whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose consecutive rows these are, or None."""
    first, rows = tensors[0].detach(), 0
    place = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata and tensor.dtype == first.dtype
        if not same or tensor.storage_offset() != place or not tensor.is_contiguous():
            return None
        rows, place = rows + len(tensor), place + tensor.numel()
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class _Whole(torch.autograd.Function):
    """`torch.cat` of adjacent parts of one tensor, without a copy."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.rows = [len(t) for t in tensors]
        result = whole(tensors)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0].split(ctx.rows)


class _Products(torch.autograd.Function):
    """x W' + b of each weight, as columns of one result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *tensors: Tensor) -> Tensor:
        weights, biases = tensors[:count], tensors[count:]
        ctx.save_for_backward(x, *weights)
        ctx.columns, ctx.biased = [len(w) for w in weights], len(biases)
        result = x.new_empty(len(x), sum(ctx.columns))
        for i, (weight, part) in enumerate(zip(weights, result.split(ctx.columns, 1), strict=True)):
            if biases:
                torch.addmm(biases[i], x, weight.T, out=part)
            else:
                torch.mm(x, weight.T, out=part)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        parts = grads[0].split(ctx.columns, 1)
        by_x = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            by_x.addmm_(part, weight)
        by_weight = [p.T @ x if ctx.needs_input_grad[2 + i] else None for i, p in enumerate(parts)]
        return by_x, None, *by_weight, *(p.sum(0) for p in parts[: ctx.biased])


@dataclass(slots=True)
class FeedForward:
    """A gated feed-forward part, or the module itself: experts, or two matrices."""

    module: Any
    gate_up: Joined | None
    gelu: bool

    @classmethod
    def of(cls, module: Any, activation: str) -> "FeedForward":
        gated = getattr(module, "gate_up_proj", None), getattr(module, "gate_proj", None)
        if activation not in ACTIVATIONS or not any(isinstance(m, nn.Linear) for m in gated):
            return cls(module, None, False)
        linears = [gated[0]] if gated[0] is not None else [module.gate_proj, module.up_proj]
        return cls(module, Joined(cast(Any, linears)), ACTIVATIONS[activation])

    def __call__(self, h: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, H] -> [T, H]. `enter`: applied before a product whose outputs are split over ranks; a module that is
        called whole does it itself."""
        if self.gate_up is None:
            return self.module(h[None])[0]
        return self.module.down_proj(swiglu(self.gate_up(enter(h)), self.gelu))


@dataclass(slots=True)
class Layer:
    index: int
    norms: tuple[Any, Any, Any, Any]  # as in LAYERS
    qkv: Joined
    head_norms: tuple[Any, Any] | None  # of queries and keys
    output: nn.Linear
    feed_forward: FeedForward
    heads: int
    kv_heads: int
    scale: float
    window: int | None
    rope: str | None  # kind of rotary angles; None: no rotary embedding
    pairs: bool
    parallel: bool  # both parts read the first norm
    multiplier: float  # factor of both parts' outputs

    @classmethod
    def of(cls, index: int, module: Any, config: Any, seen: Witness, ways: int = 1) -> "Layer":
        """`ways`: ranks that split its heads."""
        attention, name, slot = module.self_attn, type(module).__name__, seen.slots[index]
        together = getattr(attention, "qkv_proj", None)
        norms = [getattr(module, n) if n else None for n in LAYERS[name]]
        head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        activation = getattr(config, "hidden_act", None) or config.hidden_activation
        by_kind = hasattr(attention, "layer_type") and name == "Gemma3DecoderLayer"
        return cls(
            index=index,
            norms=(norms[0], norms[1], norms[2], norms[3]),
            qkv=Joined([together] if together else [attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norms=None if head_norms[0] is None else head_norms,
            output=attention.dense if name == "PhiDecoderLayer" else attention.o_proj,
            feed_forward=FeedForward.of(module.mlp, activation),
            heads=slot.heads // ways,
            kv_heads=slot.kv_heads // ways,
            scale=seen.scales[index],
            window=seen.windows[index],
            rope=None if not getattr(attention, "use_rope", True) else attention.layer_type if by_kind else "",
            pairs=name in PAIRS,
            parallel=name == "PhiDecoderLayer",
            multiplier=getattr(module, "residual_multiplier", 1.0),
        )

    def join(self) -> None:
        """Move each group of joined weights to one tensor."""
        self.qkv.join()
        if self.feed_forward.gate_up is not None:
            self.feed_forward.gate_up.join()


def constants(norm: Any) -> tuple[float, Form]:
    """Epsilon and form of an RMS norm."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon, FORMS.get(type(norm).__name__, LLAMA)


def normed(norm: Any, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """s = x + delta and its norm; without a norm s twice. [T, S]."""
    if norm is not None and not isinstance(norm, nn.LayerNorm):
        return add_norm(x, delta, norm.weight, *constants(norm))
    total = x if delta is None else x + delta
    return total, total if norm is None else norm(total)


def placed(layer: Layer, qkv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries and keys with norms, if any, of each head or all heads of a row, and rotary embedding: [T, heads + 2
    kv_heads, D] -> the same."""
    heads, kv_heads, norms = layer.heads, layer.kv_heads, layer.head_norms
    if norms is not None:
        by_head = norms[0].weight.numel() == qkv.shape[2] and layer.rope is not None and not layer.pairs
        if by_head and on_gpu(qkv):
            how = Heads(kv_heads, *constants(norms[0]))
            return normed_heads(qkv, norms[0].weight, norms[1].weight, cosine, sine, how)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        rows = [part.reshape(-1, norm.weight.numel()) for norm, part in zip(norms, (q, k), strict=True)]
        q, k = (
            normed(norm, x)[1].view(-1, n, qkv.shape[2])
            for norm, x, n in zip(norms, rows, (heads, kv_heads), strict=True)
        )
        qkv = torch.cat([q, k, v], 1)
    return qkv if layer.rope is None else rotary(qkv, cosine, sine, heads + kv_heads, layer.pairs)


def fused_layers(model: nn.Module) -> bool:
    """Whether all layers are of a kind in LAYERS, and have nothing that a fused layer does not compute."""
    body: Any = cast(Any, model).base_model
    config = cast(Any, model).config.get_text_config()
    known = {"embed_tokens", "layers", "norm", "final_layernorm", "rotary_emb", "embed_dropout"}
    linears = [m for m in body.layers.modules() if isinstance(m, nn.Linear)]
    return (
        all(type(m).__name__ in LAYERS for m in body.layers)
        and {name for name, _ in body.named_children()} <= known
        and all(type(m) in LINEAR for m in linears)
        and len({p.dtype for p in model.parameters()}) == 1
        and not getattr(config, "qk_layernorm", False)  # of Phi
        and getattr(config, "clip_qkv", None) is None  # of OLMoE
    )
