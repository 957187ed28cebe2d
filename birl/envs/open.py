"""Opens environments by `env.kind`. The kind of object decides how it is used:

    class with `start` and `step`                 an environment (`birl.types.Env`)
    class with `run`                              an agent (`birl.types.Agent`)
    function with (state, action, extra_info)     RL2's step function
    any other function                            an agent: called with what it names of `task`, `model`, `base_url`...

A class gets the arguments that its constructor names of `task`, `config`, `shared` and `text` (renders a prompt). Its
own keys are the inner dataclass `Config`; a function's are its keyword-only parameters. A class may have `tasks(config,
split)` or `tasks(config, split, shared)`, which returns rows as in a data file, and `shared(config)`, which returns an
object for all episodes, closed with the run. `shared(config, folder)` gets the run folder (or None).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.load import read_section
from birl.envs.calls import called
from birl.envs.functions import OFFERED, FunctionAgent, StepFunction
from birl.envs.single_turn import SingleTurn
from birl.errors import BirlError
from birl.foreign import described
from birl.named import load
from birl.types import Agent, Conversation, Env, Task

#: built-in tasks, each with its own rows: name -> module:class
TASKS: dict[str, str] = {
    "arithmetic": "birl.envs.tasks.arithmetic:Arithmetic",
    "calculator": "birl.envs.tasks.calculator:Calculator",
    "code": "birl.envs.tasks.code:Code",
    "countdown": "birl.envs.tasks.countdown:Countdown",
    "guess_number": "birl.envs.tasks.guess_number:GuessNumber",
    "letter_counting": "birl.envs.tasks.letter_counting:LetterCounting",
    "python_tool": "birl.envs.tasks.python_tool:PythonTool",
    "search": "birl.envs.tasks.search:Search",
}
#: all names
BUILT_IN: dict[str, str] = {
    **TASKS,
    "miniwob": "birl.envs.browser.env:MiniWob",
    "webarena": "birl.envs.browser.env:WebArena",
    "program": "birl.envs.program:Program",
    "harbor": "birl.envs.harbor:Harbor",
    "mixture": "birl.envs.mixture:Mixture",
    "gem": "birl.envs.adapters.gem:Gem",
    "gymnasium": "birl.envs.adapters.gymnasium:Gymnasium",
    "openenv": "birl.envs.adapters.openenv:OpenEnv",
    "reasoning_gym": "birl.envs.adapters.reasoning_gym:ReasoningGym",
    "textarena": "birl.envs.adapters.textarena:TextArena",
    "textarena_self_play": "birl.envs.adapters.textarena:SelfPlay",
    "verifiers": "birl.envs.adapters.verifiers:Verifiers",
    "ray": "birl.launch.ray_envs:RayEnv",
}


@dataclass(slots=True, kw_only=True)
class World:
    """An opened environment. `rows(split)`: its own tasks, or those of several sets by name; None if they come from
    data. `turns`: an episode may have several. `agent`: it needs an address of the model. `runs`: agents, which call
    tools themselves. `section`: the `env` section of a task, if it differs between tasks."""

    kind: str
    open: Callable[[Task], Env | Agent]
    rows: Callable[[str], list[dict[str, Any]] | dict[str, list[dict[str, Any]]]] | None = None
    turns: bool = True
    agent: bool = False
    runs: bool = False
    section: Callable[[Task], schema.Env] | None = None
    shared: Any = field(default=None)

    async def close(self) -> None:
        close = getattr(self.shared, "close", None)
        if close is not None:
            await called(close)


def check_world(config: schema.Env, given: Any = None) -> None:
    """Raises `BirlError` if `env.kind` is unknown, or one of its keys is wrong. A class or function in `given` replaces
    the name."""
    if config.kind != "single_turn":
        named, settings = _named(config, given)
        if hasattr(named, "parts"):
            named.check(settings, config, check_world)
    if config.mcp:
        from birl.envs.mcp.tools import check_servers

        check_servers(config)


async def open_world(
    config: schema.Env, text: Callable[[Conversation], str], given: Any = None, folder: Path | None = None
) -> World:
    """Import and check the environment `env.kind`, and make the object shared by its episodes. `text` renders a prompt;
    `folder`: the run's, if there is one. Raises `BirlError`."""
    world = await _open_world(config, text, given, folder)
    if not config.mcp or config.kind == "mixture":  # its parts have them
        return world
    from birl.envs.mcp.tools import Equipped, servers_of

    try:
        if world.runs:
            raise BirlError(f"env.mcp: env.kind={config.kind} is an agent, which calls its tools itself.")
        servers = await servers_of(config)
    except BaseException:
        await world.close()
        raise
    return replace(world, open=lambda task: Equipped(world.open(task), servers), turns=True)  # pyright: ignore


async def _open_world(
    config: schema.Env, text: Callable[[Conversation], str], given: Any, folder: Path | None
) -> World:
    if config.kind == "single_turn":
        return World(kind=config.kind, open=SingleTurn, turns=False)
    named, settings = _named(config, given)
    if not isinstance(named, type):
        return _function(config, named, vars(settings), text)
    made: Any = named
    if hasattr(named, "parts"):
        parts = await made.parts(settings, config, partial(open_world, text=text, folder=folder))
        agent = any(world.agent for world in parts.worlds.values())
        return World(
            kind=config.kind, open=parts.open, rows=parts.rows, agent=agent, section=parts.section, shared=parts
        )
    agent = hasattr(named, "run")
    shared = await _shared(config, made.shared, settings, folder) if hasattr(named, "shared") else None
    offered = {"config": settings, "shared": shared, "text": text}
    takes = _takes(config, named, ("task", *offered))

    def open_one(task: Task) -> Env | Agent:
        return made(**{name: task if name == "task" else offered[name] for name in takes})

    rows = partial(_rows, config, made.tasks, settings, shared) if hasattr(named, "tasks") else None
    return World(kind=config.kind, open=open_one, rows=rows, agent=agent, runs=agent, shared=shared)


