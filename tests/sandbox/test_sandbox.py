"""The interface of a sandbox, the same in every kind: files, commands, limits, endings, many at once, cancelling."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.sandbox import cgroup, folder
from birl.sandbox.command import interpreters
from birl.sandbox.local import LocalSandbox
from birl.sandbox.open import LOCAL, open_sandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox, inside

LIMITS = Limits(seconds=60)
Work = Callable[[Sandbox], Awaitable[object]]


@pytest.fixture(scope="module", params=LOCAL)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    opened = asyncio.run(open_sandbox(request.param, workers=2))
    yield opened
    asyncio.run(opened.close())


def python(sandbox: Sandbox, program: str, limits: Limits = LIMITS, stdin: str = "", **files: str) -> Result:
    names = {"main.py": program, **{name.replace("_", "."): text for name, text in files.items()}}
    return asyncio.run(sandbox.run(names, ["python", "main.py", "a b"], limits, stdin))


def test_a_program_gets_its_files_input_and_words(sandbox: Sandbox) -> None:
    program = "import sys, other\nprint(other.x, sys.argv[1], input(), open('data.txt').read())\nsys.exit(3)"
    result = python(sandbox, program, stdin="in\n", other_py="x = 'é'", data_txt="data")
    assert (result.stdout.decode(), result.stderr, result.exit_code) == ("é a b in data\n", b"", 3)
    assert (result.ending, result.kind, result.good) == (Ending.OK, sandbox.kind, False)
    assert 0 < result.seconds < 60


def test_only_process_carries_a_warning(sandbox: Sandbox) -> None:
    result = python(sandbox, "print(1)")
    assert result.good and bool(result.warning) == (sandbox.kind == "process")


def test_its_environment_is_empty_and_its_folder_is_new(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_KEY", "secret")
    program = "import os\nprint(sorted(os.environ), os.listdir())\nopen('left', 'w').close()"
    names = {python(sandbox, program).stdout for _ in range(2)}
    assert names == {b"['HOME', 'LANG', 'PATH'] ['main.py']\n"}


def test_an_exception_is_on_stderr(sandbox: Sandbox) -> None:
    result = python(sandbox, "def f():\n    return 1 / 0\nf()")
    assert result.exit_code == 1 and b"ZeroDivisionError" in result.stderr and b"main.py" in result.stderr
    assert b"guest.py" not in result.stderr


def test_any_command_runs(sandbox: Sandbox) -> None:
    result = asyncio.run(sandbox.run({"a/b.txt": b"x\0y"}, ["sh", "-c", "cat a/b.txt; exit 7"], LIMITS))
    assert (result.stdout, result.exit_code) == (b"x\0y", 7)
    missing = asyncio.run(sandbox.run({}, ["no-such-program"], LIMITS))
    assert missing.exit_code == 127 and b"no-such-program" in missing.stderr


def test_threads_children_and_exit_handlers_work(sandbox: Sandbox) -> None:
    program = """
