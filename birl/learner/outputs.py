"""The forward pass of training as one module: log-probs and entropies of the trained tokens of a micro-batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from birl.data.pack import Batch
from birl.data.trees import Tree
from birl.errors import BirlError
from birl.models import vision
from birl.models.decoder import decoder_for
from birl.models.forward import hidden_states
from birl.models.fused_decoder import fused_for
from birl.models.heads import after_head, head, score_head, scores
from birl.models.logprobs import token_logprobs
from birl.parallel import context
from birl.parallel.layout import gathered_for
from birl.parallel.ranks import Ranks

#: hidden states [U, H] and the head -> the divergence of their distributions from a teacher's [U]
Compared = Callable[[Tensor, nn.Linear], Tensor]


class Outputs(nn.Module):
    """A module, so that FSDP gathers weights outside the layers: the head's own forward pass is never called."""

    def __init__(self, model: nn.Module, temperature: float, checkpointing: bool, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.temperature, self.checkpointing, self.ranks = model, temperature, checkpointing, ranks
        context.check_heads(model, ranks)

    def forward(self, batch: Batch, compared: Compared | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Log-probs [N] and entropies [N]; with a score head, scores [N] and zeros. Third, columns of the batch [N]:
        values of a critic on the same backbone, the divergence from a teacher, and log-probs of the environment's
        tokens [O]. Ranks that share a row each compute a part of it, and all get the whole result."""
        model = self.model
        part, hidden = self._states(batch)
        if score := score_head(model):
            values = part.joined(scores(hidden, score))[0][batch.entry]
            return values, torch.zeros_like(values), {}
        layer, value, columns = head(model), score_head(model, "value"), list[str]()
        ways = {"decoder": decoder_for(model), "after": after_head(model), "support": part.support}

        def said(hidden: Tensor) -> list[Tensor]:
            result = list(token_logprobs(hidden, layer, part.targets, self.temperature, **ways))
            return result if compared is None else [*result, compared(hidden, layer)]

        figures = gathered_for(layer, said, hidden)
        if compared is not None:
            columns.append("divergence")
        if value is not None:
            columns.append("predicted")
            figures.append(scores(hidden, value))
        joined = part.joined(*figures)
        logp, entropy, *rest = (figure[batch.entry] for figure in joined)
        result = dict(zip(columns, rest, strict=True))
        if batch.observed is not None:
            result["observed_logprobs"] = joined[0][batch.observed]
        return logp, entropy, result

    def states(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """A teacher's distributions in compact form: hidden states of this rank's predictions [U, H], the head's weight
        and bias. Copies if FSDP has gathered them, as those are freed again."""
        layer = head(self.model)
        _, hidden = self._states(batch)
        own = Tensor.clone if self.ranks.sharded else Tensor.detach

        def said(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return hidden, own(layer.weight), None if layer.bias is None else own(layer.bias)

        return gathered_for(layer, said, hidden)

    def _states(self, batch: Batch) -> tuple[context.ContextShard, Tensor]:
        """This rank's part of a row, and the hidden states that its trained tokens are predicted from [U, H]."""
        model, grid = self.model, self.ranks.grid
        batch = padded(batch, grid.cp * (grid.tp if grid.sequence else 1))
        if decoder := decoder_for(model):
            decoder.checkpointing = self.checkpointing
        if fused := fused_for(model):
            fused.checkpointing = self.checkpointing
        tokens, positions, seen = vision.row(model, batch.tokens, batch.positions, batch.trees)
        part = context.split(replace(batch, tokens=tokens, positions=positions), self.ranks, seen)
        hidden = hidden_states(model, part.tokens, part.positions, part.layout, part.seen)[part.source]
        return part, vision.anchored(model, hidden) if self.ranks.sharded else hidden


def padded(batch: Batch, multiple: int) -> Batch:
    """Append a dummy sequence, which nothing attends to and nothing reads, so that the number of tokens is a multiple
    of `multiple`."""
    extra = -len(batch.tokens) % multiple
    if extra == 0:
        return batch
    return replace(
        batch,
        tokens=torch.cat([batch.tokens, batch.tokens.new_zeros(extra)]),
        positions=torch.cat([batch.positions, torch.arange(extra, device=batch.positions.device)]),
        trees=(*batch.trees, Tree.of(extra)),
        copies=torch.cat([batch.copies, batch.copies.new_zeros(extra)]),
    )


def recompute(model: nn.Module) -> None:
    """Enable gradient checkpointing in each layer. transformers does so only in training mode: only the layers are put
    into it, and they leave it while they compute, so that there is no dropout."""
    module: Any = model
    new = hasattr(module, "activation_checkpointing_enable")  # its name since transformers 5.23
    enable = module.activation_checkpointing_enable if new else module.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise BirlError(f"learner.gradient_checkpointing: {error} Set it to false.") from error
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
        layer._gradient_checkpointing_func = partial(undropped, layer, layer._gradient_checkpointing_func)


def undropped(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint`, with the layer itself in evaluation mode while its forward runs."""

    def inner(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(inner, *args)
