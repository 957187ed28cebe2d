"""How the learner's weights are published to the engine, as the training loop sees it, and the embedded engine's case.
For engines in other processes see `publish.Sender`."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from math import nan
from typing import Protocol

from torch import Tensor, nn

from birl.models.heads import HEADS
from birl.models.quantized import quantized_layers
from birl.models.released import buffers, reverted


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Cost of an update: `seconds` in all, of which generation was paused for `paused` in the slowest engine. `gap`:
    mean |engine log-prob - learner log-prob| of the canary [nats per token]."""

    version: int = 0
    digest: str = ""
    seconds: float = 0.0
    paused: float = 0.0
    bytes: int = 0
    gap: float = nan


class Publisher(Protocol):
    @property
    def sent_digest(self) -> str:
        """Digest of the weights that engines in other processes have, if these are sharded over ranks; else empty."""
        ...

    async def close(self) -> None:
        """Call before the engines are closed: after it returns, no further requests are sent to them."""
        ...

    async def publish(self, wait: bool = True) -> Sent:
        """Send the current weights to the engines. Without `wait` the canary may be pending: see `proved`."""
        ...

    async def proved(self) -> float:
        """Wait for the pending canary; returns its mean |engine - learner|, NaN without one. Call before training on
        tokens of the newest weights."""
        ...

    async def rest(self) -> None:
        """Call before the learner computes: engines that share its device free their memory."""


class Memory:
    """The engine samples from the learner's own weights: nothing is sent."""

    sent_digest = ""

    async def publish(self, wait: bool = True) -> Sent:
        return Sent()

    async def proved(self) -> float:
        return nan

    async def rest(self) -> None:
        return

    async def close(self) -> None:
        return


@dataclass(frozen=True)
class Refresh(Memory):
    """The embedded engine has a copy of the weights, because the learner's are sharded over several ranks."""

    refresh: Callable[[], None]
    compute: Executor

    async def publish(self, wait: bool = True) -> Sent:
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(self.compute, self.refresh)
        return Sent(seconds=time.perf_counter() - began)


def published(model: nn.Module) -> dict[str, Tensor]:
    """Weights that an engine needs of a learner's module: parameters in the dtype of computation, tied ones once,
    without heads that only training uses. Of quantised layers the matrix that training multiplies by, in CPU memory."""
    quantized = quantized_layers(model)
    return {
        name: quantized[name].matrix().cpu() if name in quantized else p.data
        for name, p in model.named_parameters()
        if name.split(".")[0] not in HEADS
    }


def released(model: nn.Module) -> dict[str, Tensor]:
    """Weights of a learner's module by the names of its released files, for engines of other projects. No copies if the
    module has the same tensors; views of one copy if it holds several joined."""
    return reverted(model, published(model) | buffers(model))
