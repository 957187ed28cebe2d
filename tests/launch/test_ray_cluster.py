"""Which Ray cluster is joined, and what becomes of one that is started here: with a stand-in for Ray, and with Ray."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.launch import ray as launcher
from birl.launch import ray_cluster
from birl.launch.job import derive
from tests.launch.test_ray import PYTHON, ROOT, WORDS, needs_ray, until

#: as Ray does, it takes what it needs from the environment when it is imported
PACKAGE = """
import os
SEEN = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")}
JOINED, GONE = [], []
def is_initialized(): return bool(JOINED)
def shutdown(): JOINED.clear()
def init(address, **keys):
    if address in GONE: raise ConnectionError
    JOINED.append(address)
"""
#: `ray start --block`: it listens, notes that down, and starts a process that it would not end if it were killed
PROGRAM = """#!{python} -IS
import os, pathlib, socket, subprocess, sys, time
if sys.argv[1] != "start": sys.exit()
if "{broken}": sys.exit("no room for Ray here")
given = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[2:])
found = socket.create_server((given["node-ip-address"], int(given["port"])))
subprocess.Popen(["sleep", "600"], pass_fds=[found.fileno()])
folder = pathlib.Path(given.get("temp-dir") or os.environ["RAY_TMPDIR"] + "/ray")
folder.mkdir(exist_ok=True)
(folder / "words").write_text(" ".join(sys.argv[1:]) + os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"])
(folder / "ray_current_cluster").write_text(given["node-ip-address"] + ":" + given["port"])
time.sleep(600)
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An ordinary one: nothing is set, Ray is installed, and no cluster runs. Gives the folder of Ray's notes."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name in ("RAY_AUTH_MODE", ray_cluster.LOOPBACK, "RAY_worker_niceness"):  # set by what is tested
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    program(tmp_path)
    monkeypatch.setattr(ray_cluster, "program", lambda: str(tmp_path / "program"))
    yield tmp_path / "ray"
    ray_cluster.end()
    sys.modules.pop("ray", None)


def program(folder: Path, broken: str = "") -> None:
    (folder / "program").write_text(PROGRAM.format(python=sys.executable, broken=broken))
    (folder / "program").chmod(0o755)


def listener() -> Any:
    return ray_cluster.socket.create_server((ray_cluster.LOCAL, 0))


def note(folder: Path, address: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "ray_current_cluster").write_text(address)
    return address


def test_ray_is_told_before_it_is_imported(shell: Path) -> None:
    with listener() as there:
        address = note(shell, f"127.0.0.1:{there.getsockname()[1]}")
        ray = ray_cluster.connect("")
    assert ray.SEEN == {"RAY_AUTH_MODE": "token", ray_cluster.LOOPBACK: "0"} and [address] == ray.JOINED
    assert ray_cluster.connect("10.0.0.1:1") is ray  # of the process: it is in one already


def test_a_ray_that_was_imported_before_is_refused(shell: Path) -> None:
    import ray  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]

    with pytest.raises(BirlError, match="Ray was imported before birl could set RAY_AUTH_MODE=token"):
        ray_cluster.connect("", start=True)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "localhost:{}"])
@pytest.mark.parametrize("how", ["key", "variable", "auto"])
def test_the_address_that_is_asked_for(shell: Path, monkeypatch: pytest.MonkeyPatch, address: str, how: str) -> None:
    note(shell, "127.0.0.1:1")  # of another one
    with listener() as there:
        wanted = address.format(there.getsockname()[1])
        if how != "key":
            monkeypatch.setenv("RAY_ADDRESS", wanted)
        given = {"key": wanted, "variable": "", "auto": "auto"}[how]
        assert [wanted] == ray_cluster.connect(given, start=True).JOINED


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("left", ["127.0.0.1:1", "nonsense", ""])
def test_a_cluster_that_is_gone_is_not_waited_for(shell: Path, start: bool, left: str) -> None:
    note(shell, left)
    began = time.monotonic()
    if start:
        (joined,) = ray_cluster.connect("", start=True).JOINED
        assert joined == ray_cluster.running() != left
    else:
        with pytest.raises(BirlError, match="no Ray cluster answers"):
            ray_cluster.connect("")
    assert time.monotonic() - began < 300


def test_one_that_is_named_and_gone_is_not_replaced(shell: Path) -> None:
    with pytest.raises(BirlError, match=r"launch\.address=127\.0\.0\.1:1: no Ray cluster"):
        ray_cluster.connect("127.0.0.1:1", start=True)
    assert not shell.exists()


