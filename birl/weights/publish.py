"""Weights on their way from the learner to engines in other processes: see docs/async.md for the methods.

tensors in the engines' type -> digests -> folder or buckets -> every engine loads and proves -> canary
"""

from dataclasses import dataclass
from math import nan

from torch import Tensor, nn

from birl.models.heads import HEADS


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


def published(model: nn.Module) -> dict[str, Tensor]:
    """What an engine needs of a learner's module: parameters in the type that it computes in, tied ones once, without
    heads that only training reads."""
    return {name: p.data for name, p in model.named_parameters() if name.split(".")[0] not in HEADS}


class Memory:
    """The engine samples from the learner's own weights: there is nothing to send."""

    async def publish(self) -> Sent:
        return Sent()

    async def rest(self) -> None:
        """Before the learner computes."""
