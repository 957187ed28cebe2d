"""Jobs that were launched, as a user does it: `birl launch`, then what the commands and the files say."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from birl.cli import main
from birl.launch.plan import FOLDER, State, read_state, supervised

ROWS = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2), "response": f"The answer is {i + 2}."} for i in range(12)]
QUIET = ("track.console=plain", "track.tensorboard=false", "track.report=false", "threads=1")
ENGINES = ("engine.kind=birl", "engine.max_batch=8", "engine.kv_cache_gb=0.01", "weights.timeout=60")
SMALL = (
    "rollout.prompts=2",
    "rollout.group_size=4",
    "rollout.max_tokens=16",
    "reward=length",
    "reward.length_target=8",
)


def until(done: Callable[[], Any], seconds: float, what: Callable[[], object] = lambda: "") -> Any:
    """What `done` gives, as soon as that is something."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.05)
    return found


class Launched:
    """A job in a folder, and what is done to it."""

    def __init__(self, where: str, command: str, tiny: Path, folder: Path, *words: str) -> None:
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self.run = folder / "run"
        config = [f"model.path={tiny}", f"data.train={data}", *QUIET, *words, f"run={self.run}"]
        self.words = ["launch", where, command, *config]

    def launch(self, *more: str) -> None:
        assert main([*self.words, *more]) == 0, self.log("supervisor")

    def log(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.run / FOLDER / f"{name}.log").read_text(errors="replace")
        return ""

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            text = (self.run / f"{name}.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return []

    @property
    def step(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    @property
    def state(self) -> State:
        found = read_state(self.run / FOLDER)
        assert found is not None
        return found

    def pid(self, role: str, index: int = 0) -> int:
        return next((p.pid for p in self.state.parts if (p.role, p.index) == (role, index)), 0)

    def pids(self) -> list[int]:
        return [part.pid for part in self.state.parts if part.pid]

    def kill(self, pid: int) -> float:
        """When it was killed."""
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def wait(self, done: Callable[[], Any], seconds: float = 200.0) -> Any:
        return until(
            done, seconds, lambda: "\n".join(self.log(n)[-1500:] for n in ("supervisor", "learner-0", "engine-0"))
        )

    def end(self) -> None:
        """Whatever a test has left."""
        folder = self.run / FOLDER
        if (pid := supervised(folder)) > 0:
            os.kill(pid, signal.SIGKILL)
            until(lambda: not supervised(folder), 10)
        with contextlib.suppress(AssertionError):
            until(lambda: not [pid for pid in self.pids() if alive(pid)], 10)


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
