"""A reward model behind an address: vLLM's `/pooling` (`vllm serve MODEL --runner pooling`) and what speaks like it."""

import json
import urllib.error
import urllib.request
from typing import Any


def endpoint(completions: list[str], prompts: list[Any], *, address: str = "") -> list[float]:
    """One score for each completion: the last number of what the server gives for each conversation.

    Asks with `{"messages": [...]}`, so that the server's own chat template makes the text. Raises `RuntimeError` with
    the server's words.
    """
    return [_ask(address, _talk(p, c)) for p, c in zip(prompts, completions, strict=True)]


def _talk(prompt: Any, completion: str) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*asked, {"role": "assistant", "content": completion}]


def _ask(address: str, messages: list[dict[str, str]]) -> float:
    body = {"messages": messages, "add_generation_prompt": False}
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:  # the reward's own deadline ends a call that hangs
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{address} says {error.code}: {error.read().decode(errors='replace')[:200]}") from error
    except urllib.error.URLError as error:
        raise RuntimeError(f"{address} cannot be reached: {error.reason}") from error
    try:
        value = found["data"][0]["data"]
        while isinstance(value, list):
            value = value[-1]
        return float(value)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(f"{address} gave no score: {json.dumps(found)[:200]}") from error
