"""Decoders on CUDA: transformers' arithmetic over the module's own parameters, in fewer kernels.

Four products a layer (queries, keys and values in one; gate and up in one), and what is between them fused
(`fused.py`); how families differ are options of one layer (`fused_layers.py`). Autograd does the backward pass. The
engine and the learner both go through `FusedDecoder.hidden_states`, so they differ only where attention does: pages
there, packed trees here. Any other architecture, and a machine without Triton, runs through transformers' forward
(`forward.py` decides).

Shapes: T tokens, H hidden size, I inner size, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from birl.models.attention import Layout
from birl.models.fused import has_triton
from birl.models.fused_layers import Layer, fused_layers, normed, placed
from birl.models.slots import watched

MADE: "WeakKeyDictionary[nn.Module, FusedDecoder | None]" = WeakKeyDictionary()


class FusedDecoder:
    """It owns no parameters, only the copies for generation. It must not hold the model itself: `MADE` would then keep
    that alive for ever."""

    def __init__(self, model: nn.Module, checkpointing: bool = False) -> None:
        self.body: Any = cast(Any, model).base_model
        self.head: nn.Module = cast(Any, model).get_output_embeddings()
        seen = watched(model)
        config = cast(Any, model).config.get_text_config()
        self.size = seen.slots[0].key
        self.layers = [Layer.of(i, module, config, seen) for i, module in enumerate(self.body.layers)]
        self.final = self.body.final_layernorm if hasattr(self.body, "final_layernorm") else self.body.norm
        self.checkpointing = checkpointing
        self.copied = False  # within `steady`
        self.fresh = False  # the copies are those of the present weights

    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Last hidden state of each token, normed: tokens [T], positions [T] -> [T, H]."""
        x = self.embedded(tokens)
        angles = {kind: self.rotations(x, positions, kind) for kind in {layer.rope for layer in self.layers}}
        delta: Tensor | None = None
        for layer in self.layers:
            arguments = (layer, x, delta, *angles[layer.rope], layout)
            if self.checkpointing and torch.is_grad_enabled():
                x, delta = checkpoint(self.forward, *arguments, use_reentrant=False)  # pyright: ignore
            else:
                x, delta = self.forward(*arguments)
        return normed(self.final, x, delta)[1]

    def embedded(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        embedding = self.body.embed_tokens
        x = F.embedding(tokens, embedding.weight)
        if hasattr(embedding, "embed_scale"):
            return x * embedding.embed_scale.to(x.dtype)
        return x * self.body.embedding_multiplier if hasattr(self.body, "embedding_multiplier") else x

    def forward(
        self, layer: Layer, x: Tensor, delta: Tensor | None, cosine: Tensor, sine: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is x + delta, in and out; the next norm adds them."""
        before, behind, before_mlp, behind_mlp = layer.norms
        x, h = normed(before, x, delta)
        qkv = layer.qkv(h, self.copied).view(len(x), -1, self.size)
        qkv = placed(layer, qkv, cosine, sine)
        q, k, v = (part.transpose(0, 1)[None] for part in qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], 1))
        attended = layout.attend(layer.index, q, k, v, layer.scale, layer.window)[0].flatten(1)
        delta = normed(behind, layer.output(attended))[1]
        if layer.parallel:
            return x, delta + layer.feed_forward(h, self.copied)
        x, h = normed(before_mlp, x, self.scaled(layer, delta))
        return x, self.scaled(layer, normed(behind_mlp, layer.feed_forward(h, self.copied))[1])

    def scaled(self, layer: Layer, delta: Tensor) -> Tensor:
        return delta if layer.multiplier == 1.0 else delta * layer.multiplier

    def rotations(self, x: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, R / 2] of one kind of layer, in the type that the model's own module gives."""
        if kind is None:
            return x, x
        cosine, sine = self.body.rotary_emb(x, positions[None], *([kind] if kind else []))
        half = cosine.shape[-1] // 2
        return cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Within, the weights do not change: joined products read copies, which are renewed here if they must be."""
        joined = [j for layer in self.layers for j in layer.copied()]
        if not self.fresh or any(j.weight is None or j.weight.dtype != self.dtype for j in joined):
            with torch.no_grad():
                for j in joined:
                    j.copy()
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
        copies = [t for m in self.layers for j in m.copied() for t in (j.weight, j.bias) if t is not None]
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
    kinds = getattr(body.rotary_emb, "rope_type", "default") if hasattr(body, "rotary_emb") else ""
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    # these look at the positions' values, on the host
    return fused_layers(model) and kinds.isdisjoint({"dynamic", "longrope"})
