"""The weights that the embedded engine samples from: the learner's own module; or, where its weights are split over
ranks, or the engine has them in int8, a whole copy, brought up to date after each step."""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from birl.config import schema
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import open_engine
from birl.learner.learner import Learner
from birl.learner.policy import DTYPES, Policy
from birl.models.forward import weights_changed
from birl.models.load import cast
from birl.models.slices import fill, sketched
from birl.models.vision import give, language_model, pictures_of, still


@dataclass(slots=True, kw_only=True)
class Sampled:
    """`copy`: None where the engine has the learner's module; `version`: of the learner, that the copy is of; `int8`:
    the copy is rounded to that; `own`: the engine of this process."""

    policy: Policy
    learner: Learner
    dtype: str
    copy: nn.Module | None = None
    int8: bool = False
    version: int = 0
    own: EmbeddedEngine | None = None

    @property
    def model(self) -> nn.Module:
        return self.copy or self.learner.model

    def engine(self, keys: schema.Engine, context: int, longest: int, routes: bool) -> EmbeddedEngine:
        """An engine that samples from these weights; arguments as those of `open_engine`."""
        policy, learner = self.policy, self.learner
        ranks, device = learner.ranks, learner.device
        among = ranks.shares if device.type == "cpu" else 1
        self.int8 = keys.weights == "int8"
        if not ranks.sharded and not self.int8:
            self.own = open_engine(policy, keys, context, lambda: learner.version, longest, routes, among)
            return self.own
        sees = language_model(policy.model) is not None
        self.copy = cast(sketched(policy.folder, device, pictures=sees), DTYPES[self.dtype])
        give(self.copy, pictures_of(policy.model), frozen=bool(still(policy.model)))
        fill(self.copy.requires_grad_(False))
        copied = replace(policy, model=self.copy)
        self.own = open_engine(copied, keys, context, lambda: self.version, longest, routes, among)
        return self.own

    @torch.no_grad()
    def refresh(self) -> None:
        """(every rank) The copies become the learner's weights, one tensor after the other."""
        copies = {} if self.copy is None else dict(self.copy.named_parameters())
        for name, parameter in self.learner.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if name in copies:
                copies[name].copy_(whole)
        if self.copy is not None:
            weights_changed(self.copy)
            if self.int8:
                from birl.models.int8 import round_weights

                round_weights(self.copy)
        self.version = self.learner.version

    def rest(self) -> None:
        """(every rank) This process' engine makes room for what is trained."""
        if self.own is not None:
            self.own.rest()
