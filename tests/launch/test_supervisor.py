"""The supervisor of `birl launch local` with small programs in place of a learner and its engines."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from birl.cli import main
from birl.launch import plan as files
from birl.launch.launcher import Handle
from birl.launch.plan import LaunchPlan, State, read_state
from birl.launch.supervisor import Supervisor
from birl.process import ProcessGroup
from tests.launch.jobs import alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes end with their supervisor on Linux only")
WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
SAVES = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n{WAITS}"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAITS}"
MAIN = (
    "import sys\nfrom birl.launch import supervisor\nsupervisor.PATIENCE = 0.5\nsys.exit(supervisor.main(sys.argv[1:]))"
)


class Supervised:
    def __init__(self, run: Path, learner: str, engine: str = "", count: int = 0, restarts: int = 3) -> None:
        words = (sys.executable, "-c", engine) if engine else ()
        self.plan = LaunchPlan(
            name="x", run=str(run), learner=(sys.executable, "-c", learner), restarts=restarts,
            engine=words, count=count, engines="birl-launch/x" if engine else "",
        )  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-c", MAIN, str(files.save(self.plan))])

    @property
    def state(self) -> State:
        return read_state(self.plan.folder) or State(state="", pid=0)

    def log(self) -> str:
        file = self.plan.folder / "learner-0.log"
        return file.read_text() if file.exists() else ""

    def until(self, done: Callable[[State], object]) -> None:
        end = time.monotonic() + 60
        while not done(self.state):
            assert time.monotonic() < end and self.process.poll() is None, self.state
            time.sleep(0.02)

    def over(self) -> State:
        self.process.wait(60)
        assert not any(part.pid for part in self.state.parts)
        return self.state


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    made: list[Supervised] = []

    def one(*programs: str, **keys: int) -> Supervised:
        made.append(Supervised(tmp_path / "run", *programs, **keys))
        return made[-1]

    yield one
    for supervised in made:
        supervised.process.kill()
        supervised.process.wait()


@pytest.mark.parametrize(
    ("learner", "engine", "state", "detail"),
    [
        ("print('hi')", WAITS, "done", ""),
        ("", DEAF, "done", ""),  # the engine is killed
        ("raise SystemExit(130)", "", "stopped", "it has saved|exit code 130"),
        ("raise SystemExit(143)", "", "stopped", "it has saved|exit code 143"),
        ("print('bad key'); raise SystemExit(2)", WAITS, "failed", "exit code 2 before its first step: bad key"),
        (WAITS, "print('bad model'); raise SystemExit(2)", "failed", "engine 0 ended with exit code 2: bad model"),
        ("raise SystemExit(3)", "", "failed", "exit code 3, and launch.restarts=1 is used up"),
    ],
)
def test_how_a_job_ends(start: Callable[..., Supervised], learner: str, engine: str, state: str, detail: str) -> None:
    job = start(learner, engine, count=int(bool(engine)), restarts=1)
    result = job.over()
    assert result.state == result.parts[0].state == state and re.search(detail, result.detail)
    assert [part.state for part in result.parts[1:]] == ["stopped"] * bool(engine)
    assert result.parts[0].restarts == (learner == "raise SystemExit(3)")


@pytest.mark.parametrize("waits", [False, True])
def test_it_is_stopped(start: Callable[..., Supervised], waits: bool) -> None:
    """While the learner runs, which saves; and while it waits to be started again."""
    job = start("raise SystemExit(1)" if waits else SAVES, restarts=5)
    job.until(lambda state: state.parts and state.parts[0].state == "restarting" if waits else "ready" in job.log())
    job.process.send_signal(signal.SIGTERM)
    result = job.over()
    assert result.state == "stopped" and job.process.returncode == 0
    assert result.detail == ("it was to be started again" if waits else "it has saved")


def test_engines_come_and_go_and_are_started_again(start: Callable[..., Supervised]) -> None:
    job = start(SAVES, WAITS, count=2)
    for number in (3, 1, 2):
        job.until(lambda state: state.parts and all(part.state == "running" for part in state.parts))
        (job.plan.folder / files.WANTED).write_text(f"{number}\n")
        job.until(lambda state, number=number: state.engines == len(state.parts) - 1 == number)
    first = job.state.parts[1]
    os.kill(first.pid, signal.SIGKILL)
    job.until(lambda state: state.parts[1].restarts == 1 and state.parts[1].state == "running")
    assert job.state.parts[1].pid != first.pid and job.state.parts[0].restarts == 0
    processes = [part.pid for part in job.state.parts]
    job.process.kill()
    job.process.wait()
    end = time.monotonic() + 60
    while any(map(alive, processes)):  # they end with it
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_rank_below_torchrun_is_told_also_where_the_disk_has_no_locks(tmp_path: Path) -> None:
    """Its lock file has more lines there; torchrun itself got the signal, and ended all ranks before they had saved."""
    (tmp_path / ".lock").write_text(f"{os.getpid()}\n12345\nhost\n")
    job = Supervisor(LaunchPlan(name="x", run=str(tmp_path), learner=("torchrun",)))
    job.learner.process = cast(ProcessGroup, SimpleNamespace(pid=os.getppid()))
    assert job.leader() == os.getpid()


def test_what_a_process_printed_last_moves_no_cursor(
    start: Callable[..., Supervised], capsys: pytest.CaptureFixture[str]
) -> None:
    job = start("print('\\x1b[2Jgone'); raise SystemExit(2)")
    run = str(Path(job.over() and job.plan.run))
    Handle(where="local", id="1", run=run, name="x\x1b[1m").save()
    assert main(["status", run]) == 1
    out = capsys.readouterr().out
    assert "⟪U+001B⟫[2Jgone" in out and out.startswith("x⟪U+001B⟫[1m: local 1\n")
