"""Configuration -> what judges answers beside the environment."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Any

from birl.config import schema
from birl.config.decided import addressed, at_once, reward_timeout
from birl.learner.reward_model import RewardModel
from birl.rewards.judge_keys import settings
from birl.rewards.score import Rewards


def make_rewards(
    config: schema.RL | schema.Eval, compute: Executor, given: Sequence[Callable[..., Any] | str] = ()
) -> Rewards | None:
    """None where the environment alone rewards. A reward model is loaded here; where it is an address, a worker asks
    there."""
    keys, timeout = config.reward, reward_timeout(config)
    functions: list[Callable[..., Any] | str] = list(given) or list(schema.reward_functions(config))
    if not functions:
        return None
    served = addressed(keys.model)
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
            "panel": settings(config),
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
