"""What a model says of the trained tokens of a micro-batch: the forward pass of training, as one module."""

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

    def __init__(self, model: nn.Module, temperature: float, checkpointing: bool) -> None:
        super().__init__()
        self.model, self.temperature, self.checkpointing = model, temperature, checkpointing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [N] and entropies [N]; with a score head, scores [N] and zeros. Third, what a critic on the same
        backbone says [N]."""
        model = self.model
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
