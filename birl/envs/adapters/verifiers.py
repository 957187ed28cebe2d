"""verifiers 0.3: an `Environment` from `load_environment` of an installed package or a local file. verifiers 0.4: a
`Taskset` (verifiers_tasksets.py). The installed version decides.

birl rl env=verifiers env.task=my_env.py env.parameters=[split=easy]

An environment runs its own rollout and scores it with its own rubric. Its client is the session, in this process, which
records the exact tokens of all turns.
"""

import functools
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from birl.config.schema.kinds import Whole
from birl.envs.adapters.package import arguments, imported, unknown
from birl.envs.adapters.verifiers_chat import KIND
from birl.envs.adapters.verifiers_tasksets import Tasksets
from birl.errors import BirlError, TooLong
from birl.named import from_file
from birl.types import Message, Model, Stop, Task, ToolCall

Reward = float | Mapping[str, float]


class Loaded:
    """An environment of verifiers 0.3 and its rows, shared by all episodes, as `Tasksets` are for 0.4."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def tasks(self, split: str, most: int, behind: int) -> list[dict[str, Any]]:
        return [
            {"prompt": prompt_text(row["prompt"]), "answer": str(row.get("answer", ""))}
            for row in self.read(split)[: most or None]
        ]

    def read(self, split: str) -> list[dict[str, Any]]:
        if split not in self.rows:
            known = self.env.build_eval_dataset() if split == "validation" else self.env.build_dataset()
            self.rows[split] = [dict(row) for row in known or ()]
        return self.rows[split]

    async def play(self, split: str, number: int, model: Model) -> tuple[Reward, dict[str, float], bool]:
        failures: list[Exception] = []
        FAILURES.set(failures)
        state = await self.env.rollout(self.read(split)[number], client_of(model), "policy", {})
        try:
            if state.get("error") is not None:
                raise state["error"]
            if state.get("timed_out"):
                raise RuntimeError("the environment's own timeout_seconds is over")
            await self.env.rubric.score_rollout(state)
        finally:
            await self.env.rubric.cleanup(state)
        if failures:  # the rubric made a reward of 0 of it
            raise failures[0]
        return float(state["reward"]), dict(state.get("metrics") or {}), bool(state.get("is_truncated"))

    async def close(self) -> None:
        await self.env._teardown()


class Verifiers:
    @dataclass
    class Config:
        task: str = ""
        """Name of an installed package, or my_env.py: with `load_environment` (verifiers 0.3) or a taskset (0.4)."""
        parameters: list[str] = field(default_factory=list[str])
        """0.3: arguments of `load_environment`. 0.4: options of vf-eval after --env, such as taskset.split=train."""
        validation: list[str] = field(default_factory=list[str])
        """0.4: `parameters` that differ for validation, such as taskset.split=test."""
        rows: Whole = 0
        """Number of training rows. 0: all."""
        validation_rows: Whole = 100
        """Rows of the evaluation dataset, if there is one (0.4: see `validation`; else the rows after the first
        `rows`). 0: all."""

    @staticmethod
    def shared(config: Config) -> Loaded | Tasksets:
        vf = imported("verifiers", KIND)
        if not config.task:
            raise BirlError("env=verifiers needs env.task: the name of an installed package, or my_env.py.")
        if not hasattr(vf, "load_environment"):
            return Tasksets(config)
        if config.validation:
            raise BirlError(f"env.validation: verifiers {vf.__version__} has an evaluation dataset; 0.4 has this key.")
        return Loaded(loaded(config.task, config.parameters))

    @staticmethod
    def tasks(config: Config, split: str, shared: Loaded | Tasksets) -> list[dict[str, Any]]:
        most = config.validation_rows if split == "validation" else config.rows
        rows = shared.tasks(split, most, config.rows)
        if not all(row["answer"] for row in rows):  # only the environment itself reads answers
            rows = [{"prompt": row["prompt"]} for row in rows]
        return [{**row, "split": split, "number": i} for i, row in enumerate(rows)]

    def __init__(self, task: Task, shared: Loaded | Tasksets) -> None:
        self.source, self.place = shared, (task.columns["split"], task.columns["number"])
        self.info: dict[str, float] = {}
        self.truncated = False

    async def run(self, model: Model) -> Reward:
        reward, self.info, self.truncated = await self.source.play(*self.place, model)
        return reward

    async def close(self) -> None:
        pass  # its rollout always cleans up


def prompt_text(prompt: Any) -> str:
    """A row's prompt as text, for its length and for the viewer; the environment renders it itself."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(m.get("content") or "") for m in prompt)


