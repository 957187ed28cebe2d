"""One forward pass of generation, over the very module that is trained."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from birl import kernels
from birl.engine.pages import Pages
from birl.engine.scheduler import Work, sharing
from birl.kernels import PAGE
from birl.models.decoder import decoder_for, head_dim
from birl.models.forward import head, hidden_states
from birl.models.packed import PackedLinears
from birl.models.paged import Cache, Paged


class Runner:
    """Prompts and single tokens go through the model together, as rows over a paged cache."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.packed = PackedLinears(model)
        self.cache: Cache | None = None

    def run(self, plan: Sequence[Work]) -> Tensor:
        """Logits for each of the plan's draws, in order: [draws, V] float32."""
        assert self.cache is not None, "only within steady()"
        device = self.cache.keys[0].device
        tokens = torch.tensor([t for w in plan for t in (*w.tokens, *w.drafts)], device=device)
        lengths = [w.start + i + 1 for w in plan for i in range(len(w.tokens) + len(w.drafts))]
        tables = [w.request.pages for w in plan for _ in range(len(w.tokens) + len(w.drafts))]
        layout = Paged.of(self.cache, tables, lengths, *sharing(tables, lengths))
        hidden = hidden_states(self.model, tokens, torch.tensor(lengths, device=device) - 1, layout)
        rows, end = [], 0
        for work in plan:
            end += len(work.tokens) + len(work.drafts)
            if work.complete:
                rows += range(end - len(work.drafts) - 1, end)
            for follower in work.followers:  # a page that is not full yet becomes its own
                if len(follower) % PAGE:
                    self.cache.copy_page(work.request.pages[len(follower) // PAGE], follower.pages[-1])
        if not rows:
            return hidden.new_empty(0, head(self.model).weight.shape[0], dtype=torch.float32)
        if len(rows) < len(hidden):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=device)]
        logits = self.logits(hidden)
        if any(w.followers for w in plan):
            counts = [len(w.samplers) for w in plan if w.complete]  # and nobody guesses
            logits = logits.repeat_interleave(torch.tensor(counts, device=device), dim=0)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        decoder = decoder_for(self.model)
        return head(self.model)(hidden).float() if decoder is None else decoder.head.floats(hidden)

    def steady(self, version: int, pages: Pages) -> AbstractContextManager[None]:
        """Within, the weights do not change: products use copies laid out for them."""
        if self.cache is None:
            self.cache = Cache.make(pages.total, **cache_shape(self.model), device=head(self.model).weight.device)
        decoder = decoder_for(self.model)
        return self.packed.active(version) if decoder is None else decoder.steady(self.cache)

    def release(self) -> None:
        """Give back what is only needed while generating."""
        self.packed.release()
        self.cache = None

    @property
    def same_bits(self) -> bool:
        """Does a row give the same bits in every batch?"""
        decoder = decoder_for(self.model)
        return decoder is not None and decoder.kernels.dtype == torch.bfloat16

    @property
    def kernels(self) -> kernels.Kernels | None:
        return kernels.load(torch.float32, 64) if head(self.model).weight.device.type == "cpu" else None


def cache_shape(model: nn.Module) -> dict[str, Any]:
    config = model.config.get_text_config()  # pyright: ignore
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": head_dim(model),
        "dtype": head(model).weight.dtype,
    }


def page_bytes(model: nn.Module) -> int:
    """Bytes of a page in all layers."""
    shape = cache_shape(model)
    return 2 * PAGE * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * shape["dtype"].itemsize