def test_a_cluster_of_a_run_ends_with_it_and_is_not_found_by_others(shell: Path) -> None:
    (address,) = ray_cluster.connect("", start=True, private=True).JOINED
    assert ray_cluster.running() == "" and ray_cluster.listens(address)
    ray_cluster.end()
    until(lambda: not ray_cluster.listens(address))
    assert not sys.modules["ray"].JOINED
    ray_cluster.end()


def test_only_this_machine_reaches_it(shell: Path) -> None:
    ray_cluster.connect("", start=True)
    words = (shell / "words").read_text()
    assert "--node-ip-address=127.0.0.1 " in words and "--include-dashboard=false" in words and words.endswith("0")


def test_one_that_lets_nobody_in_is_ended(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_join", lambda ray, address: False)
    with pytest.raises(BirlError, match="no Ray cluster answers there that takes this token"):
        ray_cluster.connect("", start=True)
    assert not ray_cluster.listens(ray_cluster.running())


def test_what_ray_says_where_it_does_not_start(shell: Path) -> None:
    program(shell.parent, broken="yes")
    with pytest.raises(BirlError, match=r"start --head .*failed: no room for Ray here"):
        ray_cluster.connect("", start=True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_is_not_taken_leaves_no_cluster(shell: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def hand_over(*arguments: Any) -> str:
        if fails:
            raise KeyboardInterrupt
        return ray_cluster.running()

    monkeypatch.setattr(launcher, "_hand_over", hand_over)
    job, keys = derive("rl", [*WORDS, "run=runs/x"], launcher.Keys()), launcher.Keys()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            launcher.submit(job, keys)
        until(lambda: not ray_cluster.listens(ray_cluster.running()))
        return
    kept: list[bool] = []
    monkeypatch.setattr(launcher, "keep", lambda: kept.append(True))
    assert ray_cluster.listens(launcher.submit(job, keys).more["address"]) and kept


SCRIPT = """
import sys, time
from birl.launch import ray_cluster
ray_cluster.program = lambda: sys.argv[1]
print(ray_cluster.begin(private=sys.argv[2] == "private"), ray_cluster._guard.pid, flush=True)
if sys.argv[2] == "keep": ray_cluster.keep()
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("how", "stays"), [("", False), ("private", False), ("keep", True)])
def test_a_process_that_is_killed_leaves_only_what_it_keeps(shell: Path, how: str, stays: bool) -> None:
    words = [sys.executable, "-c", SCRIPT, str(shell.parent / "program"), how]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdout is not None
    address, guard = child.stdout.readline().split()
    child.stdout.readline()
    child.kill()
    child.wait()
    if stays:
        time.sleep(0.3)
        assert ray_cluster.listens(address) and ray_cluster.running() == address
        os.killpg(int(guard), signal.SIGKILL)
    until(lambda: not ray_cluster.listens(address))


REAL = """
import sys
from birl.launch.ray_cluster import connect
ray = connect("", start=True, private=True)
print(ray.get_runtime_context().gcs_address)
@ray.remote(num_cpus=0)
class Actor:
    def mode(self):
        import os
        return os.environ["RAY_AUTH_MODE"]
actor = Actor.remote()
print(ray.get(actor.mode.remote()), flush=True)
sys.stdin.read()
"""


@needs_ray
def test_in_a_bare_shell_ray_starts_and_listens_on_the_loopback_only(tmp_path: Path) -> None:
    bare = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(tmp_path)}
    before = listening()
    words = ["timeout", "300", str(PYTHON), "-c", REAL]
    child = subprocess.Popen(words, env=bare, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        lines = list[str]()
        while lines[-1:] != ["token"]:
            lines.append(child.stdout.readline().strip())
            assert child.poll() is None, lines
        address = next(line for line in lines if line.startswith("127.0.0.1:"))
        assert ray_cluster.listens(address)
        assert not {place for place in listening() - before if not place.endswith("0100007F")}
    finally:
        child.stdin.close()
        child.wait(120)
    assert not ray_cluster.listens(address)


def listening() -> set[str]:
    """Ports and addresses of this machine's listeners, as the kernel writes them: 8AE7 0100007F."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return {f"{f[1].rpartition(':')[2]} {f[1].rpartition(':')[0]}" for f in lines if f[3] == "0A"}