import atexit, subprocess, sys, threading
atexit.register(print, "at exit")
threading.Timer(0.05, print, ["thread"]).start()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip(), flush=True)
"""
    *either, last = python(sandbox, program).stdout.splitlines()
    assert {*either} == {b"child", b"thread"} and last == b"at exit"


def test_files_are_collected(sandbox: Sandbox) -> None:
    program = "import os\nos.mkdir('d')\nopen('d/out', 'wb').write(b'7')\nopen('big', 'wb').write(bytes(2 << 20))"
    limits = Limits(seconds=60, file_mb=4)
    collect = ["d/out", "big", "missing"]
    result = asyncio.run(sandbox.run({"main.py": program}, ["python", "main.py"], limits, collect=collect))
    assert {name: len(content) for name, content in result.files.items()} == {"d/out": 1, "big": 2 << 20}


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"])
def test_a_file_outside_of_the_folder_is_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(BirlError, match="within the sandbox's working folder"):
        asyncio.run(sandbox.run({name: "x"}, ["true"], LIMITS))
    assert inside("src/./main.py") == "src/main.py"


@pytest.mark.parametrize(
    ("program", "limits", "ending", "detail"),
    [
        ("import time\ntime.sleep(99)", {"seconds": 0.3}, Ending.TIMEOUT, "took longer than 0.3 s"),
        ("while True: pass", {"cpu_seconds": 1, "seconds": 60}, Ending.TIMEOUT, "processor time"),
        ("print('x' * 10000)", {"output_bytes": 100}, Ending.OUTPUT, "more than 100 bytes"),
        ("import os\nos.abort()", {}, Ending.KILLED, "signal 6"),
    ],
    ids=["wall", "processor", "output", "signal"],
)
def test_how_it_ends(sandbox: Sandbox, program: str, limits: dict, ending: Ending, detail: str) -> None:
    result = python(sandbox, program, Limits(**{"seconds": 60, **limits}))
    assert (result.ending, detail in result.detail) == (ending, True), result
    assert len(result.stdout) <= result.truncated * 100 and not result.good


def test_files_have_a_bound(sandbox: Sandbox) -> None:
    result = python(sandbox, "open('x', 'wb').write(bytes(3 << 20))", Limits(seconds=60, file_mb=1))
    refused = b"too large" in result.stderr or b"No space" in result.stderr
    assert not result.good and (refused or result.ending is Ending.OUTPUT)


def test_all_processes_share_the_memory(sandbox: Sandbox) -> None:
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20)) * 60
        time.sleep(50)
        os._exit(0)
os.wait()  # the kernel may end one of them only
"""
    result = python(sandbox, program, Limits(seconds=60, memory_mb=128))
    assert result.ending is Ending.MEMORY and "128 MiB" in result.detail


def test_many_at_once_do_not_mix(sandbox: Sandbox) -> None:
    async def run() -> list[Result]:
        return await asyncio.gather(
            *(sandbox.run({"main.py": f"print({i})"}, ["python", "main.py"], LIMITS) for i in range(12))
        )

    assert [int(result.stdout) for result in asyncio.run(run())] == list(range(12))


