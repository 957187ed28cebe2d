"""verifiers 0.4: a taskset of an installed package or of a local file, run by verifiers' own `Env`.

birl rl env=verifiers env.task=my_tasks.py env.parameters=[taskset.split=train] env.validation=[taskset.split=test]

    rows      the taskset's tasks
    model     the episode's address, through verifiers' interception server
    harness   if none or `null` is named: its program, in this process (verifiers_chat.py)
    runtime   if none is named: a folder of this machine
    reward    the trace's, one for each role that is trained; its metrics are figures
"""

import asyncio
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import pkgutil
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import which
from typing import Any

from birl.envs.adapters.package import arguments, imported, unknown
from birl.envs.adapters.verifiers_chat import KIND, SPEAKERS, Speakers, registered
from birl.errors import BirlError
from birl.foreign import Late
from birl.named import make_importable, missing
from birl.types import Model

V1 = "verifiers.v1"


class Tasksets:
    """The taskset, its environment and its servers, shared by all episodes. Raises `BirlError` if it cannot be run
    here."""

    def __init__(self, config: Any) -> None:
        logging.getLogger("verifiers").addHandler(logging.NullHandler())  # failures are the episode's outcome
        if which("uv") is None:
            imported(f"{V1}.runtimes", KIND).SubprocessRuntime.prepare_uv_script = without_uv
        self.name = config.task
        self.id = imported_taskset(config.task)
        self.config = self.read(config.parameters)
        self.roles = imported(f"{V1}.configs.agent", KIND).agent_config_fields(self.config)
        self.tasksets: dict[str, Any] = {}
        try:
            self.env = imported(f"{V1}.utils.loaders", KIND).load_environment(self.placed())
            self.tasksets["train"] = self.env.taskset
            if config.validation:
                other = self.read([*config.parameters, *config.validation]).taskset
                self.tasksets["validation"] = type(self.env.taskset)(other)
        except (ValueError, TypeError, OSError) as error:
            raise self.refused(error) from error
        self.rows: dict[str, list[Any]] = {}
        self.served: asyncio.Task[None] | None = None
        self.over = asyncio.Event()

    def refused(self, error: object) -> BirlError:
        return BirlError(f"env.task={self.name}: {' '.join(str(error).split())}")

    def read(self, words: Iterable[str]) -> Any:
        """Parse the environment's configuration, as vf-eval does after --env."""
        data: dict[str, Any] = {}
        for name, value in arguments(words, dots=True).items():
            *path, last = name.split(".")
            place = data
            for part in path:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    raise BirlError(f"env.parameters: {name}={value}: {part} has a value already.")
            place[last] = value
        taskset = {**data.get("taskset", {}), "id": self.id}
        try:
            return imported(f"{V1}.utils.loaders", KIND).resolve_env_config({**data, "taskset": taskset})
        except imported("pydantic", KIND).ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise BirlError(f"env.parameters: {place}: {first['msg']} (of env.task={self.name}).") from None
        except (ModuleNotFoundError, ValueError, TypeError) as error:
            raise self.refused(error) from error

    def placed(self) -> Any:
        """The configuration with birl's settings for each role: its program, its place, and its name if there are
        several."""
        loaders, runtimes = imported(f"{V1}.utils.loaders", KIND), imported(f"{V1}.runtimes", KIND)
        own = loaders.default_harness_id(self.id)
        given: dict[str, Any] = {}
        for name, role in self.roles.items():
            runtime = role.runtime if "runtime" in role.model_fields_set else runtimes.SubprocessConfig()
            pinned = role.harness.id if role.harness is not None else own if own != "bash" else "null"
            harness = role.harness
            if pinned == "null" and runtime.type == "subprocess":
                keys = {} if harness is None else harness.model_dump(exclude={"id"})
                harness = loaders.harness_config_type(registered())(id=registered(), **keys)
            elif pinned == "bash" and runtime.type == "subprocess" and which("uv") is None:
                raise BirlError(
                    f"env.task={self.name}: its harness bash is a program that verifiers starts with uv, which is not "
                    f"installed. pip install uv, or leave it out: env.parameters=[{name}.harness.id=null]."
                )
            # Turns of a repeated attempt would count, too; rollout.failed sets what follows a failure.
            known = {"harness": harness, "runtime": runtime, "retries": type(role.retries)()}
            if role.client is None and len(self.roles) > 1:  # which harnesses of others use as a name
                known["model"] = f"birl/{name}"
            given[name] = role.model_copy(update=known)
        return self.config.model_copy(update=given)

    def tasks(self, split: str, most: int, behind: int) -> list[dict[str, Any]]:
        taskset, start = self.tasksets.get(split), 0
        if taskset is None:  # the rows after those of training
            if not behind:
                return []
            taskset, start = self.tasksets["train"], behind
        if taskset.INFINITE and not most:
            key = "env.validation_rows" if split == "validation" else "env.rows"
            raise BirlError(f"env.task={self.name}: its tasks have no end; {key}=1000 takes the first 1000.")
        self.rows[split] = list(itertools.islice(taskset, start, start + most if most else None))
        self.check(self.rows[split])
        return [row(task.data) for task in self.rows[split]]

    def check(self, tasks: list[Any]) -> None:
        """Refuse what verifiers would refuse in each episode. Raises `BirlError`."""
        fit = imported(f"{V1}.utils.compile", KIND)
        for name, role in imported(f"{V1}.configs.agent", KIND).agent_config_fields(self.env.config).items():
            try:
                for i, task in enumerate(tasks):
                    runtime = fit.resolve_runtime_config(role.runtime, task)
                    if not i:
                        servers = [*task.toolsets(task.config), *self.env.taskset.toolsets(self.env.taskset.config)]
                        fit.validate_pairing(self.env._harnesses[name], type(task), runtime, tools=servers)
            except (ValueError, TypeError) as error:
                refused = self.refused(error)
                if role.runtime.type == "subprocess":
                    refused.args = (f"{refused} Here: env.parameters=[{name}.runtime.type=docker].",)
                raise refused from error

    async def play(
        self, split: str, number: int, model: Model
    ) -> tuple[Mapping[str, float] | float, dict[str, float], bool]:
        await self.serve()
        speakers = Speakers(model.base_url, named=type(self.env).__name__ != "SingleAgentEnv")
        SPEAKERS.set(speakers)
        clients = imported(f"{V1}.clients", KIND)
        own = clients.EvalClientConfig(base_url=model.base_url, api_key_var="BIRL_NO_KEY")
        episode = await self.env.run_episode(self.rows[split][number], clients.ModelContext(model="birl", client=own))
        traces = outcome(episode, self.env.complete(episode), speakers)
        forget(model, set(map(speakers.name, episode.traces)) - set(traces))
        rewards = {name: trace.reward for name, trace in traces.items()}
        cut = any(trace.is_truncated for trace in traces.values())
        return rewards if speakers.named else next(iter(rewards.values())), figures(traces), cut

    async def serve(self) -> None:
        """Start its tool servers, at the first episode. They are entered and left in one task, as they require."""
        if self.served is None or self.served.done():
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.over = asyncio.Event()
            self.served = asyncio.create_task(self._serve(ready))
            self.ready = ready
        await asyncio.shield(self.ready)

    async def _serve(self, ready: "asyncio.Future[None]") -> None:
        try:
            async with self.env.serving():
                # A shared server would keep a client for each episode's address: each rollout has a separate one.
                self.env._interception = None
                ready.set_result(None)
                await self.over.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def close(self) -> None:
        self.over.set()
        if self.served is not None:
            await self.served


