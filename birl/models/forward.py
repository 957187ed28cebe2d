"""Forward passes of the model, used by the engine and the learner."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from birl.models import decoder, fused_decoder
from birl.models.attention import Layout, RowLayout
from birl.models.decoder import decoder_for
from birl.models.fused_decoder import fused_for
from birl.models.heads import after_head, head
from birl.models.logprobs import float_logits
from birl.models.slots import body_of
from birl.models.vision import Seen, embedded
from birl.parallel.layout import computed_in


def hidden_states(
    model: nn.Module, tokens: Tensor, positions: Tensor, layout: Layout, seen: Seen | None = None
) -> Tensor:
    """Last hidden state of each token: tokens [T], positions [T] (or [3, T], `vision.axes`) -> [T, H]. On birl's
    kernels if they fit, on CUDA the fused ones. `seen`: pictures, whose places may have any token."""
    if decoder := decoder_for(model):
        return decoder.hidden_states(tokens, positions, cast(RowLayout, layout))  # sharded models have no decoder
    if fused := fused_for(model):
        return fused.hidden_states(tokens, positions, layout)
    if seen is not None and seen.mutual is not None:
        layout = replace(cast(Any, layout), mutual=seen.mutual)
    body = body_of(model)
    ids = tokens[None]
    mask = torch.ones_like(ids)  # without a mask, transformers syncs with the device to detect packed sequences
    given = {"input_ids": ids} if seen is None else embedded(model, tokens, seen)
    places = positions[None] if positions.ndim == 1 else positions[:, None]
    output = body(**given, attention_mask=mask, position_ids=places, layout=layout, use_cache=False)
    return output.last_hidden_state[0].to(computed_in(head(model)))  # Mamba's are float32


def forget(model: nn.Module) -> None:
    """Drop the cached decoders of a model whose parameters were replaced."""
    decoder.MADE.pop(model, None)
    fused_decoder.MADE.pop(model, None)


def logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """[T, H] -> [T, V] float32, never rounded to the weights' dtype."""
    if decoder := decoder_for(model):
        return decoder.head.floats(hidden)
    layer, after = head(model), after_head(model)
    whole = layer.weight.dtype == torch.float32  # then on the engine's blocked copy, if there is one
    x = layer(hidden) if whole else float_logits(hidden, layer.weight, layer.bias)
    return x if after is None else after.apply(x)
