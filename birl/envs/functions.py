"""Agents and environments that are a single function, sync or async.

An agent gets those of these arguments that it names, and returns the reward, or None if it was sent to base_url/reward:

    task       the row of the task, a `TaskRow`: its columns, `prompt` as text and as `messages`, and `answer`
    model      `await model.ask(messages)`: the model without a client (for async functions)
    base_url   address of this episode's OpenAI and Anthropic API, for any client
    api_key    API key for such a client

RL2's environments are a function `step(state, action, extra_info)` on text, and optionally `reset(extra_info)` in the
same module, which returns the first state. `state`: all that the model saw, as text with special tokens; `action`: its
answer, without the end token. The function returns {"next_state", "reward", "score", "done", "extra_info"}; only
`reward` and `done` are required. If `next_state` begins with state + action, the model continues token by token;
otherwise it sees only the new text.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from birl.envs.calls import AGENTS, called
from birl.errors import BirlError, did_you_mean
from birl.text.tools import as_openai
from birl.types import Conversation, Feedback, Message, Model, Task

OFFERED = ("task", "model", "base_url", "api_key")
KEY = "birl"  # clients require one; the address itself is the secret
KEYS = ("next_state", "reward", "score", "done", "extra_info")


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
                return TaskRow(self.task)
            case "model":
                return model
            case "base_url":
                return model.base_url
            case _:
                return KEY

    async def close(self) -> None:
        pass


class TaskRow(dict[str, Any]):
    """The row of a task as JSON data, with the attributes of a `Task`."""

    def __init__(self, task: Task) -> None:
        super().__init__(row(task))
        for key in fields(Task):
            setattr(self, key.name, getattr(task, key.name))


def row(task: Task) -> dict[str, Any]:
    """Convert a task to plain data."""
    asked = (Message(role="user", content=task.prompt),) if isinstance(task.prompt, str) else task.prompt
    messages = [as_openai(m) for m in asked]
    return {**task.columns, "prompt": prompt(task), "messages": messages, "answer": task.answer}


def prompt(task: Task) -> str:
    """The prompt as text; several messages are separated by empty lines."""
    return task.prompt if isinstance(task.prompt, str) else "\n\n".join(m.content for m in task.prompt)


class StepFunction:
    """One episode of a step function. `text` renders a prompt of messages; `options`: keyword arguments."""

    def __init__(
        self, step: Callable[..., Any], task: Task, text: Callable[[Conversation], str], options: Mapping[str, Any]
    ) -> None:
        self.function, self.task, self.text, self.options = step, task, text, dict(options)
        self.extra: Any = task.columns.get("extra_info", dict(task.columns))
        self.state = ""

    async def start(self) -> str:
        reset = getattr(inspect.getmodule(self.function), "reset", None)
        self.state = self.text(self.task.prompt) if reset is None else await called(reset, self.extra)
        if not isinstance(self.state, str):
            raise BirlError(f"reset must return the first state as text, not {type(self.state).__name__}")
        return self.state

    async def step(self, reply: Message) -> Feedback:
        result = await called(partial(self.function, self.state, reply.content, self.extra, **self.options))
        if not isinstance(result, Mapping) or not {"reward", "done"} <= set(result):
            raise BirlError(f"step must return a dict with reward and done ({', '.join(KEYS)}), not {result!r:.200}")
        if unknown := sorted(set(result) - set(KEYS)):
            near = did_you_mean(unknown[0], KEYS)
            raise BirlError(f"step returned {unknown[0]!r}; known are {', '.join(KEYS)}.{near}")
        done, after = bool(result["done"]), result.get("next_state")
        if not done and not isinstance(after, str):
            raise BirlError(f"step must return next_state as text while done is false, not {after!r:.200}")
        self.state, self.extra = after if isinstance(after, str) else "", result.get("extra_info", self.extra)
        reward, score = result["reward"], result.get("score")
        return Feedback(prompt=None if done else self.state, reward=reward, score=score, done=done)

    async def close(self) -> None:
        pass
