"""The objects of an RL run on rank 0, as `build.py` makes them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from birl.engine.engine import EmbeddedEngine
from birl.learner.policy import Policy
from birl.rollout.evaluate import EvaluationPlan, data_digest
from birl.rollout.group import Rollout
from birl.rollout.scorer import Progress
from birl.seeds import derive_seed
from birl.text.chat import Chat
from birl.track.tracker import Tracker
from birl.train.step import RLWorker
from birl.types import SamplingParams, Task
from birl.weights.publisher import Publisher

if TYPE_CHECKING:
    from birl.data.order import Order
    from birl.data.tasks import Tasks
    from birl.engines.servers import Servers
    from birl.engines.spread import Spread


@dataclass(frozen=True, kw_only=True)
class Parts:
    run: Path
    worker: RLWorker
    engine: "EmbeddedEngine | Spread | Servers"
    rollout: Rollout
    params: SamplingParams
    train: Sequence["Tasks"]
    stream: Callable[[int], Iterator[Task]]  # position -> tasks from there on
    order: "Order | None"  # takes the place of the stream where tasks are chosen by the run's results
    plan_validation: EvaluationPlan | None
    tracker: Tracker
    publisher: Publisher
    resume_from: Path | None
    reward_weights: Mapping[str, float]  # of each reward function
    progress: Progress
    opened: AsyncExitStack

    @property
    def policy(self) -> Policy:
        return self.worker.policy

    @property
    def chat(self) -> Chat:
        return self.policy.chat

    @cached_property
    def validation_digest(self) -> str:
        """Of the questions that are validated on."""
        return data_digest(self.plan_validation.tasks if self.plan_validation else ())

    @property
    def validation_rollout(self) -> Rollout:
        """The same but for its seed: validation draws other numbers than training."""
        return replace(self.rollout, seed=derive_seed(self.rollout.seed, -1))

    async def close(self) -> None:
        await asyncio.to_thread(self.worker.checkpoints.writer.finish)
        await self.opened.aclose()
        self.tracker.close()
