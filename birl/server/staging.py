"""Weights that arrive: in pieces, where PUT /stage/{version} brings one after the other and POST /load takes all of
them; or in the broadcasts of a learner, from the group that the engine was asked to join, one at a time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from birl.engine.weights import check_layouts, layout
from birl.engines.collective import GLOO, BroadcastGroup, backend
from birl.engines.wire import Invitation
from birl.errors import WeightsFailed, first_line
from birl.models.device import gpu
from birl.models.released import Shapes
from birl.server.limits import Refused

ABANDONED = 600.0  # seconds without a new piece after which the others are dropped


@dataclass(slots=True, kw_only=True)
class Staging:
    """At most one version at a time, of at most `most` bytes: what does not fit into the model cannot be meant."""

    most: int
    version: int | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    touched: float = 0.0

    def begin(self, version: int) -> None:
        """Before a piece is read: another version makes room. Whether this one is welcome, /load decides."""
        self.sweep()
        if version != self.version:
            self.drop()
        self.version, self.touched = version, time.monotonic()

    def put(self, version: int, piece: Mapping[str, Tensor]) -> int:
        """Says how many bytes of tensors are there now. A tensor that comes again replaces the first."""
        if version != self.version:
            raise WeightsFailed("stale", f"Version {version} was replaced by {self.version} while it arrived.")
        both = {**self.tensors, **piece}
        size = sum(t.nbytes for t in both.values())
        if size > self.most:
            raise Refused(413, f"Version {version} has {size} bytes so far, and the model only {self.most}.")
        self.tensors, self.touched = both, time.monotonic()
        return size

    def take(self, version: int) -> dict[str, Tensor]:
        """All that came of `version`, which is then forgotten here."""
        self.sweep()
        if version != self.version or not self.tensors:
            staged = "nothing is" if self.version is None else f"only version {self.version} is"
            raise WeightsFailed(
                "missing", f"Version {version} was not staged ({staged}): PUT /stage/{version} first, or give a folder."
            )
        result = self.tensors
        self.drop()
        return result

    def sweep(self) -> None:
        if self.version is not None and time.monotonic() - self.touched > ABANDONED:
            self.drop()

    def drop_until(self, version: int) -> None:
        """What is staged of this version and older ones is not wanted any more."""
        if self.version is not None and self.version <= version:
            self.drop()

    def drop(self) -> None:
        self.version, self.tensors = None, {}


def read(data: bytes, version: int) -> dict[str, Tensor]:
    """The tensors of one piece. Raises `WeightsFailed`."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        why = first_line(error)
        raise WeightsFailed("truncated", f"A piece of version {version} is damaged: {why}.") from error


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
