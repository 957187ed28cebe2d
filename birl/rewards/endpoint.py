"""A served reward model: vLLM's `/pooling` (`vllm serve MODEL --runner pooling`) and compatible servers."""

import json
import math
from typing import Any

from birl.config.schema import Reward
from birl.rewards.requests import NoAnswer, ask_all


async def endpoint(
    completions: list[str],
    prompts: list[Any],
    *,
    address: str = "",
    concurrency: int = Reward.concurrency,
    timeout: float = Reward.timeout,
) -> list[float | NoAnswer]:
    """One score for each completion: the last number of the server's response for each conversation.

    Requests have `{"messages": [...]}`, so that the server applies its own chat template.
    """
    bodies = []
    for prompt, completion in zip(prompts, completions, strict=True):
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        talk = [*asked, {"role": "assistant", "content": completion}]
        bodies.append({"messages": talk, "add_generation_prompt": False})
    return await ask_all(address, bodies, _score, concurrency=concurrency, timeout=timeout)


def _score(reply: Any) -> float:
    try:
        value = reply["data"][0]["data"]
        while isinstance(value, list):
            value = value[-1]
        score = float(value)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"gave no score: {json.dumps(reply)[:200]}")
    return score
