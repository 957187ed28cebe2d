"""Child processes: started, waited for, ended with all their children, whatever ends the parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError, EngineDown
from birl.process import Process, answers, free_port

SLEEPER = (
    "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('x'); print('up', flush=True); time.sleep(60)"
)


def sleeper(folder: Path, code: str = SLEEPER, **keys: Any) -> Process:
    """A child that says by a file that it is ready."""
    flag = folder / "up"

    async def ready() -> bool:
        if not flag.exists():
            raise EngineDown("not yet")
        return True

    keys = {"log": folder / "logs" / "child.log", "ready": answers(ready), "start_timeout": 100.0} | keys
    return Process([sys.executable, "-c", code, str(flag)], **keys)


def gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z":
                return True  # an orphan in a container whose first process collects nobody
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


async def test_started_logged_ended(tmp_path) -> None:
    child = sleeper(tmp_path, env={"BIRL_TEST": "1", "HOME": None})
    assert not child.alive and child.pid == 0
    await child.start()
    environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
    assert b"BIRL_TEST=1" in environment and not any(e.startswith(b"HOME=") for e in environment)
    assert child.alive and "up" in (tmp_path / "logs" / "child.log").read_text()
    assert os.getsid(child.pid) == child.pid != os.getsid(0)  # the terminal's Ctrl-C goes elsewhere
    with pytest.raises(BirlError, match="runs already"):
        await child.start()
    await child.terminate()
    assert not child.alive and gone(child.pid)
    await child.terminate()  # again does nothing


async def test_one_that_ends_early_is_told_with_the_end_of_its_log(tmp_path) -> None:
    code = "import sys; print('loading'); sys.exit('no such model: x')"
    child = sleeper(tmp_path, code)
    with pytest.raises(
        BirlError, match=r"ended with exit code 1 before it was ready(?s:.*)loading(?s:.*)no such model: x"
    ):
        await child.start()
    killed = sleeper(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(BirlError, match="was ended by SIGKILL") as caught:
        await killed.start()
    assert "no such model" not in str(caught.value)  # that was the one before, in the same file
    for command, why in (["no-such-program"], "not there"), ([str(tmp_path)], "no program"):
        with pytest.raises(BirlError, match=why):
            await Process(command, log=tmp_path / "log", ready=child.ready).start()
    with pytest.raises(BirlError, match="can not be written"):
        await sleeper(tmp_path, log=Path("/proc/none/log")).start()


async def test_one_that_is_late_is_ended_and_so_is_a_start_that_is_given_up(tmp_path) -> None:
    child = sleeper(tmp_path, "import time; print('thinking', flush=True); time.sleep(60)", start_timeout=5.0)
    with pytest.raises(BirlError, match=r"not ready within 5 s(?s:.*)thinking"):
        await child.start()
    assert not child.alive and gone(child.pid)

    async def never() -> bool:
        await asyncio.sleep(60)
        return True

    child = sleeper(tmp_path, ready=never)
    task = asyncio.create_task(child.start())
    while not child.pid:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and child.pid and gone(child.pid)


STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("I heard", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
while True:
    time.sleep(1)
"""


async def test_one_that_does_not_listen_is_killed_with_its_children(tmp_path) -> None:
    child = sleeper(tmp_path, STUBBORN, stop_timeout=20.0)
    await child.start()
    grandchild = int((tmp_path / "up").read_text())
    await child.terminate()
    assert "I heard" in child.log.read_text() and gone(child.pid) and gone(grandchild)
    (tmp_path / "up").unlink()
    child = sleeper(tmp_path, STUBBORN)
    await child.start()
    grandchild = int((tmp_path / "up").read_text())
    os.kill(child.pid, signal.SIGKILL)  # by somebody else: its own child is left over
    while child.alive:
        await asyncio.sleep(0.01)
    await child.terminate()
    assert gone(grandchild)
    stopped = sleeper(tmp_path, stop_timeout=0.3)
    await stopped.start()
    os.kill(stopped.pid, signal.SIGSTOP)
    await stopped.terminate()
    assert gone(stopped.pid)


async def test_restarts_wait_longer_each_time_and_come_to_an_end(tmp_path) -> None:
    child = sleeper(tmp_path, max_restarts=2, backoff=0.1)
    await child.start()
    pids, times = {child.pid}, []
    for _ in range(2):
        began = time.monotonic()
        await child.restart()
        times.append(time.monotonic() - began)
        pids.add(child.pid)
    assert len(pids) == 3 and times[0] >= 0.1 and times[1] >= 0.2 and child.alive
    with pytest.raises(BirlError, match=r"started again 2 times within 3600 s(?s:.*)child.log"):
        await child.restart()
    await child.terminate()


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from birl.process import Process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
folder = Path(sys.argv[1])

async def main():
    async def ready():
        return (folder / "up").exists()
    child = Process([sys.executable, "-c", sys.argv[2], str(folder / "up")], log=folder / "log", ready=ready)
    async with child:
        print(child.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_no_orphan_is_left_however_the_parent_ends(tmp_path, end) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), SLEEPER]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid, 0.1)
        parent.send_signal(end)
        parent.wait(20)
        assert gone(pid)
    finally:
        parent.kill()
        parent.wait(10)


def test_free_ports_can_be_listened_at() -> None:
    import socket

    ports = {free_port() for _ in range(20)}
    for port in ports:
        with socket.socket() as found:
            found.bind(("127.0.0.1", port))
