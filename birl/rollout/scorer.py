"""Calls reward functions for a group of replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from birl.rewards.score import Rewards
from birl.rollout.group import Reply, Scorer
from birl.text.tools import as_dict
from birl.types import Task


@dataclass(slots=True)
class Progress:
    """Progress of the run, for reward functions with a schedule: TRL's `trainer_state`. `steps`: finished; `epoch`:
    passes through the data, a fraction; `total`: steps of the run, 0 if unknown."""

    steps: int = 0
    total: int = 0
    epoch: float = 0.0
    epochs: int = 1

    def state(self) -> dict[str, Any]:
        return {
            "global_step": self.steps,
            "max_steps": self.total,
            "epoch": self.epoch,
            "num_train_epochs": self.epochs,
            "is_world_process_zero": True,
            "is_local_process_zero": True,
        }


def scorer(rewards: Rewards | None, progress: Progress | None = None) -> Scorer | None:
    """The scorer of a group. Functions get the prompt as messages, or as text without a chat template; the row's
    columns for each completion; and completions as text, or as lists of one message if the row's prompt is messages."""
    if rewards is None:
        return None
    progress = progress or Progress()

    async def score(task: Task, replies: list[Reply]) -> Sequence[Any]:
        n = len(replies)
        prompt = task.prompt if isinstance(task.prompt, str) else [as_dict(m) for m in task.prompt]
        columns = {name: [value] * n for name, value in task.columns.items()}
        columns["completion_ids"] = [list(reply.ids) for reply in replies]
        spoken = [[{"role": "assistant", "content": str(reply)}] if task.messages else str(reply) for reply in replies]
        return await rewards.score([prompt] * n, spoken, columns, [task.answer] * n, progress.state())

    return score
