"""birl's session as a client of verifiers, and its rubrics, watched."""

import functools
import inspect
from contextvars import ContextVar
from typing import Any

from birl.envs.adapters.package import imported
from birl.errors import TooLong
from birl.types import Message, Model, ToolCall

KIND = "verifiers"

#: what went wrong in the reward functions of the episode that is played
FAILURES: ContextVar[list[Exception]] = ContextVar("failures")


def client_of(model: Model) -> Any:
    """A `verifiers.clients.Client` that asks `model`. The environment's own sampling arguments are not read: the run's
    apply."""

    class Session(imported("verifiers.clients", KIND).Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            try:
                reply = await self.client.ask(messages_of(prompt), tools=[schema(tool) for tool in tools or ()])
            except TooLong as error:  # the environment ends its rollout then, and scores what there is
                raise imported("verifiers.errors", KIND).OverlongPromptError(str(error)) from error
            return response(reply, model)

        async def close(self) -> None:
            pass

        def never(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("answers are made by get_response")

        setup_client = to_native_tool = to_native_prompt = get_native_response = never
        raise_from_native_response = from_native_response = never

    return Session(model)


def messages_of(prompt: Any) -> tuple[Message, ...]:
    """verifiers' messages as birl's. A tool's answer gets the tool's name, which templates want."""
    names: dict[str, str] = {}
    result = []
    for message in prompt:
        calls = getattr(message, "tool_calls", None) or ()
        names |= {call.id: call.name for call in calls}
        answers = getattr(message, "tool_call_id", "")
        result.append(
            Message(
                role=message.role,
                content=text(message.content),
                thinking=getattr(message, "reasoning_content", None) or "",
                tool_calls=tuple(ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in calls),
                tool_call_id=answers,
                name=names.get(answers, ""),
            )
        )
    return tuple(result)


def text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if other := [part["type"] for part in parts if part["type"] != "text"]:
        raise ValueError(f"a message has a part of type {other[0]}; only text can be shown to the model")
    return "".join(part["text"] for part in parts)


def schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def response(reply: Message, model: str) -> Any:
    types = imported("verifiers.types", KIND)
    calls = [
        types.ToolCall(id=call.id or f"call_{i}", name=call.name, arguments=call.arguments)
        for i, call in enumerate(reply.tool_calls)
    ]
    message = types.ResponseMessage(
        content=reply.content,
        reasoning_content=reply.thinking or None,
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return types.Response(id="", created=0, model=model, message=message)


def watch(rubric: Any) -> None:
    """verifiers makes a 0 of a reward function that fails; note the failure, so that the episode has no reward."""
    rubric.funcs = [watched(function) for function in rubric.funcs]
    for inner in getattr(rubric, "rubrics", ()):
        watch(inner)


def watched(function: Any) -> Any:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        try:
            result = function(*args, **kwargs)
            return float(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            FAILURES.get().append(error)
            raise

    return call
