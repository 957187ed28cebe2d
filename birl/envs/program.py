"""`env=program`: each episode is a separate process, any program that calls the model with OpenAI's or Anthropic's
client.

    birl rl env=program env.command="python my_agent.py" data.train=tasks.jsonl

The model is at OPENAI_BASE_URL and ANTHROPIC_BASE_URL, the task's row in the JSON file BIRL_TASK, and the prompt on
standard input. The reward is the one sent to OPENAI_BASE_URL/reward, or the last line printed, `{"reward": 1.0}`. Its
home is a temporary folder. All processes that it started end with it.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from birl.config.schema.kinds import Count
from birl.envs.calls import CLOSING, called, full_names, search_path
from birl.envs.functions import KEY, prompt, row
from birl.errors import BirlError
from birl.process import end_strays, guarded, kill
from birl.types import Model, Task

TAIL = 65536  # bytes of a program's output that are kept, from the end
OWN = (
    *("PATH", "HOME", "TMPDIR", "LANG", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL"),
    *("ANTHROPIC_API_KEY", "BIRL_TASK"),
)


@dataclass
class Config:
    command: str = ""
    """Command that starts the agent, with shell quoting but without variables and pipes. File names relative to the
    current folder are resolved."""
    processes: Count = 16
    """Concurrent agents; env.timeout is counted from the start of the process."""
    reward: Literal["any", "printed"] = "any"
    """Source of the reward: any (sent to the agent's reward address, else the last printed line) | printed (only the
    last line that the program itself prints: for agents that let the model run commands, which could send a reward)."""
    pass_environment: list[str] = field(default_factory=list)
    """Environment variables that are passed to the agents in addition to their own."""


@dataclass(slots=True)
class Shared:
    """Shared by all episodes: the words of the command, and the slots for processes."""

    words: list[str]
    places: asyncio.Semaphore
    config: Config


class Program:
    Config = Config

    @classmethod
    def shared(cls, config: Config) -> Shared:
        return Shared(words(config), asyncio.Semaphore(config.processes), config)

    def __init__(self, task: Task, shared: Shared) -> None:
        self.task, self.all = task, shared
        self.placed = False
        self.folder: Path | None = None
        self.mark = ""
        self.watched: Watched | None = None
        self.transport: asyncio.SubprocessTransport | None = None

    async def admit(self) -> None:
        await self.all.places.acquire()
        self.placed = True

    async def run(self, model: Model) -> float | Mapping[str, float] | None:
        self.mark = model.base_url
        self.folder = Path(tempfile.mkdtemp(prefix="birl-agent-"))
        task = self.folder / "task.json"
        task.write_text(json.dumps(row(self.task), ensure_ascii=False, default=str))
        loop = asyncio.get_running_loop()
        self.watched = watched = Watched(loop.create_future())
        self.transport, _ = await loop.subprocess_exec(
            lambda: watched,
            *guarded(self.all.words, str(self.folder)),
            env=environment(self.all.config, self.folder, self.mark, task),
            cwd=self.folder,
            start_new_session=True,  # all its children can be ended together
        )
        pipe: Any = self.transport.get_pipe_transport(0)
        pipe.write(prompt(self.task).encode(errors="replace"))
        pipe.write_eof()
        code = await watched.ended
        kill(self.transport.get_pid())  # processes that it left hold the pipes open
        await watched.drained(self.transport)
        return self._reward(code, model.reward)

    def _reward(self, code: int, sent: float | Mapping[str, float] | None) -> float | Mapping[str, float] | None:
        assert self.watched is not None
        if self.all.config.reward == "any" and sent is not None:
            return sent
        printed = reward(self.watched.last(1))
        if printed is None and code:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            why = self.watched.last(2).replace(f"{self.folder}/", "") or "nothing on its standard error"
            raise BirlError(f"{how}: {why}"[:500])
        if printed is None:
            way = "env.reward=printed" if self.all.config.reward == "printed" else "nothing was sent to its address"
            line = f"its last line is {last[:100]!r}" if (last := self.watched.last(1)) else "it printed nothing"
            raise BirlError(f'the agent gave no reward: {line}, not {{"reward": 1.0}}, and {way}')
        return printed

    async def close(self) -> None:
        try:
            if self.transport is not None:
                if self.transport.get_returncode() is None:
                    kill(self.transport.get_pid())
                self.transport.close()
            if self.folder is not None:
                await called(clean, self.folder, self.mark, threads=CLOSING)
            if self.transport is not None and self.watched is not None:
                await self.watched.ended
        finally:
            if self.placed:
                self.placed = False
                self.all.places.release()


class Watched(asyncio.SubprocessProtocol):
    """The end of a process's output, and its exit code."""

    def __init__(self, ended: "asyncio.Future[int]") -> None:
        self.ended, self.closed = ended, asyncio.Event()
        self.open = {1, 2}
        self.tails = {1: b"", 2: b""}
        self.transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.tails[fd] = (self.tails[fd] + data)[-TAIL:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.open.discard(fd)
        if not self.open:
            self.closed.set()

    def process_exited(self) -> None:
        assert self.transport is not None
        if not self.ended.done():
            self.ended.set_result(self.transport.get_returncode() or 0)

    async def drained(self, transport: asyncio.SubprocessTransport) -> None:
        """Wait until all output was read; a process that escaped may hold the pipes open, and is not waited for."""
        try:
            await asyncio.wait_for(self.closed.wait(), 1.0)
        except TimeoutError:
            transport.close()

    def last(self, fd: int) -> str:
        lines = self.tails[fd].decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def words(config: Config) -> list[str]:
    """Words of the command to start. Raises `BirlError`."""
    try:
        result = shlex.split(config.command)
    except ValueError as error:
        raise BirlError(f"env.command={config.command}: {error}.") from error
    if not result:
        raise BirlError('env.command is empty: say what starts the agent, as in env.command="python my_agent.py".')
    if own := sorted(set(config.pass_environment) & set(OWN)):
        raise BirlError(f"env.pass_environment={own[0]}: agents have their own.")
    if absent := [name for name in config.pass_environment if name not in os.environ]:
        raise BirlError(f"env.pass_environment={absent[0]}: there is no such environment variable.")
    return full_names(result, "env.command", config.command)


def environment(config: Config, folder: Path, base_url: str, task: Path) -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in config.pass_environment},
        **{"PATH": search_path(), "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
        **{"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY},
        **{"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": KEY},
        "BIRL_TASK": str(task),
    }


def reward(line: str) -> float | Mapping[str, float] | None:
    """Parse the reward in the last line; None if it has none."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or set(result) != {"reward"}:
        return None
    value = result["reward"]
    given = list(value.values()) if isinstance(value, dict) and value else [value]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in given):
        raise BirlError(f"its last line is {line}: a reward is a number, or one for each agent"[:300])
    return value


def clean(folder: Path, mark: str) -> None:
    """Kill processes that left the process group, by the episode's address in their environment, and remove the folder.
    Raises `RuntimeError` if it cannot be removed."""
    end_strays(mark)
    shutil.rmtree(folder, onerror=writable)
    if folder.exists():
        raise RuntimeError(f"the agent's folder {folder} cannot be removed")


def writable(function: Any, name: str, _: Any) -> None:
    """Make a folder accessible that the agent had closed, and retry; missing files are ignored."""
    with contextlib.suppress(OSError):
        os.chmod(Path(name).parent, 0o700)
        os.chmod(name, 0o700)
        function(name)
