"""Weights of a few versions before the current one, in CPU memory: tokens that are older are compared under those that
sampled them.

Memory: a copy of the trained weights for each version, in the type that the module holds them in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.learner.learner import Learner
from birl.models.forward import weights_changed
from birl.parallel.layout import drop_gathered


class Past:
    """(every rank) Of at most `most` versions; each rank has the parts that are its own."""

    def __init__(self, learner: Learner, most: int) -> None:
        self.learner, self.most = learner, most
        self.versions: dict[int, list[Tensor]] = {}
        trained = [p for p in learner.model.parameters() if p.requires_grad]
        # of what is quantised only what LoRA trains changes
        self.parameters = [t for p in trained for t in (p.master.tensors().values() if p.is_meta else (p,))]  # pyright: ignore
        # where parameters may point to other memory, without a copy
        self.plain = not learner.ranks.sharded and learner.device.type == "cpu"

    @torch.no_grad()
    def keep(self) -> None:
        """The weights as they are now; the oldest of too many go."""
        if self.most and self.learner.version not in self.versions:
            self.versions[self.learner.version] = self._copies()
        for version in sorted(self.versions)[: -self.most or None]:
            del self.versions[version]

    @contextmanager
    def instead(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that puts the weights of a kept version, or those of now, into the module (compute thread,
        between two steps of an engine). At the end those of now are back, bit for bit."""
        now = [p.data for p in self.parameters] if self.plain else self._copies()
        inside = current = self.learner.version

        def put(version: int) -> None:
            nonlocal inside
            if version != inside:
                inside = version
                self._put(now if version == current else self.versions[version])

        try:
            yield put
        finally:
            put(current)

    def _copies(self) -> list[Tensor]:
        return [_own(p).to("cpu", copy=True) for p in self.parameters]

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        drop_gathered(self.learner.outputs)
        for parameter, weight in zip(self.parameters, weights, strict=True):
            if self.plain:
                parameter.data = weight
            else:
                _own(parameter).copy_(weight)
        weights_changed(self.learner.model)


def _own(parameter: Tensor) -> Tensor:
    """This rank's part of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