def test_a_cancelled_run_leaves_nothing_and_the_sandbox_goes_on(sandbox: Sandbox) -> None:
    async def run() -> Result:
        task = asyncio.create_task(sandbox.run({}, ["sleep", "98.7654"], LIMITS))
        await asyncio.sleep(0.4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await sandbox.run({}, ["echo", "on"], LIMITS)

    assert asyncio.run(run()).stdout == b"on\n"
    assert not running("98.7654")


def running(word: str) -> list[str]:
    return [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if word in read(p)]


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_folder_is_removed_however_deep(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where there is one, as disks may be slow
    place, here = tempfile.mkdtemp(dir=memory), os.open(".", os.O_DIRECTORY)
    os.chdir(place)
    try:
        for step in range(1100):  # deeper than Python's calls, and longer than a path may be
            os.mkdir("a folder")
            if step % 100 == 0:
                os.symlink(tmp_path, "link")
                os.symlink(tmp_path / "kept", "file")
                os.mkdir("closed", 0)
            os.chdir("a folder")
    finally:
        os.fchdir(here)
        os.close(here)
    top = os.open(place, os.O_DIRECTORY)
    with pytest.raises(OSError, match="more than 64 folders"):
        folder.size(top, 1 << 40)
    assert 100 < folder.size(top, 100) < 100_000
    os.close(top)
    folder.remove(place)
    assert not os.path.exists(place) and (tmp_path / "kept").read_text() == "x"
    folder.remove(place)


@pytest.mark.parametrize("kind", ["landlock", "process"])
async def test_a_killed_guest_takes_its_program_with_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    word = f"96.{os.getpid()}{LOCAL.index(kind)}"
    if kind == "landlock":  # its processes are one group; those of the other kind need a control group
        monkeypatch.setattr(cgroup, "_places", lambda: [])
    sandbox = LocalSandbox(kind, python=interpreters()[-1], workers=1)
    worker = sandbox._workers[0]
    program = f"import os\nos.fork()\nos.execvp('sleep', ['sleep', '{word}'])"
    task = asyncio.create_task(sandbox.run({"main.py": program}, ["python", "main.py"], Limits(seconds=60)))
    while len(running(word)) < 2:
        await asyncio.sleep(0.02)
    guest, scratch = worker._process, worker._scratch
    assert guest is not None and Path(scratch).exists()
    guest.kill()
    result = await task
    left = [scratch] * Path(scratch).exists()
    again = await sandbox.run({}, ["echo", "on"], LIMITS)
    await sandbox.close()
    assert (result.ending, again.stdout, left) == (Ending.KILLED, b"on\n", [])  # not an error of the sandbox
    wait_for(lambda: kind == "process" or not running(word))


@pytest.mark.parametrize("group", [False, True], ids=["alone", "with its group"])
@pytest.mark.parametrize("kind", LOCAL)
def test_the_end_of_the_launcher_ends_everything(kind: str, group: bool) -> None:
    """Killed, it cannot clean up."""
    import subprocess
    import sys

    word = f"97.{os.getpid()}{LOCAL.index(kind)}{int(group)}"
    script = f"""
import asyncio
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Limits
async def main():
    sandbox = await open_sandbox({kind!r}, workers=1)
    await sandbox.run({{}}, ["true"], Limits(seconds=60))
    print(sandbox._workers[0]._scratch, flush=True)
    await sandbox.run({{}}, ["sleep", {word!r}], Limits(seconds=60))
asyncio.run(main())
"""
    words = [sys.executable, "-c", script]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ}, start_new_session=True)
    assert launcher.stdout is not None
    scratch = launcher.stdout.readline().decode().strip()
    assert bool(scratch) == (kind in ("landlock", "process"))
    wait_for(lambda: any(pid != str(launcher.pid) for pid in running(word)))
    if group:
        os.killpg(launcher.pid, signal.SIGKILL)
    else:
        launcher.kill()
    launcher.wait()
    wait_for(lambda: not running(word) and not (scratch and Path(scratch).exists()))


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", LOCAL)
def test_without_control_groups_the_processes_are_watched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_places", lambda: [])

    async def run() -> Result:
        sandbox = LocalSandbox(kind, python=interpreters()[-1], workers=1)
        program = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        held = bytearray(60 << 20)\n"
        program += "        for i in range(0, len(held), 4096): held[i] = 1\n        time.sleep(99)\ntime.sleep(99)"
        try:
            return await sandbox.run({"main.py": program}, ["python", "main.py"], Limits(seconds=120, memory_mb=128))
        finally:
            await sandbox.close()

    result = asyncio.run(run())
    assert result.ending is Ending.MEMORY


def test_control_groups_go_with_the_sandbox() -> None:
    group = cgroup.MemoryGroup.make(f"birl-sandbox-{os.getpid()}-test")
    if group is None:  # not root, or a container without: then there is nothing that could stay
        assert os.geteuid() or not any(os.access(place, os.W_OK) for _, place in cgroup._places())
        return
    folder = group.folder
    left = folder.with_name("birl-sandbox-999999999-0-left")  # of a launcher that was killed
    left.mkdir()
    other = cgroup.MemoryGroup.make(f"birl-sandbox-{os.getpid()}-other")
    assert other is not None and folder.exists() and not left.exists()
    other.remove()
    group.remove()
    assert not folder.exists()


def test_a_closed_sandbox_says_so() -> None:
    async def run() -> Result:
        sandbox = LocalSandbox("process", python="/usr/bin/python3", workers=1)
        await sandbox.close()
        return await sandbox.run({}, ["true"], LIMITS)

    assert asyncio.run(run()).ending is Ending.ERROR


def test_limits_must_be_positive() -> None:
    with pytest.raises(BirlError, match=r"limits\.seconds=0: must be more than 0"):
        Limits(seconds=0)
