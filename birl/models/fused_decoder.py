"""Decoders on CUDA: transformers' arithmetic over the module's own parameters, in fewer kernels.

Four products a layer (queries, keys and values in one; gate and up in one), and fused kernels between them
(`fused.py`); differences of model families are options of one layer (`fused_layers.py`). Autograd does the backward
pass. The engine and the learner both use `FusedDecoder.hidden_states`, so they differ only in attention: pages in the
engine, packed trees in the learner. Other architectures, and machines without Triton, use transformers' forward
(`forward.py` decides). If a learner's weights are sharded, `apart` is called before: each layer's module is then called
itself, so that FSDP gathers its weights, and its forward is the fused one.

Shapes: T tokens, H hidden size, I inner size, D head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from birl.models.attention import Layout
from birl.models.device import device_of
from birl.models.fused import has_triton
from birl.models.fused_layers import Layer, fused_layers, normed, placed
from birl.models.slots import seen, slots_of

MADE: "WeakKeyDictionary[nn.Module, FusedDecoder | None]" = WeakKeyDictionary()


class FusedDecoder:
    """The fused forward pass. It owns no parameters, and must not refer to the model: `MADE` would keep that alive."""

    def __init__(self, model: nn.Module, checkpointing: bool = False, ways: int = 1) -> None:
        """`ways`: number of ranks that every layer is split over."""
        self.body: Any = cast(Any, model).base_model
        witness = seen(model)
        config = cast(Any, model).config.get_text_config()
        self.size = witness.slots[0].key
        self.layers = [Layer.of(i, module, config, witness, ways) for i, module in enumerate(self.body.layers)]
        self.calls: list[Callable[..., tuple[Tensor, Tensor]]] = [partial(self.layer, layer) for layer in self.layers]
        self.final = self.body.final_layernorm if hasattr(self.body, "final_layernorm") else self.body.norm
        self.checkpointing = checkpointing
        self.apart = False  # the weights are split over ranks
        self.enter: Callable[[Tensor], Tensor] = unchanged  # before a block that ranks share (`regions.py`)
        self.end: Callable[[Tensor], Tensor] = unchanged  # after the last

    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Last hidden state of each token, normed: tokens [T], positions [T] -> [T, H]."""
        x = self.embedded(tokens)
        angles = {kind: self.rotations(x, positions, kind) for kind in {layer.rope for layer in self.layers}}
        delta: Tensor | None = None
        self.join()
        for layer, call in zip(self.layers, self.calls, strict=True):
            x, delta = call(x, delta, *angles[layer.rope], layout)
        return self.end(normed(self.final, x, delta)[1])

    def embedded(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        x = self.body.embed_tokens(tokens)
        return x * self.body.embedding_multiplier if hasattr(self.body, "embedding_multiplier") else x

    def layer(self, layer: Layer, x: Tensor, delta: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        """`forward`; checkpointing keeps only the sum x + delta and recomputes the rest in the backward pass."""
        if self.checkpointing and torch.is_grad_enabled():
            x = x if delta is None else x + delta
            return cast(Any, checkpoint(self.forward, layer, x, None, *rest, use_reentrant=False))
        return self.forward(layer, x, delta, *rest)

    def forward(
        self, layer: Layer, x: Tensor, delta: Tensor | None, cosine: Tensor, sine: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is x + delta, in input and output; the next norm adds them."""
        before, behind, before_mlp, behind_mlp = layer.norms
        x, h = normed(before, x, delta)
        qkv = layer.qkv(self.enter(h)).unflatten(1, (-1, self.size))
        qkv = placed(layer, qkv, cosine, sine)
        q, k, v = (part.transpose(0, 1)[None] for part in qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], 1))
        attended = layout.attend(layer.index, q, k, v, layer.scale, layer.window)[0].flatten(1)
        delta = normed(behind, layer.output(attended))[1]
        if layer.parallel:
            return x, delta + layer.feed_forward(h, self.enter)
        x, h = normed(before_mlp, x, self.scaled(layer, delta))
        return x, self.scaled(layer, normed(behind_mlp, layer.feed_forward(h, self.enter))[1])

    def scaled(self, layer: Layer, delta: Tensor) -> Tensor:
        return delta if layer.multiplier == 1.0 else delta * layer.multiplier

    def rotations(self, x: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, R / 2] of one kind of layer, in the dtype of the model's own module."""
        if kind is None:
            return x, x
        cosine, sine = self.body.rotary_emb(x, positions[None], *([kind] if kind else []))
        half = cosine.shape[-1] // 2
        return cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()

    def join(self) -> None:
        """Concatenate weights with the same input into one tensor (`fused_layers.py`); moves them on first use."""
        for layer in () if self.apart else self.layers:
            layer.join()


def unchanged(x: Tensor) -> Tensor:
    return x


def fused_for(model: nn.Module) -> FusedDecoder | None:
    """The model on fused kernels, or None if they do not support it."""
    if model not in MADE:
        MADE[model] = FusedDecoder(model) if fits(model) else None
    result = MADE[model]
    return result if result is not None and (result.apart or on_card(model)) else None


def apart(
    model: nn.Module,
    ways: int,
    enter: Callable[[Tensor], Tensor] = unchanged,
    end: Callable[[Tensor], Tensor] = unchanged,
) -> None:
    """Called before the weights are sharded over ranks, every layer over `ways` of them: the forward of each layer's
    module becomes the fused one, if it fits; transformers' forward of the whole model is unusable then."""
    if not fits(model) or (ways > 1 and any(over_heads(m) for m in cast(Any, model).base_model.layers)):
        MADE[model] = None  # `fits` cannot be decided later: the layers' class names change
        return
    slots_of(model)
    MADE[model] = fused = FusedDecoder(model, ways=ways)
    fused.apart, fused.enter, fused.end = True, enter, end
    for i, module in enumerate(fused.body.layers):
        module.forward, fused.calls[i] = fused.calls[i], module


def over_heads(layer: Any) -> bool:
    """Whether queries have one norm over all heads (OLMo 2), of which a rank has a part."""
    norm = getattr(layer.self_attn, "q_norm", None)
    return norm is not None and norm.weight.numel() != layer.self_attn.head_dim


def on_card(model: nn.Module) -> bool:
    return has_triton() and (next(model.parameters()).is_cuda or device_of(model).type == "cuda")


def fits(model: nn.Module) -> bool:
    body: Any = cast(Any, model).base_model
    if not (on_card(model) and hasattr(body, "layers") and len(body.layers)):
        return False
    kinds = getattr(body.rotary_emb, "rope_type", "default") if hasattr(body, "rotary_emb") else ""
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    # these read the positions' values, on the host
    return fused_layers(model) and kinds.isdisjoint({"dynamic", "longrope"})
