"""What a model says of the trained tokens of a micro-batch: the forward pass of training, as one module."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from birl.data.pack import Batch
from birl.models.decoder import decoder_for
from birl.models.forward import head, hidden_states, packed
from birl.models.fused_decoder import fused_for
from birl.models.heads import score_head, scores
from birl.models.logprobs import token_logprobs


class Outputs(nn.Module):
    """A module, so that FSDP gathers the head together with the body: the head's own forward pass is never called."""

    def __init__(self, model: nn.Module, temperature: float, checkpointing: bool, multiple: int = 1) -> None:
        """`multiple`: of how many tokens a row must be, because ranks share them out."""
        super().__init__()
        self.model, self.temperature, self.checkpointing, self.multiple = model, temperature, checkpointing, multiple

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [N] and entropies [N]; with a score head, scores [N] and zeros. Third, what a critic on the same
        backbone says [N]."""
        model, batch = self.model, padded(batch, self.multiple)
        if decoder := decoder_for(model):
            decoder.checkpointing = self.checkpointing
        if fused := fused_for(model):
            fused.checkpointing = self.checkpointing
        hidden = hidden_states(model, batch.tokens, batch.positions, packed(batch.trees, batch.tokens.device))
        if score := score_head(model):
            values = scores(hidden[batch.source], score)
            return values, torch.zeros_like(values), None
        value = score_head(model, "value")
        said = None if value is None else scores(hidden[batch.source], value)
        logp, entropy = token_logprobs(
            hidden[batch.source], head(model), batch.targets, self.temperature, decoder=decoder
        )
        return logp, entropy, said


def padded(batch: Batch, multiple: int) -> Batch:
    """With a sequence of its own behind the others, which nothing attends to and nothing reads, so that the number of
    tokens is a multiple."""
    extra = -len(batch.tokens) % multiple
    if extra == 0:
        return batch
    return replace(
        batch,
        tokens=torch.cat([batch.tokens, batch.tokens.new_zeros(extra)]),
        positions=torch.cat([batch.positions, torch.arange(extra, device=batch.positions.device)]),
        trees=(*batch.trees, (extra, ())),
    )
