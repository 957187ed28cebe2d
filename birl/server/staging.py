"""Incoming weights: in pieces, each by PUT /stage/{version}, then all loaded by POST /load; or in broadcasts of a
learner's group that the engine has joined, one group at a time."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from birl.engine.weights import check_layouts, layout
from birl.engines.collective import GLOO, BroadcastGroup, backend
from birl.engines.wire import AdapterParams, Invitation
from birl.errors import BirlError, WeightsFailed, first_line
from birl.kernels.tensors import BLOCK
from birl.learner.low_rank_run import NUMBERS, SharedBase
from birl.models.device import gpu
from birl.models.heads import head
from birl.models.low_rank import AdapterWeights, Factors
from birl.models.released import Shapes
from birl.server.limits import Refused
from birl.types import SamplingParams

ABANDONED = 600.0  # seconds without a new piece after which staged ones are dropped


@dataclass(slots=True, kw_only=True)
class Staging:
    """Staged tensors of one version, `most` bytes at most: more cannot fit into the model."""

    most: int
    version: int | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    touched: float = 0.0

    def begin(self, version: int) -> None:
        """Called before a piece is read: drops another version. Whether this one is valid is checked by /load."""
        self.sweep()
        if version != self.version:
            self.drop()
        self.version, self.touched = version, time.monotonic()

    def put(self, version: int, piece: Mapping[str, Tensor]) -> int:
        """Add a piece; returns the staged bytes. A tensor sent again replaces the first."""
        if version != self.version:
            raise WeightsFailed("stale", f"Version {version} was replaced by {self.version} during its upload.")
        both = {**self.tensors, **piece}
        size = sum(t.nbytes for t in both.values())
        if size > self.most:
            raise Refused(413, f"Version {version} has {size} bytes so far, but the model has only {self.most}.")
        self.tensors, self.touched = both, time.monotonic()
        return size

    def take(self, version: int) -> dict[str, Tensor]:
        """Return and clear the staged tensors of `version`."""
        self.sweep()
        if version != self.version or not self.tensors:
            staged = f"only version {self.version} is" if self.tensors else "nothing is"
            raise WeightsFailed(
                "missing", f"Version {version} was not staged ({staged}): PUT /stage/{version} first, or give a folder."
            )
        result = self.tensors
        self.drop()
        return result

    def sweep(self) -> None:
        if self.version is not None and time.monotonic() - self.touched > ABANDONED:
            self.drop()

    def drop(self) -> None:
        self.version, self.tensors = None, {}


def read(data: bytes, what: str) -> dict[str, Tensor]:
    """The tensors of `what`, a safetensors file. Raises `WeightsFailed`."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        why = first_line(error)
        raise WeightsFailed("truncated", f"{what} is damaged: {why}.") from error


@dataclass(slots=True)
class Adapters:
    """LoRA adapters that requests may name, evicted in LRU order."""

    model: nn.Module
    most: int = 2**32  # bytes
    base: SharedBase | None = None
    held: "OrderedDict[str, AdapterWeights]" = field(default_factory=OrderedDict)

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """(compute thread) Store A [R, K] and B [N, R], scaled, of each layer. Raises `BirlError` if they don't fit."""
        if self.base is None:
            self.base = SharedBase(self.model, head(self.model).weight.dtype)
        factors: dict[str, Factors] = {}
        for layer in dict.fromkeys(key.rpartition(".")[0] for key in tensors):
            own, a, b = self.base.layers.get(layer), tensors.get(f"{layer}.A"), tensors.get(f"{layer}.B")
            if own is None or a is None or b is None or a.ndim != 2 or len(a) % BLOCK or a.dtype != self.base.dtype:
                raise BirlError(f"adapters/{name}: {layer} is no layer of the model with A and B of its type.")
            if a.shape[1] != own.in_features or b.shape != (own.out_features, len(a)) or b.dtype != a.dtype:
                raise BirlError(f"adapters/{name}: {layer} has other shapes: {list(a.shape)} and {list(b.shape)}.")
            factors[layer] = Factors(a.to(self.base.device), b.to(self.base.device))
        if not factors:
            raise BirlError(f"adapters/{name[:80]}: it has no tensors.")
        self.held[name] = AdapterWeights(next(NUMBERS), factors)
        while len(self.held) > 1 and sum(a.nbytes for a in self.held.values()) > self.most:
            self.held.popitem(last=False)

    def named(self, params: SamplingParams) -> AdapterWeights | None:
        """The adapter of a request, or None. Raises `Refused` if it is not stored."""
        if not isinstance(params, AdapterParams) or not params.adapter:
            return None
        if params.adapter not in self.held:
            raise Refused(409, f"There is no adapter {params.adapter[:80]!r}: PUT /adapters/NAME first.", "adapter")
        self.held.move_to_end(params.adapter)
        return self.held[params.adapter]


@dataclass(slots=True, kw_only=True)
class Membership:
    """The engine's membership in a broadcast group. `shapes` and `device`: of the engine's weights."""

    shapes: Shapes
    device: torch.device
    group: BroadcastGroup | None = None

    async def join(self, given: Invitation) -> None:
        """Leave the current group and join this one, until it is complete. Raises `WeightsFailed`, `Refused`."""
        self.check(given)
        self.leave()
        self.group = group = BroadcastGroup(given, torch.device("cpu") if given.backend == GLOO else self.device)
        try:
            await group.open()
        except BaseException:
            group.close()
            raise

    async def receive(self, name: str) -> dict[str, Tensor]:
        """All tensors of the next broadcast in the group of this name. Raises `WeightsFailed`; the group is then
        left."""
        group = self.group
        if group is None or group.name != name or group.closed.is_set():
            raise WeightsFailed("unreachable", f"The engine is not in the group {name!r}: POST /join first.")
        try:
            return await group.receive(self.shapes)
        except BaseException:
            group.close()
            raise

    def leave(self) -> None:
        """Leave the group; waiting callers get `WeightsFailed`."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def check(self, given: Invitation) -> None:
        """Raise `WeightsFailed` and `Refused` if a broadcast could not succeed."""
        if given.backend != GLOO and given.backend != backend(self.device):
            raise Refused(
                400,
                f"The learner broadcasts with {given.backend}, and the engine's weights are on {self.device.type}: use "
                "weights.method=direct.",
            )
        if given.gpu and given.gpu == gpu(self.device):
            raise Refused(400, "Learner and engine are on one GPU, but NCCL needs two: use weights.method=ipc.")
        check_layouts(
            "The broadcast",
            {name: layout(shape, dtype) for name, shape, dtype in given.tensors},
            {name: layout(*own) for name, own in self.shapes.items()},
        )
