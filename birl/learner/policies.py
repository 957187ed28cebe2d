"""Several policies over one base that is never changed: each has low-rank matrices and an optimizer's state of its own,
and learns from its own samples alone. A league keeps earlier versions of them, which are sampled and not trained.

Rows of a micro-batch are all of one policy (`Batch.policy`), whose matrices are added to the base's products
(`models/low_rank.py`) as the engine adds them. So no weights are merged, and none change where another policy learns.
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
    """The masters of all policies; a name in `tensors` is POLICY/LAYER.lora_A. `past`: of each policy `lora.past`
    earlier versions, which a checkpoint has among its marks; all of them are the base before the first is kept."""

    def __init__(self, model: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
        self.model = model
        self.origin = Origin(digest(model), lora.alpha)
        model.requires_grad_(False)
        layers: dict[str, Any] = {name: model.get_submodule(name) for name in targets(model, lora.targets)}
        scale = lora.alpha / lora.rank

        def made() -> LowRankMasters:  # all begin alike, so that none depends on how many others there are
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
        """Within, passes of this micro-batch are its policy's; where they have a gradient, it is collected."""
        own, trains = self.trained[batch.policy], torch.is_grad_enabled()
        if trains:
            own.collect()
        return adapted(self.model, [RowGroup(0, len(batch.tokens), own.weights)], trained=trains)

    def adapter(self, name: str, past: int | None = None) -> AdapterWeights:
        """What a policy adds to the base now, or what the version in place `past` does."""
        return (self.trained[name] if past is None else self.past[name][past]).weights

    @torch.no_grad()
    def keep(self, number: int) -> None:
        """The policies as they are now become the `number`-th versions of the league, counted from 0, in the place of
        the oldest."""
        for name, versions in self.past.items():
            versions[number % len(versions)].copy(self.trained[name])

    def gather(self) -> None:
        for own in self.trained.values():
            own.gather()

    def clip(self, most: float) -> Tensor:
        """Each policy's gradient to a norm of at most `most` (0: any); gives that of all of them before. A policy
        without samples in the step has no gradient: the optimizer passes it over, its state included."""
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
        """Round anew what has moved."""
        for own in self.trained.values():
            if any(t.grad is not None for t in own.masters.values()):
                own.round()

    def loaded(self) -> None:
        """New values were written into `tensors` and `marks`. Raises `BirlError` where they belong to another base."""
        self.origin.check()
        for own in [*self.trained.values(), *(v for versions in self.past.values() for v in versions)]:
            own.round()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.tensors.items()}