@dataclass
class Empty:
    """No keys."""


def own_section(kind: str) -> type:
    """The own keys of an environment, as a dataclass. Raises `BirlError` if `kind` is unknown."""
    return Empty if kind == "single_turn" else _section(kind, _found(kind))


def _named(config: schema.Env, given: Any) -> tuple[Any, Any]:
    """The object that `env.kind` names, and its own keys."""
    kind, named = config.kind, _found(config.kind) if given is None else given
    if not callable(named):
        raise BirlError(f"env.kind={kind}: a {type(named).__name__}; give a class or a function, or the name of one.")
    has = [name for name in ("start", "step") if hasattr(named, name)]
    if inspect.isclass(named) and len(has) < 2 and not (hasattr(named, "run") or hasattr(named, "parts")):
        other = "; what TRL and Gymnasium call reset is start here" if hasattr(named, "reset") else ""
        raise BirlError(
            f"env.kind={kind}: the class {named.__name__} is neither an environment, with the methods start and step, "
            f"nor an agent, with run (docs/environments.md){''.join(f'; it has {name} alone' for name in has)}{other}."
        )
    return named, read_section(_section(kind, named), config.options, "env.")


def _found(kind: str) -> Any:
    return load("env.kind", BUILT_IN.get(kind, kind), {"single_turn": None, **BUILT_IN})


def _section(kind: str, named: Any) -> type:
    """The `Config` of a class; for a function a dataclass of its keyword-only parameters."""
    if not inspect.isclass(named):
        return _parameters(kind, [p for p in inspect.signature(named).parameters.values() if p.kind is p.KEYWORD_ONLY])
    own = getattr(named, "Config", Empty)
    if not (inspect.isclass(own) and is_dataclass(own)):
        raise BirlError(f"env.kind={kind}: {named.__name__}.Config is no dataclass: put @dataclass above it.")
    for key in fields(own):
        if key.default is MISSING and key.default_factory is MISSING:
            raise BirlError(f"env.kind={kind}: its own key {key.name} needs a default, in {named.__name__}.Config.")
    return own


def _function(
    config: schema.Env, function: Callable[..., Any], settings: dict[str, Any], text: Callable[[Conversation], str]
) -> World:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if names == ["state", "action", "extra_info"]:
        return World(kind=config.kind, open=lambda task: StepFunction(function, task, text, settings))
    if unknown := [n for n in names if n not in OFFERED]:
        raise BirlError(
            f"env.kind={config.kind}: its parameter {unknown[0]!r} cannot be given. A step function has (state, "
            f"action, extra_info); an agent takes what it needs of {', '.join(OFFERED)}; keys of its own go behind a *."
        )
    return World(
        kind=config.kind,
        open=lambda task: FunctionAgent(function, names, task, settings),
        agent="base_url" in names,
        runs=True,
    )


def _parameters(kind: str, parameters: Iterable[inspect.Parameter]) -> type:
    """A dataclass of keyword-only parameters."""
    keys = []
    for p in parameters:
        if p.default is p.empty:
            raise BirlError(f"env.kind={kind}: its own key {p.name} needs a default.")
        if type(p.default) not in (int, float, bool, str):
            raise BirlError(f"env.kind={kind}: its own key {p.name} must be a number, true, false or text.")
        keys.append((p.name, type(p.default), field(default=p.default)))
    return make_dataclass("Options", keys)


def _takes(config: schema.Env, named: type, offered: Iterable[str]) -> list[str]:
    parameters = [p for p in inspect.signature(named).parameters.values() if p.kind is not p.VAR_KEYWORD]
    unknown = [p.name for p in parameters if p.name not in offered and p.default is p.empty]
    if unknown:
        raise BirlError(
            f"env.kind={config.kind}: {named.__name__}.__init__ asks for {unknown[0]!r}; it can have "
            f"{', '.join(offered)}."
        )
    return [p.name for p in parameters if p.name in offered]


async def _shared(config: schema.Env, function: Callable[..., Any], settings: Any, folder: Path | None) -> Any:
    try:
        own = {"folder": folder} if "folder" in inspect.signature(function).parameters else {}
        return await called(partial(function, **own), settings) if own else await called(function, settings)
    except BirlError:
        raise
    except Exception as error:
        raise BirlError(f"env.kind={config.kind}: {described(error)}") from error


def _rows(
    config: schema.Env, tasks: Callable[..., Any], settings: Any, shared: Any, split: str
) -> list[dict[str, Any]]:
    own = {"shared": shared} if "shared" in inspect.signature(tasks).parameters else {}
    try:
        rows = list(tasks(settings, split, **own))
    except BirlError:
        raise
    except (Exception, SystemExit) as error:
        raise BirlError(f"env.kind={config.kind}: its tasks failed: {described(error)}") from error
    if bad := next((r for r in rows if not isinstance(r, Mapping)), None):
        raise BirlError(f"env.kind={config.kind}: tasks must give one dict for each task, not {bad!r:.100}.")
    return rows
