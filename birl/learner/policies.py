"""Several policies on one frozen base: each has its own LoRA matrices and optimizer state, and learns only from its own
samples. A league keeps earlier versions of them, which are sampled and not trained.

All rows of a micro-batch belong to one policy (`Batch.policy`), whose matrices are added to the base's products
(`models/low_rank.py`) as in the engine. So no weights are merged, and training one policy never changes another.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from birl.data.pack import Batch
from birl.learner.lora import Lora, Origin, digest, targets
from birl.learner.low_rank_run import LowRankMasters
from birl.learner.optimizer import Masters
from birl.models import fused_decoder
from birl.models.decoder import decoder_for
from birl.models.low_rank import AdapterWeights, RowGroup, adapted, hook


class Policies(Masters):
    """The masters of all policies; a name in `tensors` is POLICY/LAYER.lora_A. `past`: `lora.past` earlier versions of
    each policy, which a checkpoint has among its marks; all equal the base until the first is kept."""

    def __init__(self, model: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
        self.model = model
        self.origin = Origin(digest(model), lora.alpha)
        model.requires_grad_(False)
        layers: dict[str, Any] = {name: model.get_submodule(name) for name in targets(model, lora.targets)}
        scale = lora.alpha / lora.rank

        def made() -> LowRankMasters:  # same seed for all, so that none depends on the number of others
            return LowRankMasters(layers, rank=lora.rank, seed=lora.seed, scale=scale, dtype=dtype)

        self.trained = {name: made() for name in lora.policies}
        self.past = {name: [made() for _ in range(lora.past)] for name in lora.policies}
        self.tensors = {f"{name}/{key}": t for name, own in self.trained.items() for key, t in own.masters.items()}
        kept = [(f"league.{n}.{i}", own) for n, versions in self.past.items() for i, own in enumerate(versions)]
        self.marks = self.origin.marks | {
            f"{place}.{k}": t.detach() for place, own in kept for k, t in own.masters.items()
        }
        self.norms: dict[str, float] = {}  # of the last step's gradients, by policy
        if decoder_for(model) is None:
            fused_decoder.MADE[model] = None  # transformers' own layers, which hooks reach
            hook(model, layers)

    def active(self, batch: Batch) -> AbstractContextManager[None]:
        """Context in which passes of this micro-batch use its policy's adapter; gradients are collected if enabled."""
        own, trains = self.trained[batch.policy], torch.is_grad_enabled()
        if trains:
            own.collect()
        return adapted(self.model, [RowGroup(0, len(batch.tokens), own.weights)], trained=trains)

    def adapter(self, name: str, past: int | None = None) -> AdapterWeights:
        """A policy's current adapter, or its earlier version number `past`."""
        return (self.trained[name] if past is None else self.past[name][past]).weights

    @torch.no_grad()
    def keep(self, number: int) -> None:
        """Store the current policies as the `number`-th versions of the league, counted from 0, in place of the
        oldest."""
        for name, versions in self.past.items():
            versions[number % len(versions)].copy(self.trained[name])

    def gather(self) -> None:
        for own in self.trained.values():
            own.gather()

    def clip(self, most: float) -> Tensor:
        """Clip each policy's gradient to a norm of at most `most` (0: any); returns the norm of all before clipping. A
        policy without samples in the step has no gradient: the optimizer skips it, its state included."""
        norms: dict[str, Tensor] = {}
        for name, own in self.trained.items():
            tensors: Sequence[Tensor] = list(own.masters.values())
            if grads := [t.grad for t in tensors if t.grad is not None]:
                norms[name] = torch.nn.utils.get_total_norm(grads)
                if most > 0:
                    torch.nn.utils.clip_grads_with_norm_(tensors, most, norms[name])
        every = torch.stack(list(norms.values()))
        self.norms = dict(zip(norms, every.tolist(), strict=True))
        return torch.linalg.vector_norm(every)

    def publish(self) -> None:
        """Round the masters that were stepped: those with a norm, as a step may have set their gradients to None."""
        for name in self.norms:
            self.trained[name].round()

    def loaded(self) -> None:
        """Call after writing `tensors` and `marks`. Raises `BirlError` if they belong to another base."""
        self.origin.check()
        for own in [*self.trained.values(), *(v for versions in self.past.values() for v in versions)]:
            own.round()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.tensors.items()}
