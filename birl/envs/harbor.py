"""`env=harbor`: task folders of the Harbor format (Terminal-Bench 2 and others), in birl's sandbox or in containers.

    birl rl env=harbor env.tasks=my_tasks

The model calls `bash`. After an answer without a call, or after the last turn, `tests/test.sh` runs, and the number
that it writes to /logs/verifier/reward.txt (or reward.json) is the reward; without one the episode is an `env_error`.

In the sandbox only files are kept between commands: each command is a run that starts with the files of the previous
one. In a container (`harbor_container.py`) processes are kept, too. The model's processes are ended before the tests
run, unless the configuration keeps them, and the tests are copied only then.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from birl.config.schema.kinds import Count, Positive, Whole
from birl.envs.harbor_container import Containers
from birl.envs.harbor_folder import REWARDS, Folder, packed, read, read_all
from birl.envs.tasks.rows import Row
from birl.envs.tasks.tooled import Memory, text_tool
from birl.errors import BirlError
from birl.sandbox import archive
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox
from birl.types import LARGEST, Feedback, Message, Task, ToolCall

ABOUT = "Runs a command in the task's folder. Files are kept between calls; processes may not be."
BASH = text_tool("bash", ABOUT, "command", "As for bash -c.")
CONTAINERS = ("docker", "podman")
PROGRAM = Path(archive.__file__).read_text()


@dataclass(kw_only=True)
class Config:
    tasks: str = ""
    """Folder of task folders for training, or a single task folder."""
    validation_tasks: str = ""
    """Folder of task folders for validation, or a single one."""
    turns: Count = 8
    """Maximum number of replies; then the tests run. env.max_turns limits it, too."""
    build: Literal["refuse", "skip", "run"] = "refuse"
    """RUN lines of a Dockerfile in the sandbox: refuse (the task) | skip (this machine must have what they install) |
    run (at the start of each episode, without a network). A container's image is built with them."""
    prove: bool = True
    """Run each task's own solution before the run; refuse a task whose tests reward it no more than doing nothing."""
    seconds: Positive = 30.0
    """Time limit of a command [s]. The tests have the limit of task.toml."""
    memory_mb: Memory = 1024
    """Memory limit of a command, or of a container whose task sets none [MiB]."""
    storage_mb: Count = 64
    """Size limit of a task's files plus the archive that keeps them between commands, so twice the files [MiB]."""
    longest: Annotated[int, Field(ge=100)] = 4000
    """Maximum length of a command's output in the prompt [characters]."""
    sandbox: Literal["auto", "zygote", "bubblewrap", "docker", "podman"] = "auto"
    """Isolation of commands. auto: the sandbox that works here; docker, podman: one container of the task's image per
    episode."""
    network: bool = False
    """Allow containers network access, which tests that install packages need. Containers of a task whose task.toml
    forbids it or names hosts never get it."""
    processes: Literal["end", "keep"] = "end"
    """Processes that the model left running in a container when the tests start: end | keep (for tasks that ask for a
    server)."""
    workers: Whole = 0
    """Concurrent commands. 0: one per CPU core."""

    def __post_init__(self) -> None:
        if self.contained and self.build != "refuse":
            raise BirlError(f"env.build={self.build}: env.sandbox={self.sandbox} builds the image. Leave it out.")
        if not self.contained and (self.network or self.processes != "end"):
            name = "network" if self.network else "processes"
            raise BirlError(f"env.{name} is for containers: set env.sandbox=docker or podman, or leave it out.")

    @property
    def contained(self) -> bool:
        return self.sandbox in CONTAINERS


