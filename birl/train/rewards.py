"""Configuration -> what judges answers beside the environment."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from birl.config import schema
from birl.config.rules_sandbox import at_once, reward_timeout
from birl.learner.reward_model import RewardModel
from birl.rewards.judge import read_template
from birl.rewards.score import Rewards
from birl.rollout.group import Reply, Scorer
from birl.text.tools import as_dict
from birl.types import Task


@dataclass(slots=True)
class Progress:
    """How far the run is, for reward functions with a schedule: what TRL's `trainer_state` says. `steps`: finished;
    `epoch`: passes through the data, a fraction; `total` steps of the run, 0 where that is not known."""

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


def make_rewards(
    config: schema.RL | schema.Eval, compute: Executor, given: Sequence[Callable[..., Any] | str] = ()
) -> Rewards | None:
    """None where the environment alone rewards. A reward model is loaded here; where it is an address, a worker asks
    there."""
    keys, timeout = config.reward, reward_timeout(config)
    functions: list[Callable[..., Any] | str] = list(given) or list(schema.reward_functions(config))
    if not functions:
        return None
    served = keys.model.startswith(("http://", "https://"))
    if "model" in functions:
        judge = "endpoint" if served else compute.submit(RewardModel, keys.model, config.model, compute).result()
        functions[functions.index("model")] = judge
    return Rewards(
        functions,
        weights=keys.weights,
        timeout=timeout,
        workers=keys.workers,
        options={
            "format_pattern": keys.format_pattern,
            "length_target": keys.length_target,
            "address": keys.model,
            "endpoint_concurrency": keys.concurrency,
            "endpoint_timeout": timeout,
            "judge": keys.judge,
            "judge_template": read_template(keys.judge_prompt),
            "judge_tokens": keys.judge_tokens,
            "judge_cache": keys.judge_cache,
            "judge_concurrency": keys.concurrency,
            "judge_timeout": timeout,
            "code_partial": keys.code_partial,
            "sandbox": {**vars(config.sandbox), "workers": at_once(config)},
        },
    )


async def started(rewards: Rewards | None, opened: AsyncExitStack) -> asyncio.Future[None]:
    """Their start, on its way."""
    if rewards is None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        return ready
    starting = asyncio.create_task(rewards.start())
    opened.push_async_callback(rewards.close)
    opened.callback(starting.cancel)
    return starting


def scorer(rewards: Rewards | None, progress: Progress | None = None) -> Scorer | None:
    """Reward functions see the prompt as messages, or as text where there is no chat template; the row's columns, once
    for each; and the completions as text, or each as a list of one message where the row's own prompt is messages."""
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
