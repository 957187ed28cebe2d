"""How the learner's weights come to what samples from them, as the loop sees it; and the case of an embedded engine.
Engines in other processes have `publish.Sender`."""

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
    """What an update cost: `seconds` in all, of which generation stood still for `paused` in the slowest engine.
    `gap`: mean |engine log-prob - learner log-prob| of the canary [nats a token]."""

    version: int = 0
    digest: str = ""
    seconds: float = 0.0
    paused: float = 0.0
    bytes: int = 0
    gap: float = nan


class Publisher(Protocol):
    @property
    def sent_digest(self) -> str:
        """Of the weights that engines elsewhere have, where no rank has all of them; else empty."""
        ...

    async def close(self) -> None:
        """Call before the engines are closed: when this returns, nothing is asked of them any more."""
        ...

    async def publish(self, wait: bool = True) -> Sent:
        """The engines get the weights as they are now. Without `wait` their proof may come later: ask `proved`."""
        ...

    async def proved(self) -> float:
        """Waits for what the engines still have to prove; mean |engine - learner| of the last canary, NaN without one.
        Call before training on tokens of the newest weights."""
        ...

    async def rest(self) -> None:
        """Before the learner computes: engines that share its device give their memory back."""


class Memory:
    """The engine samples from the learner's own weights: there is nothing to send."""

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
    """The embedded engine has weights of its own, because the learner's are split over several ranks."""

    refresh: Callable[[], None]
    compute: Executor

    async def publish(self, wait: bool = True) -> Sent:
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(self.compute, self.refresh)
        return Sent(seconds=time.perf_counter() - began)


def published(model: nn.Module) -> dict[str, Tensor]:
    """What an engine needs of a learner's module: parameters in the type that it computes in, tied ones once, without
    heads that only training reads. Of what is quantised the matrix that training multiplies by, in CPU memory."""
    quantized = quantized_layers(model)
    return {
        name: quantized[name].matrix().cpu() if name in quantized else p.data
        for name, p in model.named_parameters()
        if name.split(".")[0] not in HEADS
    }


def released(model: nn.Module) -> dict[str, Tensor]:
    """What an engine of another project needs of a learner's module. No copies where the module has the same tensors;
    views of one copy where it holds several together."""
    return reverted(model, published(model) | buffers(model))