class SandboxMachine:
    """Runs commands of episodes, as `Containers` does: each is one run of the sandbox. A state, which is kept between
    two commands of an episode, is an archive of all files."""

    def __init__(self, config: Config, sandbox: Sandbox) -> None:
        self.config, self.sandbox = config, sandbox
        self.built: dict[Path, asyncio.Task[bytes]] = {}

    @property
    def limits(self) -> Limits:
        config = self.config
        seconds = config.seconds + 10  # the program in the sandbox ends the command before, and keeps its files
        return Limits(
            seconds=seconds, cpu_seconds=int(seconds) + 1, memory_mb=config.memory_mb, file_mb=config.storage_mb,
            open_files=1024, processes=200,
        )  # fmt: skip

    async def run(
        self, folder: Folder, state: bytes, command: list[str], *, seconds: float, more: bytes = b""
    ) -> tuple[bytes, Result]:
        """Run a command; returns the new state and the result. The files are unchanged if the sandbox ended it. With
        `more`, an archive of files, /tests, /logs and /solution are recreated before it."""
        limits = replace(self.limits, seconds=seconds + 10, cpu_seconds=int(seconds) + 11)
        order = {"command": command, "folder": folder.workdir, "environment": folder.environment, "seconds": seconds}
        order["clear"] = ["tests", "logs", "solution"] if more else []  # the model may have put files there
        files = {"archive.py": PROGRAM, "order.json": json.dumps(order), "state.tar": state}
        files |= {"more.tar": more} if more else {}
        result = await self.sandbox.run(files, ["python", "archive.py"], limits, collect=("state.tar", *REWARDS))
        if result.ending is Ending.ERROR:
            raise BirlError(f"{folder.name}: {result.kind}: {result.detail}")
        return result.files.get("state.tar", state) if result.ending is Ending.OK else state, result

    async def begin(self, folder: Folder) -> bytes:
        """The initial files of a task, built once."""
        if folder.path not in self.built:
            self.built[folder.path] = asyncio.create_task(self._build(folder))
        return await asyncio.shield(self.built[folder.path])

    async def _build(self, folder: Folder) -> bytes:
        state = packed(folder.files)
        for line in folder.builds if self.config.build == "run" else ():
            state, result = await self.run(folder, state, ["bash", "-c", line], seconds=120.0)
            if not result.good:
                raise BirlError(f"{folder.path}/environment/Dockerfile: RUN {line[:80]}: {result.last}")
        return state

    async def end(self, state: bytes) -> None:
        pass

    async def close(self) -> None:
        for task in self.built.values():
            task.cancel()
        await self.sandbox.close()


class Place:
    """The tasks and the machine, shared by all episodes."""

    def __init__(self, machine: SandboxMachine | Containers, folders: Mapping[str, list[Folder]]) -> None:
        self.machine: Any = machine  # its states are bytes or the names of containers
        self.folders = folders

    async def close(self) -> None:
        await self.machine.close()

    async def tested(self, folder: Folder, state: Any) -> float:
        """Run the tests on this state and return the reward. Raises `BirlError` if they write none."""
        more = packed({**folder.tests, "logs/verifier/.birl": b""})
        command = ["bash", "/tests/test.sh"]
        _, result = await self.machine.run(folder, state, command, seconds=folder.seconds, more=more)
        if (value := reward(result.files)) is None:
            why = result.detail or result.last
            raise BirlError(f"{folder.path}/tests/test.sh wrote no number to /logs/verifier/reward.txt: {why}")
        return value

    async def prove(self, folder: Folder) -> None:
        """Raises `BirlError` if the task's own solution does not solve it here."""
        if not folder.solution:
            return
        solution, how = packed(folder.solution), ""

        async def worth(work: bool) -> float:
            nonlocal how
            state = await self.machine.begin(folder)
            try:
                if work:
                    command = ["bash", "/solution/solve.sh"]
                    state, result = await self.machine.run(folder, state, command, seconds=600.0, more=solution)
                    how = result.last
                return await self.tested(folder, state)
            finally:
                await self.machine.end(state)

        before, after = await worth(False), await worth(True)
        if not after > before:
            raise BirlError(
                f"{folder.path}: its solution is worth {after:g} here, and no work at all {before:g}. What it or the "
                f"tests need may not be there ({how}). Leave the task out, or set env.prove=false."
            )


