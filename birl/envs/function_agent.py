"""An agent that is one function, sync or async. It is called with what it names:

    task       the row of the task: its columns, `prompt` (text or messages) and `answer`
    model      `await model.ask(messages)`: the model without a client (for async functions)
    base_url   the address of this episode's OpenAI and Anthropic API, for any client
    api_key    what such a client wants as a key

It returns the reward, or None when it was sent to base_url/reward.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from birl.envs.calls import AGENTS, called
from birl.types import Model, Task

OFFERED = ("task", "model", "base_url", "api_key")
KEY = "birl"  # clients insist on one; the address itself is the secret


class FunctionAgent:
    def __init__(
        self, function: Callable[..., Any], names: Sequence[str], task: Task, options: Mapping[str, Any]
    ) -> None:
        self.function, self.names, self.task, self.options = function, names, task, options

    async def run(self, model: Model) -> float | Mapping[str, float]:
        given = {name: self._given(name, model) for name in self.names}
        return await called(partial(self.function, **given, **self.options), threads=AGENTS)

    def _given(self, name: str, model: Model) -> Any:
        match name:
            case "task":
                return row(self.task)
            case "model":
                return model
            case "base_url":
                return model.base_url
            case _:
                return KEY

    async def close(self) -> None:
        pass


def row(task: Task) -> dict[str, Any]:
    """A task as plain data."""
    prompt = task.prompt
    plain = prompt if isinstance(prompt, str) else [{"role": m.role, "content": m.content} for m in prompt]
    return {**task.columns, "prompt": plain, "answer": task.answer}
