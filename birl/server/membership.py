"""An engine's part in the broadcasts of a learner: the group that it was asked to join, one at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from birl.engine.weights import check_layouts, layout
from birl.engines.collective import GLOO, BroadcastGroup, backend
from birl.engines.wire import Invitation
from birl.errors import WeightsFailed
from birl.models.device import gpu
from birl.models.released import Shapes
from birl.server.limits import Refused


@dataclass(slots=True, kw_only=True)
class Membership:
    """`shapes` and `device` are those of the engine's own weights."""

    shapes: Shapes
    device: torch.device
    group: BroadcastGroup | None = None

    async def join(self, given: Invitation) -> None:
        """Returns when all ranks are there. Leaves the group before. Raises `WeightsFailed` and `Refused`."""
        self.check(given)
        self.leave()
        self.group = group = BroadcastGroup(given, torch.device("cpu") if given.backend == GLOO else self.device)
        try:
            await group.open()
        except BaseException:
            group.close()
            raise

    async def receive(self, name: str) -> dict[str, Tensor]:
        """All tensors, as rank 0 sends them next in the group of this name. Raises `WeightsFailed`; the group is left
        then."""
        group = self.group
        if group is None or group.name != name or group.closed.is_set():
            raise WeightsFailed("unreachable", f"The engine is not in the group {name!r}: POST /join first.")
        try:
            return await group.receive(self.shapes)
        except BaseException:
            group.close()
            raise

    def leave(self) -> None:
        """Callers that wait for the group get `WeightsFailed`."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def check(self, given: Invitation) -> None:
        """Raises `WeightsFailed` and `Refused` where nothing good would come of it."""
        if given.backend != GLOO and given.backend != backend(self.device):
            raise Refused(
                400,
                f"The learner broadcasts with {given.backend}, and the engine's weights are on {self.device.type}: use "
                "weights.method=direct.",
            )
        if given.gpu and given.gpu == gpu(self.device):
            raise Refused(400, "Learner and engine are on one GPU, and NCCL wants two: use weights.method=ipc.")
        check_layouts(
            "What would be broadcast",
            {name: layout(shape, dtype) for name, shape, dtype in given.tensors},
            {name: layout(*own) for name, own in self.shapes.items()},
        )