class Harbor:
    Config = Config
    tools = (BASH,)

    @classmethod
    async def shared(cls, config: Config) -> Place:
        if not (config.tasks or config.validation_tasks):
            raise BirlError("env=harbor needs env.tasks, a folder of task folders.")
        sets = {"train": config.tasks, "validation": config.validation_tasks}
        folders = {n: read_all(Path(name), config.build, config.contained) if name else [] for n, name in sets.items()}
        place = Place(await opened(config), folders)
        limit = asyncio.Semaphore(config.workers or os.cpu_count() or 1)

        async def proved(folder: Folder) -> None:
            async with limit:
                await place.prove(folder)

        try:
            if config.prove:
                await asyncio.gather(*(proved(one) for some in folders.values() for one in some))
        except BaseException:
            await place.close()
            raise
        return place

    @staticmethod
    def tasks(config: Config, split: str, shared: Place) -> list[Row]:
        return [{"prompt": one.instruction, "folder": str(one.path)} for one in shared.folders[split]]

    @staticmethod
    def gold(task: Task) -> list[Message | str]:
        script = Path(str(task.columns.get("folder")), "solution/solve.sh")
        if not script.is_file():
            raise BirlError(f"{script.parent.parent} has no solution/solve.sh")
        call = ToolCall(name="bash", arguments=json.dumps({"command": script.read_text()}), id="call-1")
        return [Message(role="assistant", content="", tool_calls=(call,)), "Done."]

    def __init__(self, task: Task, config: Config, shared: Place) -> None:
        self.config, self.place, self.task = config, shared, task
        self.folder: Folder | None = None
        self.state: Any = None
        self.turn, self.calls = 0, 0

    async def start(self) -> Any:
        path = self.task.columns.get("folder")
        if not isinstance(path, str):
            raise BirlError(f"{self.task.place}: it has no column `folder`, the task's own, which env=harbor needs.")
        known = (one for some in self.place.folders.values() for one in some if str(one.path) == path)
        self.folder = next(known, None) or read(Path(path), self.config.build, self.config.contained)
        self.state = await self.place.machine.begin(self.folder)
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        assert self.folder is not None
        self.turn += 1
        told = tuple([await self.answer(call, self.folder) for call in reply.tool_calls])
        if told and self.turn < self.config.turns:
            return Feedback(messages=told, done=False)
        value = await self.place.tested(self.folder, self.state)
        return Feedback(reward=value, info={"harbor/calls": float(self.calls)})

    async def answer(self, call: ToolCall, folder: Folder) -> Message:
        self.calls += 1
        command = json.loads(call.arguments).get("command")
        if call.name != "bash":
            text = f"Error: there is no tool {call.name[:100]}; there is bash."
        elif not isinstance(command, str) or not command.strip() or "\0" in command:
            text = "Error: bash needs command, as text."
        else:
            self.state, result = await self.place.machine.run(
                folder, self.state, ["bash", "-c", command], seconds=self.config.seconds
            )
            text = printed(result, self.config.longest)
        return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)

    async def close(self) -> None:
        if self.state is not None:
            await self.place.machine.end(self.state)


async def opened(config: Config) -> SandboxMachine | Containers:
    if config.contained:
        return await Containers.open(
            config.sandbox, memory_mb=config.memory_mb, network=config.network, keep=config.processes == "keep",
            workers=config.workers,
        )  # fmt: skip
    kind = "bubblewrap" if config.sandbox == "bubblewrap" else "zygote"
    return SandboxMachine(config, await open_sandbox(kind, workers=config.workers))


def printed(result: Result, longest: int) -> str:
    """The text that the model gets: both outputs, the exit code if it is not 0, and why the command was ended."""
    parts = [s for s in (result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")) if s.strip()]
    text = "\n".join(part.rstrip() for part in parts)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}\n({len(text) - 2 * half} more characters)\n{text[-half:]}"
    if result.ending is not Ending.OK:
        lost = "" if result.kind in CONTAINERS else "; its files are lost"
        return f"{text}\nError: {result.detail or result.ending}{lost}".lstrip()
    return f"{text}\n(exit code {result.exit_code})".lstrip() if result.exit_code else text or "(nothing was printed)"


def reward(files: Mapping[str, bytes]) -> float | None:
    """Parse the reward from the files of the tests; None if there is none. A reward.json with several numbers, none of
    them called reward, is an error, as it is unknown which one counts."""
    text = files.get(REWARDS[0], b"").decode(errors="replace").strip()
    try:
        value = float(text) if text else json.loads(files.get(REWARDS[1], b"null"))
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
        return None
    return float(value)
