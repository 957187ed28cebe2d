"""What a model's attention keeps of each token, learned from the tensors that its layers really hand over: a config's
`head_dim` is the rotary part alone in some architectures, `num_key_value_heads` is ignored by others, and sizes differ
by layer in yet others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from birl.errors import BirlError, first_line
from birl.kernels import PAGE
from birl.models import attention
from birl.models.decoder import llama_shaped
from birl.models.paged import Slot

FOUND: "WeakKeyDictionary[nn.Module, tuple[Slot, ...]]" = WeakKeyDictionary()


@dataclass(slots=True)
class Witness:
    """A layout that notes what each call of attention is given, in order, and answers zeros."""

    slots: list[Slot] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.slots.append(Slot(layer, query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        self.windows.append(window)
        self.scales.append(scale)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def slots_of(model: nn.Module) -> tuple[Slot, ...]:
    """One for each call of attention in a forward pass, layer by layer. The first time one token goes through the
    model. Raises `BirlError` for a model whose layers do not call birl's attention."""
    if model not in FOUND:
        slots = _of_llama(model) if llama_shaped(model) else tuple(sorted(_seen(model), key=lambda s: s.layer))
        if not slots:
            raise BirlError(f"birl does not support {type(model).__name__}: it has no layer with attention.")
        FOUND[model] = slots
    return FOUND[model]


def page_bytes(model: nn.Module) -> int:
    """Bytes of a page of the cache in all slots."""
    kind = cast(Any, model).get_output_embeddings().weight.dtype
    return PAGE * kind.itemsize * sum(s.elements for s in slots_of(model))


def _of_llama(model: nn.Module) -> tuple[Slot, ...]:
    modules = [layer.self_attn for layer in cast(Any, model).base_model.layers]
    rows = [(m.q_proj.out_features, m.k_proj.out_features, m.head_dim) for m in modules]
    return tuple(Slot(i, q // size, k // size, size, size) for i, (q, k, size) in enumerate(rows))


def _seen(model: nn.Module) -> list[Slot]:
    plain = all(type(p.data) is Tensor and not p.is_meta for p in model.parameters())
    try:
        with computed_by(model, attention.NAME):
            return watched(model).slots if plain else _on_meta(model)
    except BirlError:
        raise
    except Exception as error:
        raise BirlError(
            f"birl does not support {type(model).__name__}: a forward pass with birl's attention fails "
            f"({type(error).__name__}: {first_line(error)})."
        ) from error


@contextmanager
def computed_by(model: nn.Module, name: str) -> Iterator[None]:
    """Within, attention is transformers' function of this name, with the masks that belong to it."""
    any_model = cast(Any, model)
    before = any_model.config._attn_implementation
    if before == name:
        yield
        return
    any_model.set_attn_implementation(name)
    try:
        yield
    finally:
        any_model.set_attn_implementation(before)


@torch.no_grad()
def watched(model: nn.Module, tokens: int = 1) -> Witness:
    """What attention is given when `tokens` tokens go through the model. Raises whatever the model raises, and
    `BirlError` where its layers never call birl's attention."""
    witness = Witness()
    device = cast(Any, model).get_output_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    places = torch.arange(tokens, device=device)[None]
    cast(Any, model).base_model(input_ids=ids, position_ids=places, layout=witness, use_cache=False)
    if not witness.slots:
        raise BirlError(
            f"birl does not support {type(model).__name__}: its layers do not call the attention that transformers "
            "lets birl replace, or do not hand on to it what the model was called with."
        )
    return witness


def _on_meta(model: nn.Module) -> list[Slot]:
    """Of a model without weights, or with parts of them: shapes alone. Where a layer looks at values, as experts do,
    the layers behind it are taken to be like the last that was reached."""
    witness, body = Witness(), cast(Any, model).base_model
    tensors = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in _tensors(body)}
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    mask = torch.ones_like(ids)  # without one, transformers looks at the positions for packed sequences
    options = {"input_ids": ids, "position_ids": ids, "attention_mask": mask, "layout": witness, "use_cache": False}
    try:
        with torch.no_grad():
            torch.func.functional_call(body, tensors, (), options, tie_weights=False)
    except BirlError:
        raise
    except Exception:
        if not witness.slots:
            raise
    known = witness.slots
    layers = range(len(known), cast(Any, model).config.get_text_config().num_hidden_layers)
    return [*known, *(replace(known[-1], layer=i) for i in layers)]


def _tensors(body: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from body.named_parameters()
    yield from body.named_buffers()
