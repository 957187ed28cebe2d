"""Reward functions on the machine that started the job, while everything else runs in Modal's cloud.

In the cloud, `birl.launch.modal_rewards:NAME` is an ordinary reward function: it puts the answers into a queue and
waits for their rewards. Here, `answer` takes them out, calls the Python function of that name, and puts the rewards
back. Both write JSON text, so nothing that a model wrote is executed.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from queue import Empty
from typing import Any

from birl.launch.modal_plan import settings
from birl.rewards.functions import PER_CALL
from birl.types import UNSCORED

ASKED = "asked"  # the partition of requests; each reply has its own
WAIT = 3600.0  # s; in practice the learner's reward.timeout ends a request
KEEP = 3600  # s that a reply is kept until it is fetched
LOOK = 2.0  # s between two checks whether the job is over


def __getattr__(name: str) -> Callable[..., list[Any]]:
    """Any name is a function: only the other machine knows which exist."""
    if name.startswith("_"):
        raise AttributeError(name)

    def ask(completions: list[str], prompts: list[Any], **columns: Any) -> list[Any]:
        queue = queue_of(settings().app, settings().environment)
        number = f"{os.getpid()}-{secrets.token_hex(8)}"
        state = vars(columns["trainer_state"]) if "trainer_state" in columns else None
        columns = {name: value for name, value in columns.items() if name not in PER_CALL}
        question = {"id": number, "name": name, "completions": completions, "prompts": prompts, "columns": columns}
        question["state"] = state
        queue.put(json.dumps(question), partition=ASKED)
        result = json.loads(queue.get(partition=number, timeout=WAIT))
        if "error" in result:
            raise RuntimeError(result["error"])
        return [RuntimeError(value) if isinstance(value, str) else value for value in result["values"]]

    ask.__name__ = name
    return ask


def queue_of(app: str, environment: str = "") -> Any:
    modal: Any = import_module("modal")
    return modal.Queue.from_name(f"{app}-rewards", environment_name=environment or None, create_if_missing=True)


def answer(queue: Any, functions: Mapping[str, Callable[..., Any]], over: Callable[[], bool]) -> int:
    """Answer requests from `queue` until `over()`. Returns how many were answered."""
    return asyncio.run(_answer(queue, functions, over))


async def _answer(queue: Any, functions: Mapping[str, Callable[..., Any]], over: Callable[[], bool]) -> int:
    from birl.rewards.score import Rewards

    rewards = {name: Rewards([function], timeout=WAIT) for name, function in functions.items()}
    open_ones: set[asyncio.Task[None]] = set()
    answered = 0
    try:
        while not over():
            try:
                question = json.loads(await queue.get.aio(partition=ASKED, timeout=LOOK))
            except Empty:
                continue
            except Exception as error:  # network failure; the cloud keeps waiting
                print(f"birl: no questions about rewards can be heard now: {error}", flush=True)
                await asyncio.sleep(LOOK)
                continue
            answered += 1
            open_ones.add(task := asyncio.create_task(_one(queue, rewards, question)))
            task.add_done_callback(open_ones.discard)
        await asyncio.gather(*open_ones)
        return answered
    finally:
        for one in rewards.values():
            await one.close()


async def _one(queue: Any, rewards: Mapping[str, Any], question: dict[str, Any]) -> None:
    columns = dict(question["columns"])
    n = len(question["completions"])
    gold = columns.pop("gold", None) or [None] * n
    try:
        asked = rewards[question["name"]]
        scores = await asked.score(question["prompts"], question["completions"], columns, gold, question.get("state"))
        values = [None if s.detail == UNSCORED else s.detail if s.detail else s.value for s in scores]
        result: dict[str, Any] = {"values": values}
    except Exception as error:  # any exception of the user's function, or a name that does not exist here
        result = {"error": f"{type(error).__name__}: {error}"}
    await queue.put.aio(json.dumps(result), partition=question["id"], partition_ttl=KEEP)
