"""Decoders of Llama's architecture (Llama, SmolLM, Qwen2, Mistral without a window) on birl's kernels, for the CPU.

The same arithmetic as transformers' module, over the module's own parameters, with three differences: the residual
stream stays float32, a layer's backward pass is hand-written to keep few activations and recompute the others, and
every row's bits depend only on that row's sequence. So the log-probs that the engine samples with are the learner's,
bit for bit, in bfloat16 too. Any other architecture runs through transformers' forward (`models/forward.py` decides).

    x -> norm -> q k v -> rotary -> attention -> output projection -> + x -> norm -> gate, up -> swiglu -> down -> +

Shapes: T tokens, H hidden size, I inner size, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from birl import kernels
from birl.kernels import Kernels
from birl.kernels.tensors import CODES
from birl.models.attention import Packed, RowLayout
from birl.models.low_rank import active_in
from birl.models.matrix import LastingMemory, Matrix, deposit, gradient_place, unless_placed
from birl.models.paged import Cache, Paged
from birl.models.quantized import LINEAR

MADE: "WeakKeyDictionary[nn.Module, tuple[tuple[torch.dtype, torch.device], Decoder | None]]" = WeakKeyDictionary()
LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "MistralDecoderLayer"}


@dataclass(slots=True)
class Layer:
    """The parameters of one decoder layer, and its attention's heads."""

    index: int
    norm1: Any
    qkv: Matrix
    output: Matrix
    norm2: Any
    gate_up: Matrix
    down: Matrix
    heads: int
    kv_heads: int
    scale: float

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def parameters(self) -> list[Tensor]:
        """In the order of `Decoder.backward`."""
        return [self.norm1.weight, self.norm2.weight, *(p for matrix in self.matrices for p in matrix.parameters())]


@dataclass(slots=True)
class Kept:
    """Activations that a layer's forward pass saves for its backward pass; with checkpointing only `x`."""

    x: Tensor  # [T, H] float32, before the layer
    middle: Tensor  # after attention
    rstd1: Tensor
    rstd2: Tensor
    qkv: Tensor  # after rotary
    attended: Tensor
    lse: Tensor
    gate_up: Tensor


