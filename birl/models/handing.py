"""Passes layouts of attention and states down to layers that the model does not hand its arguments to.

`hand_down` gives each module in `PARTS` a subclass of its class: when called with a layout, it sets it on its parts,
which use it when they are called. Layers are called with the layout itself, so that it is also set when the backward
pass recomputes a layer.

    PARTS   class of module -> the attribute that is its part, or a list of parts; "": it takes the layout itself
    OWN     attention without transformers' attention interface: what `attention.attention` needs of it
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, cast

from torch import Tensor, nn

from birl.errors import BirlError
from birl.models import attention

PARTS = {
    **{"GPTJModel": "h", "GPTJBlock": "attn", "GPTJAttention": ""},
    **{"GPTNeoModel": "h", "GPTNeoBlock": "attn", "GPTNeoAttention": "attention", "GPTNeoSelfAttention": ""},
    **{"CodeGenModel": "h", "CodeGenBlock": "attn", "CodeGenAttention": ""},
    **{"FalconModel": "h", "FalconDecoderLayer": "self_attention", "FalconAttention": ""},
    **{"NemotronDecoderLayer": "self_attn", "NemotronAttention": ""},
    **{"StableLmDecoderLayer": "self_attn", "StableLmAttention": ""},
    **{"ZayaAttention": "qkv_proj", "ZayaCCAProjection": ""},
    **{"xLSTMModel": "blocks", "xLSTMBlock": "mlstm_layer", "xLSTMLayer": ""},
}
# transformers computes longer rows in chunks, without a gradient
PIECES = {"xLSTMModel": "max_inference_chunksize"}


@dataclass(frozen=True, slots=True)
class Own:
    """Scale of the scores and window of an attention module."""

    scale: Callable[[Any], float]
    window: Callable[[Any], int | None] = lambda module: None


OWN = {
    "GPTJAttention": Own(lambda m: 1 / float(m.scale_attn)),
    "GPTNeoSelfAttention": Own(lambda m: 1.0, lambda m: m.config.window_size if m.attention_type == "local" else None),
    "CodeGenAttention": Own(lambda m: 1 / m.scale_attn),
    "FalconAttention": Own(lambda m: m.inv_norm_factor),
}


def hand_down(model: nn.Module) -> None:
    """Replace the classes of the model's modules; each module once."""
    for module in model.modules():
        kind = type(module)
        name = next((k.__name__ for k in kind.__mro__ if k.__name__ in PARTS), None)
        if name is not None and not hasattr(module, "handed"):
            module.__class__ = handing(kind, name)
            if not hasattr(module, "layer_idx") and hasattr(module, "layer_id"):
                cast(Any, module).layer_idx = module.layer_id


@cache
def handing(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """A subclass of a module's class, with its name."""
    part = PARTS[name]
    names = signature(kind.forward).parameters
    wants = "layout" in names or any(p.kind is p.VAR_KEYWORD for p in names.values()) or (not part and name not in OWN)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.handed is not None:
            options.setdefault("layout", self.handed)
        return kind.__call__(self, *args, **options)

    def forward(self: Any, *args: Any, layout: Any = None, **options: Any) -> Any:
        below = getattr(self, part) if part else self
        with given(below if isinstance(below, nn.ModuleList) else [below], layout), whole(self, name, layout):
            if name == "FalconAttention" and self.config._attn_implementation == attention.NAME:
                return falcon(self, *args, **options)
            return kind.forward(self, *args, **options | ({"layout": layout} if wants and layout is not None else {}))

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
        if self.handed is None and mask is not None:
            return cast(Any, kind)._attn(self, query, key, value, mask)
        return attended(self, query, key, value).transpose(1, 2), None

    own: dict[str, Any] = {"handed": None, "__call__": call, "forward": forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own | ({"_attn": attend} if name in OWN and hasattr(kind, "_attn") else {}))


@contextmanager
def given(modules: Any, layout: Any) -> Iterator[None]:
    """Context in which the modules are called with a layout."""
    for module in modules:
        module.handed = layout
    try:
        yield
    finally:
        for module in modules:
            module.handed = None


@contextmanager
def whole(module: Any, name: str, layout: Any) -> Iterator[None]:
    """Context in which rows are not computed in chunks."""
    if layout is None or name not in PIECES:
        yield
        return
    options, key = vars(module.config), PIECES[name]
    before, options[key] = options[key], sys.maxsize
    try:
        yield
    finally:
        options[key] = before


def attended(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D]."""
    own = next(OWN[k.__name__] for k in type(module).__mro__ if k.__name__ in OWN)
    query, key = query.to(value.dtype), key.to(value.dtype)  # CodeGen's positions are float32
    options: dict[str, Any] = {"scaling": own.scale(module), "sliding_window": own.window(module)}
    return attention.attention(module, query, key, value, None, layout=module.handed, **options)[0]


def falcon(module: Any, rows: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Falcon's whole forward, [B, T, H] -> [B, T, H]: transformers has no function for its attention alone."""
    if options.get("alibi") is not None:
        raise BirlError("FalconAttention wants attention that birl has no rule for: alibi (in its config.json).")
    query, key, value = module._split_heads(module.query_key_value(rows))
    if module.new_decoder_architecture:  # each key head is repeated for all of its query heads
        times = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::times], value[:, :, ::times]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    rotated: Mapping[str, Any] = vars(import_module("transformers.models.falcon.modeling_falcon"))
    query, key = rotated["apply_rotary_pos_emb"](query, key, *options["position_embeddings"])
    return module.dense(attended(module, query, key, value).flatten(2)), None