async def without_uv(*args: Any, **keys: Any) -> Any:
    """Replaces a download of uv by pip or curl, which verifiers would try in each episode."""
    raise BirlError("it starts a program with uv, which is not installed: pip install uv")


def row(data: Any) -> dict[str, Any]:
    """A task's prompt as text, for its length and for the viewer."""
    answer = getattr(data, "answer", None)
    return {
        "prompt": data.prompt_text or data.name or f"task {data.idx}",
        "answer": "" if answer is None else str(answer),
    }


def outcome(episode: Any, complete: bool, speakers: Speakers) -> dict[str, Any]:
    """The traces of trained roles, by name. Raises `Late` if a deadline of verifiers prevented the score, `BirlError`
    if there is none for another reason."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if episode.is_timeout:
        raise Late(episode.errors[-1].message)
    for trace in episode.traces if not complete else traces:
        if not trace.ok and trace.errors:
            raise BirlError(told(trace.errors[-1]))
    if not complete:
        raise BirlError(told(episode.errors[-1]) if episode.errors else "its environment counts it as incomplete")
    result: dict[str, Any] = {}
    for trace in traces:
        name = speakers.name(trace)
        missing = [key for key, reward in trace.rewards.items() if reward is None]
        if trace.is_timeout and (missing or trace.stop_condition != "agent_timeout"):
            raise Late(f"{name}: {trace.stop_condition} of verifiers")
        if missing or not trace.rewards:
            raise BirlError(f"{name}: {' and '.join(missing) or 'its task'} gave no reward")
        if name in result:
            raise BirlError(f"{name} ran twice in one episode, and its harness does not say which answers are whose")
        result[name] = trace
    if not result:
        raise BirlError("no role that is trained played")
    return result


def figures(traces: Mapping[str, Any]) -> dict[str, float]:
    """Metrics, and the score of each reward function."""
    result = {}
    for name, trace in traces.items():
        known = {key: reward.score for key, reward in trace.rewards.items()} | trace.metrics
        before = f"{name}/" if len(traces) > 1 else ""
        result |= {f"{before}{key}": float(value) for key, value in known.items() if value is not None}
    return result


def forget(model: Any, roles: set[str]) -> None:
    """Treat the messages of a role that is not trained as those of a user played by the policy."""
    for turn in [turn for turn in getattr(model, "turns", ()) if turn.agent in roles]:
        model.forget(turn)


def told(error: Any) -> str:
    """`my_tasks.py:12: TaskError: message` of a recorded error."""
    places = re.findall(r'File "([^"]+)", line (\d+)', error.traceback or "")
    own = [f"{Path(file).name}:{line}: " for file, line in places if not re.search("site-packages|/lib/python", file)]
    first, *others = error.message.strip().splitlines() or [""]
    return f"{''.join(own[-1:])}{error.type}: {first}{f' ... {others[-1].strip()}' if others else ''}"


def imported_taskset(task: str) -> str:
    """verifiers' name of the taskset of env.task. Raises `BirlError`."""
    loaders = imported("verifiers.v1.utils.loaders", KIND)
    name = Path(task).stem if task.endswith(".py") else task
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()
    path = in_reach(task) if task.endswith(".py") else None
    if path is None:
        groups = [None, imported("verifiers.v1.tasksets", KIND).__path__]
        names = {each.name for group in groups for each in pkgutil.iter_modules(group)}
        if module not in names:
            raise unknown("env.task", task, names)
    try:
        made = loaders.import_taskset(name)
        loaders.taskset_class(name)
    except Exception as error:  # whatever the module raises
        cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        spec = None if path else importlib.util.find_spec(module)
        source = path or Path((spec.origin if spec else None) or "")
        old = source.is_file() and "def load_environment" in source.read_text(encoding="utf-8", errors="replace")
        version = importlib.metadata.version("verifiers")
        hint = f" It is an environment of verifiers 0.3, and {version} is installed: pip install 'verifiers<0.4'"
        raise BirlError(
            f"env.task={task}: {type(cause).__name__}: {' '.join(str(cause).split())}.{hint if old else missing(cause)}"
        ) from error
    if path is not None and Path(made.__file__ or "").resolve() != path:
        raise BirlError(f"env.task={task}: {made.__file__} is imported by the same name. Rename the file.")
    return name


def in_reach(task: str) -> Path:
    """Make the file importable for this process and the tool servers that verifiers starts. Raises `BirlError`."""
    path = Path(task).expanduser().resolve()
    if not path.is_file():
        raise BirlError(f"env.task={task}: there is no such file in {Path.cwd()}.")
    if path.stem != path.stem.lower() or not path.stem.isidentifier():
        raise BirlError(f"env.task={task}: verifiers imports it by its name, of a-z, 0-9 and _. Rename the file.")
    make_importable(path.parent)
    places = [str(path.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    return path