class Decoder:
    """A causal LM's body and head on the kernels. It owns no parameters."""

    def __init__(self, model: nn.Module, kernels: Kernels) -> None:
        body: Any = cast(Any, model).base_model
        self.kernels, self.body, self.active, self.memory = kernels, body, active_in(model), LastingMemory()
        self.codes = CODES if getattr(model, "in_int8", False) and kernels.dtype == torch.bfloat16 else 0
        self.names = {m: name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.layers = [self._layer(i, layer) for i, layer in enumerate(body.layers)]
        self.head = Matrix(kernels, [cast(Any, model).get_output_embeddings()], memory=self.memory)
        linears = [m for layer in self.layers for matrix in layer.matrices for m in matrix.linears]
        self.modules = [*linears, *(m for layer in self.layers for m in (layer.norm1, layer.norm2))]
        self.checkpointing = False
        self.addresses: Tensor | None = None  # of weights and cache, within `steady`
        self.laid_out: tuple[list[int], Tensor] = [], torch.empty(0, dtype=torch.int64)  # their state, and they
        self.cache: Cache | None = None
        self.cosine = self.sine = torch.empty(0, dtype=torch.float32)  # of each position

    def _layer(self, index: int, module: Any) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        head_dim = self.kernels.head_dim
        return Layer(
            index=index,
            norm1=module.input_layernorm,
            qkv=self._matrix(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self._matrix(attention.o_proj),
            norm2=module.post_attention_layernorm,
            gate_up=self._matrix(mlp.gate_proj, mlp.up_proj, halves=True),
            down=self._matrix(mlp.down_proj),
            heads=attention.q_proj.out_features // head_dim,
            kv_heads=attention.k_proj.out_features // head_dim,
            scale=attention.scaling,
        )

    def _matrix(self, *linears: nn.Linear, halves: bool = False) -> Matrix:
        names = [self.names[m] for m in linears]
        return Matrix(self.kernels, linears, halves, names, self.active, self.codes > 0, self.memory)

    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        """Last hidden state of each token, after the final norm: tokens [T], positions [T] -> [T, H]."""
        x: Tensor = _Embed.apply(tokens, self.body.embed_tokens.weight)  # pyright: ignore
        cosine, sine = self.rotations(positions)
        if self.active.trained and not x.requires_grad:
            x.requires_grad_()  # the base is frozen, and the trained factors are not inputs of autograd
        parameters = (p for layer in self.layers for p in layer.parameters())  # lazy: decode does not evaluate it
        if not (torch.is_grad_enabled() and (self.active.trained or any(p.requires_grad for p in parameters))):
            if isinstance(layout, Paged) and layout.cache is self.cache and not self.active.groups:
                self.all_layers(x, cosine, sine, layout)
            else:
                for layer in self.layers:
                    self.forward(layer, x, cosine, sine, layout, in_place=True)
            return self.kernels.rms_norm(x, self.body.norm.weight, self.body.norm.variance_epsilon)
        assert isinstance(layout, Packed), "only packed trees have a backward pass"
        for layer in self.layers:
            x = _Layer.apply(x, self, layer, cosine, sine, layout, *layer.parameters())  # pyright: ignore
        return _Norm.apply(x, self.body.norm.weight, self.body.norm.variance_epsilon, self.kernels)  # pyright: ignore

    @contextmanager
    def steady(self, cache: Cache) -> Iterator[None]:
        """Context in which weights and cache do not move or change, so that their addresses can be passed on."""
        now = self._now(cache)
        if now != self.laid_out[0]:
            rows = [[0 if t is None else t.data_ptr() for t in self._tensors(layer, cache)] for layer in self.layers]
            self.laid_out = now, torch.tensor(rows, dtype=torch.int64)
        self.addresses, self.cache = self.laid_out[1], cache
        try:
            yield
        finally:
            self.addresses = self.cache = None

    def _now(self, cache: Cache) -> list[int]:
        """Addresses of weights and cache, and the weights' write counts; compared at each step."""
        parameters = [p for m in self.modules for p in m._parameters.values() if p is not None]
        return [n for p in parameters for n in (p.data_ptr(), p._version)] + [
            t.data_ptr() for t in (*cache.keys, *cache.values)
        ]

    def _tensors(self, layer: Layer, cache: Cache) -> list[Tensor | None]:
        """Tensors of a layer in the order that gemm_stack.c expects."""
        qkv, output, gate_up, down = (m.layout().data for m in layer.matrices)
        keys, values = cache.keys[layer.index], cache.values[layer.index]
        self.kernels.check_pages(keys, values, layer.kv_heads)
        norm1, norm2 = layer.norm1.weight, layer.norm2.weight
        return [norm1, qkv, layer.qkv.bias, output, norm2, gate_up, down, keys, values]

    def all_layers(self, x: Tensor, cosine: Tensor, sine: Tensor, layout: Paged) -> None:
        """`forward` of every layer in one call: the same operations in the same order."""
        assert self.addresses is not None
        first = self.layers[0]
        inner = first.down.linears[0].in_features
        where = (layout.pages, layout.places, layout.table, layout.lengths, layout.starts, layout.shared)
        sizes = (x.shape[1], inner, first.heads, first.kv_heads)
        eps = first.norm1.variance_epsilon
        total = len(layout.cache.keys[0])
        self.kernels.paged_stack(
            self.addresses, x, cosine, sine, where, layout.apart, self.codes, sizes, total, eps, first.scale
        )

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D / 2] float32, from the model's own module; cached for all positions so far."""
        needed = int(positions.max()) + 1
        if needed > len(self.cosine):
            every = torch.arange(-(-needed // 256) * 256)
            cosine, sine = self.body.rotary_emb(torch.empty(0, dtype=torch.float32), every[None])
            half = self.kernels.head_dim // 2
            self.cosine, self.sine = cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()
        return self.cosine[positions], self.sine[positions]

    def forward(
        self, layer: Layer, x: Tensor, cosine: Tensor, sine: Tensor, layout: RowLayout, in_place: bool
    ) -> tuple[Tensor, Kept | None]:
        """One layer: x [T, H] float32 -> the same. In place no activations are kept."""
        k = self.kernels
        rstd1, rstd2 = (None, None) if in_place else torch.empty(2, len(x), dtype=torch.float32).unbind()
        h = k.rms_norm(x, layer.norm1.weight, layer.norm1.variance_epsilon, rstd1)
        qkv = layer.qkv(h)
        k.rotary(qkv, layer.heads + layer.kv_heads, cosine, sine)
        attended, lse = layout.attend_rows(layer.index, k, *self.split(layer, qkv), layer.scale)
        middle = x if in_place else x.clone()
        layer.output.add(attended, middle)
        h = k.rms_norm(middle, layer.norm2.weight, layer.norm2.variance_epsilon, rstd2)
        gate_up = layer.gate_up(h)
        after = middle if in_place else middle.clone()
        layer.down.add(k.swiglu(gate_up), after)
        if rstd1 is None or rstd2 is None:
            return after, None
        return after, Kept(x, middle, rstd1, rstd2, qkv, attended, lse, gate_up)

    def split(self, layer: Layer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of queries, keys and values [T, heads, D] in rows [T, (heads + 2 kv_heads) D]."""
        rows = qkv.view(len(qkv), -1, self.kernels.head_dim)
        return rows.split([layer.heads, layer.kv_heads, layer.kv_heads], dim=1)  # pyright: ignore

    def backward(
        self, layer: Layer, kept: Kept, cosine: Tensor, sine: Tensor, layout: Packed, grad: Tensor
    ) -> list[Tensor | None]:
        """Replaces `grad` [T, H] float32, the gradient of the layer's result, by that of its input. Returns the
        parameters' gradients in the order of `Layer.parameters`."""
        k = self.kernels
        after = grad.to(k.dtype)
        gate_up = kept.gate_up
        inner = k.swiglu_backward(gate_up, layer.down.by_input(after))  # from here on gate_up has its own gradient
        down = layer.down.by_parameters(inner, after)
        h = k.rms_norm(kept.middle, layer.norm2.weight, layer.norm2.variance_epsilon)
        both = layer.gate_up.by_parameters(h, gate_up)
        by_h = layer.gate_up.by_input(gate_up)
        norm2 = k.rms_norm_backward(kept.middle, layer.norm2.weight, kept.rstd2, by_h, grad, rounded=after)
        output = layer.output.by_parameters(kept.attended, after)
        grad_qkv = torch.empty_like(kept.qkv)
        own, grads = self.split(layer, kept.qkv), self.split(layer, grad_qkv)
        by_output = layer.output.by_input(after)
        k.tree_attention_backward(*own, kept.attended, kept.lse, by_output, grads, layout.segments, layer.scale)
        k.rotary(grad_qkv, layer.heads + layer.kv_heads, cosine, sine, inverse=True)
        h = k.rms_norm(kept.x, layer.norm1.weight, layer.norm1.variance_epsilon)
        qkv = layer.qkv.by_parameters(h, grad_qkv)
        norm1 = k.rms_norm_backward(kept.x, layer.norm1.weight, kept.rstd1, layer.qkv.by_input(grad_qkv), grad)
        norms = [deposit(layer.norm1.weight, norm1), deposit(layer.norm2.weight, norm2)]
        return [*norms, *qkv, *output, *both, *down]

    def stale(self) -> None:
        """Mark laid-out weights as stale; they are laid out again before the next product."""
        for layer in self.layers:
            for matrix in layer.matrices:
                matrix.stale()
        self.head.stale()
        self.laid_out = [], self.laid_out[1]


class _Layer(torch.autograd.Function):
    """A layer with its hand-written backward pass. `parameters` are inputs so that autograd takes their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decoder: Decoder, layer: Layer, cosine: Tensor, sine: Tensor, layout: Packed,
                *parameters: Tensor) -> Tensor:  # fmt: skip
        after, kept = decoder.forward(layer, x, cosine, sine, layout, in_place=False)
        assert kept is not None
        ctx.inputs = decoder, layer, cosine, sine, layout
        ctx.kept, ctx.x = (None, x) if decoder.checkpointing else (kept, None)
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        decoder, layer, cosine, sine, layout = ctx.inputs
        kept = ctx.kept or decoder.forward(layer, ctx.x, cosine, sine, layout, in_place=False)[1]
        ctx.kept = ctx.x = None
        grad = grads[0].contiguous()
        result = decoder.backward(layer, kept, cosine, sine, layout, grad)
        return grad, None, None, None, None, None, *result


class _Embed(torch.autograd.Function):
    """Rows of the embedding in float32. The gradient touches these rows only, not the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return weight[tokens].float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        into, add = gradient_place(weight)
        if not add:
            into.zero_()
        into.index_add_(0, tokens, grads[0])
        return None, unless_placed(weight, into)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, k: Kernels) -> Tensor:
        rstd = torch.empty(len(x), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        ctx.kernels = k
        return k.rms_norm(x, weight, eps, rstd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad = torch.zeros_like(x)
        by_weight = ctx.kernels.rms_norm_backward(x, weight, rstd, grads[0].contiguous(), grad)
        return grad, deposit(weight, by_weight), None, None


def decoder_for(model: nn.Module) -> Decoder | None:
    """The model on birl's kernels, or None if they do not support it. Made again if its weights have another dtype or
    device."""
    embeddings = getattr(model, "get_output_embeddings", None)
    if embeddings is None:
        return None
    weight = cast(Any, embeddings()).weight
    result, made_for = MADE.get(model), (weight.dtype, weight.device)
    if result is None or result[0] != made_for:
        kernel = kernels.load(weight.dtype, head_dim(model)) if fits(model) else None
        result = (made_for, None if kernel is None else Decoder(model, kernel))
        MADE[model] = result
    return result[1]


def weights_changed(model: nn.Module) -> None:
    """Invalidate all laid-out copies. Call after each optimizer step and each load: PyTorch's fused AdamW writes
    weights without counting it in `_version`."""
    result = MADE.get(model)
    if result is not None and result[1] is not None:
        result[1].stale()


def head_dim(model: nn.Module) -> int:
    config = cast(Any, model).config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def fits(model: nn.Module) -> bool:
    """Whether `Decoder` can compute this model, with its weights' device and dtype."""
    places = {p.device.type for p in model.parameters()}  # on meta: quantised weights
    return shaped(model) and "cpu" in places and places <= {"cpu", "meta"}


def shaped(model: nn.Module) -> bool:
    """Whether `Decoder` supports this architecture, also for a model without weights. `verify.verify` detects models
    that look alike but differ."""
    config = cast(Any, model).config.get_text_config()
    return (
        llama_shaped(model)
        and config.hidden_size % 32 == 0
        and config.intermediate_size % 32 == 0
        and config.vocab_size % 16 == 0
    )


def llama_shaped(model: nn.Module) -> bool:
    """Whether the model has exactly Llama's layers, with weights of one dtype."""
    body: Any = getattr(model, "base_model", None)
    if body is None or not hasattr(body, "layers") or not len(body.layers):
        return False
    config = cast(Any, model).config.get_text_config()
    layer = body.layers[0]
    return (
        all(type(m).__name__ in LAYERS for m in body.layers)
        and {name for name, _ in body.named_children()} == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and all(type(m) in LINEAR for m in body.layers.modules() if isinstance(m, nn.Linear))
        and all(p.dtype == layer.mlp.up_proj.weight.dtype for p in model.parameters())
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and layer.self_attn.o_proj.bias is None
        and (config.model_type != "mistral" or config.sliding_window is None)
        and all(getattr(m.self_attn, "sliding_window", None) is None for m in body.layers)
    )
