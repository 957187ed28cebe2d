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

TRL's `tools` and `environment_factory` become a `ToolAgent`.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from birl.envs.calls import AGENTS, called
from birl.errors import BirlError, TooLong, did_you_mean, text_of
from birl.text.parts import Finder, content
from birl.text.tools import as_openai
from birl.types import Conversation, Feedback, Message, Model, Task, ToolCall

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


class ToolAgent:
    """The model calls functions until it answers without a call. `factory`: makes an object for each episode, whose
    public methods are tools, too; several factories are selected by the column `environment`. An exception of a tool is
    reported to the model, and counted. The reward is the object's `get_reward()`, else 0."""

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    factories: ClassVar[Mapping[str | None, Callable[[], Any]]] = {}
    schemas: ClassVar[Mapping[str | None, Sequence[Mapping[str, Any]]]] = {}

    def __init__(self, task: Task) -> None:
        self.task, self.functions = task, dict[str, Callable[..., Any]]()
        self.info = {"tools/calls": 0.0, "tools/failed": 0.0}

    async def run(self, model: Model) -> float:
        given, asked, made, name = row(self.task), self.task.prompt, None, None
        talk = (Message(role="user", content=asked),) if isinstance(asked, str) else asked
        if self.factories:
            if None not in self.factories and (name := given.pop("environment", None)) not in self.factories:
                raise BirlError(f"its row has environment={name!r}; there are {', '.join(map(str, self.factories))}.")
            made = await called(self.factories[name])
            if (seen := await called(partial(made.reset, **given))) is not None:
                more, last = told(seen), talk[-1]
                pictures = (*last.pictures, *more.pictures)
                talk = (*talk[:-1], replace(last, content=last.content + more.content, pictures=pictures))
        self.functions = {f.__name__: f for f in (*self.tools, *methods(made))}
        reply = await model.ask(talk, tools=self.schemas[name])
        with suppress(TooLong):  # the episode is cut, and judged as it is
            while reply.tool_calls:
                talk = (*talk, reply, *await self._answers(reply.tool_calls))
                reply = await model.ask(talk, tools=self.schemas[name])
        judge = getattr(made, "get_reward", None)
        return await called(judge) if judge else 0.0

    async def _answers(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Results in order. Coroutines run concurrently, unless a plain function is among the calls."""
        if all(inspect.iscoroutinefunction(self.functions.get(call.name)) for call in calls):
            return await asyncio.gather(*map(self._answer, calls))
        return [await self._answer(call) for call in calls]

    async def _answer(self, call: ToolCall) -> Message:
        self.info["tools/calls"] += 1
        try:
            if call.name not in self.functions:
                raise BirlError(f"there is no tool {call.name[:100]}; there are {', '.join(self.functions)}.")
            result = told(await called(partial(self.functions[call.name], **json.loads(call.arguments))))
        except Exception as error:
            self.info["tools/failed"] += 1
            result = told(f"Error: {text_of(error)}")
        return replace(result, tool_call_id=call.id, name=call.name)

    async def close(self) -> None:
        pass


def told(result: Any) -> Message:
    """A tool's result: a list of typed parts, or anything else as text. Raises `BirlError` for a part of another
    type."""
    parts = isinstance(result, list) and bool(result) and all(isinstance(part, Mapping) for part in result)
    text, pictures = content(result, Finder(folder=Path())) if parts else (str(result), ())
    return Message(role="tool", content=text, pictures=tuple(pictures))


def methods(made: Any) -> list[Callable[..., Any]]:
    """The tools of an environment of TRL: its public methods, except `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(type(made), inspect.isfunction)]
    return [getattr(made, n) for n in names if not n.startswith("_") and n not in ("reset", "get_reward")]
