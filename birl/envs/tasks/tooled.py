"""Bases of tasks: questions whose answer is a number, with one tool to call that takes a text; and programs that run in
a sandbox that all episodes share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from birl.config.schema.kinds import Positive, Whole
from birl.envs.tasks.rows import Drawn, Replies, answered_number, number
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Limits, Sandbox
from birl.types import Conversation, Feedback, Message, Task, ToolCall

Memory = Annotated[int, Field(ge=32)]  # MiB; less holds no interpreter


@dataclass(kw_only=True)
class Sandboxed(Drawn):
    seconds: Positive = 5.0
    """Time limit of a program [s]."""
    memory_mb: Memory = 256
    """Memory limit of a program [MiB]."""
    sandbox: Literal["auto", "zygote", "bubblewrap", "landlock", "process", "modal"] = "auto"
    """Sandbox for programs (docs/sandbox.md). auto: the best that works here."""
    workers: Whole = 0
    """Concurrent programs. 0: one per CPU core."""

    @property
    def limits(self) -> Limits:
        """Limits of one program."""
        return Limits(seconds=self.seconds, cpu_seconds=max(1, round(self.seconds + 0.5)), memory_mb=self.memory_mb)


async def shared_sandbox(config: Sandboxed) -> Sandbox:
    return await open_sandbox(config.sandbox, workers=config.workers)


@dataclass(kw_only=True)
class Turns(Drawn):
    turns: Replies = 4
    """Maximum number of replies; then the episode ends without an answer. env.max_turns limits it, too."""


def text_tool(name: str, about: str, argument: str, what: str) -> dict[str, Any]:
    """A tool with one text argument, in OpenAI's format."""
    given = {argument: {"type": "string", "description": what}}
    parameters = {"type": "object", "properties": given, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


class Tooled:
    """Base of such tasks, named `kind`; each row has a column named like the tool's argument, with the gold reply's
    argument.

    The reward is 1 if the last number of the reply without calls is the result, else 0. Errors in a call are returned
    to the model as the tool's result.
    """

    kind: ClassVar[str]
    tools: ClassVar[Sequence[dict[str, Any]]]

    @classmethod
    def called(cls) -> tuple[str, str]:
        """Names of the tool and of its argument."""
        (tool,) = cls.tools
        (argument,) = tool["function"]["parameters"]["required"]
        return tool["function"]["name"], argument

    @classmethod
    def gold(cls, task: Task) -> list[Message | str]:
        name, argument = cls.called()
        given = task.columns.get(argument)
        call = ToolCall(name=name, arguments=json.dumps({argument: given}), id="call-1")
        first = [Message(role="assistant", content="", tool_calls=(call,))] if given else []
        return [*first, f"The result is {task.answer}."]

    def __init__(self, task: Task, config: Turns) -> None:
        self.task, self.turns = task, config.turns
        self.turn = self.calls = 0

    async def start(self) -> Conversation:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        self.turn += 1
        if not reply.tool_calls:
            right = number(reply.content) == answered_number(self.task)
            return Feedback(reward=float(right), info={f"{self.kind}/calls": float(self.calls)})
        self.calls += len(reply.tool_calls)
        told = [
            Message(role="tool", content=await self.answer(call), tool_call_id=call.id, name=call.name)
            for call in reply.tool_calls
        ]
        return Feedback(messages=tuple(told), done=self.turn >= self.turns)

    async def answer(self, call: ToolCall) -> str:
        """The tool's result as text for the model."""
        name, argument = self.called()
        given = json.loads(call.arguments).get(argument)
        if call.name != name:
            return f"Error: there is no tool {call.name}; there is {name}."
        if not isinstance(given, str):
            return f"Error: {name} needs {argument}, as text."
        return await self.use(given)

    async def use(self, given: str) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        pass
