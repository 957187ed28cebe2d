"""KV cache layout of a model's attention, from the tensors that its layers pass to attention: a config's `head_dim` is
only the rotary part in some architectures, others ignore `num_key_value_heads`, and in yet others sizes differ by
layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from birl.errors import BirlError, first_line
from birl.kernels.tensors import PAGE
from birl.models import attention
from birl.models.decoder import llama_shaped
from birl.models.paged import Slot
from birl.models.states import State, Step, ask_layouts
from birl.models.vision import language_model

# of a model without attention: sequence lengths are still counted in pages, of one number a token
COUNTED = Slot(layer=0, heads=0, kv_heads=1, key=1, value=0)
KNOWN: "WeakKeyDictionary[nn.Module, tuple[Slot, ...]]" = WeakKeyDictionary()
KEPT: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()  # bytes of a sequence's recurrent states


@dataclass(slots=True)
class Witness:
    """A layout that records the arguments of each call of attention, in order, and returns zeros."""

    slots: list[Slot] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)  # bytes of a sequence's state, by layer

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        variant: attention.Variant | None = None,
    ) -> Tensor:  # fmt: skip
        extras = tuple(f.name for f in fields(attention.Variant) if getattr(variant, f.name, None) is not None)
        self.slots.append(Slot(layer, query.shape[1], key.shape[1], key.shape[3], value.shape[3], extras))
        self.windows.append(window)
        self.scales.append(scale)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def carry(self, layer: int, rows: Tensor, step: Step) -> Tensor:
        state = State()
        part = step(rows[:, :1], state)
        if layer in self.states:
            raise BirlError(f"Layer {layer} keeps two states. birl does not support this architecture.")
        self.states[layer] = sum(t.nbytes for t in state.tensors.values())
        return rows.new_zeros(*rows.shape[:2], part.shape[-1])


def slots_of(model: nn.Module) -> tuple[Slot, ...]:
    """One slot for each call of attention in a forward pass, by layer. The first call runs one token through the model.
    Raises `BirlError` for a model whose layers do not call birl's attention."""
    if model not in KNOWN:
        witness = Witness(_of_llama(model)) if llama_shaped(model) else seen(model)
        slots, KEPT[model] = tuple(sorted(witness.slots, key=lambda s: s.layer)), sum(witness.states.values())
        if not (slots or witness.states):
            raise BirlError(f"birl does not support {type(model).__name__}: it has no layer with attention.")
        KNOWN[model] = slots or (COUNTED,)
    return KNOWN[model]


def page_bytes(model: nn.Module) -> int:
    """Bytes of a cache page in all slots."""
    kind = cast(Any, model).get_output_embeddings().weight.dtype
    return PAGE * kind.itemsize * sum(s.elements for s in slots_of(model))


def state_bytes(model: nn.Module) -> int:
    """Bytes of a sequence's layer states, beside its KV cache pages."""
    slots_of(model)
    return KEPT[model]


def _of_llama(model: nn.Module) -> list[Slot]:
    modules = [layer.self_attn for layer in cast(Any, model).base_model.layers]
    rows = [(m.q_proj.out_features, m.k_proj.out_features, m.head_dim) for m in modules]
    return [Slot(i, q // size, k // size, size, size) for i, (q, k, size) in enumerate(rows)]


def seen(model: nn.Module) -> Witness:
    """The recorded calls of attention for one token, whether or not the model has its weights. Raises `BirlError` for a
    model whose layers do not call birl's attention."""
    plain = all(type(p.data) is Tensor for p in model.parameters()) and not next(model.parameters()).is_meta
    with supported(type(model).__name__), computed_by(model, attention.NAME):
        return watched(model) if plain else _on_meta(model)


@contextmanager
def supported(kind: str) -> Iterator[None]:
    """Context that turns failures into a `BirlError`. `kind`: the model's class."""
    try:
        yield
    except BirlError:
        raise
    except Exception as error:
        raise BirlError(
            f"birl does not support {kind}: its forward pass fails with birl's attention ({type(error).__name__}: "
            f"{first_line(error)})."
        ) from error


@contextmanager
def computed_by(model: nn.Module, name: str) -> Iterator[None]:
    """Context in which attention is transformers' function of this name, with its masks."""
    any_model = cast(Any, model)
    before = any_model.config._attn_implementation
    if before == name:
        yield
        return
    try:
        compute_by(any_model, name)
        yield
    finally:
        compute_by(any_model, before)


def compute_by(model: Any, name: str) -> None:
    """Set the attention function, also if transformers does not support that for the model, and `handing.py` does."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention.named(model.config, name))
    else:
        model.config._attn_implementation_internal = name


@contextmanager
def experts_by_shape(model: nn.Module) -> Iterator[None]:
    """Context in which experts are computed by operations with data-independent shapes, in any dtype."""
    any_model = cast(Any, model)
    before = any_model.config._experts_implementation
    if before != "grouped_mm" or not any_model._can_set_experts_implementation():
        yield
        return
    any_model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        any_model.set_experts_implementation(before)


def body_of(model: nn.Module) -> Any:
    """The submodule that computes hidden states of tokens. If `base_model_prefix` names nothing, `base_model` is the
    whole model."""
    ask_layouts(model)
    if (language := language_model(model)) is not None:
        return language
    base = cast(Any, model).base_model
    return cast(Any, model).model if base is model else base


@torch.no_grad()
def watched(model: nn.Module, tokens: int = 1) -> Witness:
    """The recorded calls of attention for `tokens` tokens. Raises whatever the model raises, and `BirlError` if its
    layers neither call birl's attention nor keep states."""
    witness = Witness()
    device = cast(Any, model).get_output_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    places = torch.arange(tokens, device=device)[None]
    body_of(model)(input_ids=ids, position_ids=places, layout=witness, use_cache=False)
    if not (witness.slots or witness.states):
        raise BirlError(
            f"birl does not support {type(model).__name__}: its layers do not call the attention that transformers "
            "lets birl replace, or do not hand on to it what the model was called with."
        )
    return witness


def _on_meta(model: nn.Module) -> Witness:
    """`watched` by shapes alone, for a model with all or part of its weights missing. If a layer reads values, as
    experts do, the layers after it are assumed to be like the last one reached."""
    witness, body = Witness(), body_of(model)
    every = (*body.named_parameters(), *body.named_buffers())
    tensors = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in every}
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    mask = torch.ones_like(ids)  # without a mask, transformers reads the positions to detect packed sequences
    options = {"input_ids": ids, "position_ids": ids, "attention_mask": mask, "layout": witness, "use_cache": False}
    try:
        with torch.no_grad(), experts_by_shape(model):
            torch.func.functional_call(body, tensors, (), options, tie_weights=False)
        return witness
    except BirlError:
        raise
    except Exception:
        if not witness.slots or witness.states:
            raise
    for i in range(len(witness.slots), cast(Any, model).config.get_text_config().num_hidden_layers):
        witness.slots.append(replace(witness.slots[-1], layer=i))
        witness.windows.append(witness.windows[-1])
        witness.scales.append(witness.scales[-1])
    return witness
