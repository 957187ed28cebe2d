"""An agent that is one function, sync or async. It is called with what it names:

    task       the row of the task: its columns, `prompt` as text and as `messages`, and `answer`
    model      `await model.ask(messages)`: the model without a client (for async functions)
    base_url   the address of this episode's OpenAI and Anthropic API, for any client
    api_key    what such a client wants as a key

It returns the reward, or None when it was sent to base_url/reward.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from birl.envs.calls import AGENTS, called
from birl.text.tools import as_openai
from birl.types import Message, Model, Task

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
    asked = (Message(role="user", content=task.prompt),) if isinstance(task.prompt, str) else task.prompt
    messages = [as_openai(m) for m in asked]
    return {**task.columns, "prompt": prompt(task), "messages": messages, "answer": task.answer}


def prompt(task: Task) -> str:
    """As text; several messages stand one below the other."""
    return task.prompt if isinstance(task.prompt, str) else "\n\n".join(m.content for m in task.prompt)