def loaded(task: str, parameters: list[str]) -> Any:
    """The environment of env.task. Raises `BirlError`."""
    vf = imported("verifiers", KIND)
    if not task.endswith(".py"):
        names = {module.name for module in pkgutil.iter_modules()}
        if task.replace("-", "_").rpartition("/")[2] not in names:
            raise unknown("env.task", task, names)
        return made(task, parameters, vf.load_environment, task)
    if not Path(task).is_file():
        raise BirlError(f"env.task={task}: there is no such file in {Path.cwd()}.")
    result = from_file(Path(task))
    if not hasattr(result, "load_environment"):
        told = f" Tasksets need verifiers 0.4; {vf.__version__} is installed." if hasattr(result, "__all__") else ""
        raise BirlError(f"env.task={task}: it has no function load_environment.{told}")
    return made(task, parameters, result.load_environment)


def made(task: str, parameters: list[str], load: Any, *name: str) -> Any:
    with signals_kept():
        env = load(*name, **arguments(parameters))
    if not env.score_rollouts:
        raise BirlError(f"env.task={task}: it has score_rollouts=False, so its episodes have no reward.")
    watch(env.rubric, task)
    return env


@contextmanager
def signals_kept() -> Iterator[None]:
    """Context that keeps the run's handlers of SIGINT and SIGTERM: an environment replaces them when it is made, which
    is only allowed in the main thread."""
    module = imported("verifiers.legacy.envs.environment", KIND)
    real = module.signal
    module.signal = SimpleNamespace(**{**vars(real), "signal": lambda *args: None})
    try:
        yield
    finally:
        module.signal = real


# errors in the reward functions of the current episode
FAILURES: ContextVar[list[Exception]] = ContextVar("failures")


def client_of(model: Model) -> Any:
    """A `verifiers.clients.Client` that calls `model`. The environment's own sampling arguments are ignored: the run's
    apply."""

    class Session(imported("verifiers.clients", KIND).Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            try:
                offered = [schema(tool) for tool in tools or ()]
                reply, turn = await self.client.answer(messages_of(prompt), self.client.params, tools=offered)
            except TooLong as error:  # the environment then ends its rollout, and scores what there is
                raise imported("verifiers.errors", KIND).OverlongPromptError(str(error)) from error
            return response(reply, model, turn.completion.stop is Stop.LENGTH)

        async def close(self) -> None:
            pass

        def never(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("answers are made by get_response")

        setup_client = to_native_tool = to_native_prompt = get_native_response = never
        raise_from_native_response = from_native_response = never

    return Session(model)


def messages_of(prompt: Any) -> tuple[Message, ...]:
    """Convert verifiers' messages to birl's. A tool message gets the tool's name, which templates need."""
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


def response(reply: Message, model: str, cut: bool) -> Any:
    types = imported("verifiers.types", KIND)
    calls = [
        types.ToolCall(id=call.id or f"call_{i}", name=call.name, arguments=call.arguments)
        for i, call in enumerate(reply.tool_calls)
    ]
    message = types.ResponseMessage(
        content=reply.content,
        reasoning_content=reply.thinking or None,
        tool_calls=calls or None,
        finish_reason="length" if cut else "tool_calls" if calls else "stop",
        is_truncated=cut,
    )
    return types.Response(id="", created=0, model=model, message=message)


def watch(rubric: Any, task: str) -> None:
    """verifiers turns a failed reward function into a 0; record the failure, so that the episode has no reward. A
    function without a weight is only a metric. Raises `BirlError` for functions that score groups."""
    if rubric.has_group_rewards:
        raise BirlError(f"env.task={task}: its rubric scores groups, and episodes are scored alone here.")
    weighed = zip(rubric.funcs, rubric.weights, strict=True)
    rubric.funcs = [watched(function) if weight else function for function, weight in weighed]
    of_group = getattr(rubric, "env_map", {}).values()  # the environments of an EnvGroup
    for inner in (*getattr(rubric, "rubrics", ()), *(env.rubric for env in of_group)):
        watch(inner, task)


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
