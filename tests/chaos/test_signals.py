"""SIGTERM and Ctrl-C at a run whose engines are servers: it saves, ends with the signal's code, and nothing is left."""

import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from birl.learner import step_folders
from tests.chaos.processes import Child, about, forked, kill, preload, servers_of
from tests.chaos.watched import command, given

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc")

NUMBERS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
HOURS = "engine.start_timeout=36000"


def wait_for(done: Callable[[], object], child: Child, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert child.code is None, child.output()
        assert time.monotonic() < deadline, child.lines
        time.sleep(0.01)


def ended(child: Child, root: Path, seconds: float = 60.0) -> int | None:
    """Its exit code; no process that names `root` is left."""
    deadline = time.monotonic() + seconds
    try:
        while child.code is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert child.code is not None, child.lines
        assert not about(root), "\n".join(child.output())
        return child.code
    finally:
        kill([*about(root)])


@pytest.mark.parametrize(("number", "staleness"), [(signal.SIGTERM, 0), (signal.SIGINT, 2)])
def test_a_signal_at_any_step_saves_and_has_its_code(tmp_path: Path, number: signal.Signals, staleness: int) -> None:
    preload()
    given(tmp_path)
    more = ["engine.count=2", "engine.threads=1", "engine.max_batch=8", f"rollout.max_staleness={staleness}", HOURS]
    metrics, ports = tmp_path / "run/metrics.jsonl", []

    def steps() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    for life in (1, 2):
        child, before = forked(command(tmp_path, 100_000, *more)), steps()
        wait_for(lambda: steps() >= before + life, child)  # noqa: B023
        ports = [s.port for s in servers_of(tmp_path, child.pid)]
        time.sleep(0.07 * life)
        child.send(number)
        assert len(ports) == 2 and ended(child, tmp_path) == 128 + number, child.lines
        assert step_folders.saved(tmp_path / "run/checkpoints")[-1].step == steps()
        assert not any("Traceback" in line for line in child.lines)
    for port in ports:
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))


@NUMBERS
@pytest.mark.parametrize("name", ["rl", "eval"])
def test_a_signal_while_servers_start_does_not_wait_for_them(tmp_path: Path, number: signal.Signals, name: str) -> None:
    preload()
    given(tmp_path)
    data = tmp_path / "data.jsonl"
    never = tmp_path / "never"
    wait = "while :; do sleep 1; done"  # with the folder among its words, as a server has it
    never.write_text(f"#!/bin/sh\ntouch {tmp_path}/starts-$$\nexec sh -c '{wait}' {tmp_path}\n")
    never.chmod(never.stat().st_mode | stat.S_IXUSR)
    words = command(tmp_path, 3, "engine.count=2", f"engine.python={never}", HOURS)
    if name == "eval":
        words = ["eval", *(w for w in words if w.startswith(("model", "reward", "engine"))), f"data.validation={data}"]
    child = forked(words)
    wait_for(lambda: len(list(tmp_path.glob("starts-*"))) == 2, child)
    child.send(number)
    assert ended(child, tmp_path) == 128 + number, child.lines
    assert not any("Traceback" in line for line in child.lines)
    assert not list(tmp_path.glob("run/checkpoints/*"))
