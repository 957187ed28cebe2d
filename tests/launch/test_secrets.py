"""Secrets stay in the environment: not in what a launcher shows or writes, not in a run folder, a log, a list of
processes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from birl.cli import main
from birl.launch.launcher import WHERE
from tests.launch import places

#: what must be nowhere, by the variable that has it
NAMES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "BIRL_TOKEN", "RAY_AUTH_TOKEN")
CANARIES = {name: f"canary-{number}-5b1f0e7d" for number, name in enumerate(NAMES)}
NAMED = f"launch.env={','.join(CANARIES)}"
SMALL = (
    *("steps=1", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "rollout.max_failure_rate=1"),
    *("reward=length", "reward.length_target=8", "engine.kind=birl", "threads=1", "engine.threads=1"),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(places.folder(tmp_path))
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def leaks(folder: Path) -> list[str]:
    """Files, and names of files, in which a canary is."""
    found = []
    for path in folder.rglob("*"):
        text = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
        found += [f"{name} in {path.relative_to(folder)}" for name, value in CANARIES.items() if value.encode() in text]
    return found


def test_the_search_finds(here: Path) -> None:
    (here / "a").mkdir()
    (here / "a" / "b.bin").write_bytes(b"\0\xff" + CANARIES["HF_TOKEN"].encode() + b"\0")
    (here / CANARIES["BIRL_TOKEN"]).touch()
    assert sorted(leaks(here)) == [f"BIRL_TOKEN in {CANARIES['BIRL_TOKEN']}", "HF_TOKEN in a/b.bin"]


@pytest.fixture(params=WHERE)
def where(request: pytest.FixtureRequest) -> str:
    if find_spec(f"birl.launch.{request.param}") is None:
        pytest.skip(f"birl.launch.{request.param} is not there")
    return request.param


def test_a_dry_run_names_variables_and_no_values(where: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *places.words(where, NAMED, "--dry-run")]) == 0
    said = capfd.readouterr()
    assert "HF_TOKEN" in said.out
    assert not [name for name, value in CANARIES.items() if value in said.out + said.err]
    assert not leaks(here) and not (here / "runs" / "demo" / "launch").exists()


@pytest.mark.parametrize("where", [name for name in ("aws", "kubernetes", "skypilot") if name in WHERE])
def test_submitted_files_and_words_of_programs_have_none(
    where: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the programs of a place are asked is for everybody on this machine to see."""
    log = places.stand_ins(here, ("aws", "ray", "sky"), {"describe-": "x-1"})
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    assert main(["launch", *places.words(where, NAMED)]) == 0
    said = capfd.readouterr()
    assert log.stat().st_size and (here / "runs" / "demo" / "launch.json").is_file()
    assert not leaks(here)
    assert not [name for name, value in CANARIES.items() if value in said.out + said.err]


@pytest.fixture
def processes() -> Iterator[set[str]]:
    """The command lines of all processes of this machine that had a canary, seen while the test ran."""
    found: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    text = path.read_bytes().decode(errors="replace")
                except OSError:
                    continue
                found.update(text for value in CANARIES.values() if value in text)

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    over.set()
    thread.join()


def test_the_watch_finds(processes: set[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", CANARIES["HF_TOKEN"]])
    try:
        until = time.monotonic() + 20
        while not processes and time.monotonic() < until:
            time.sleep(0.1)
        assert any(CANARIES["HF_TOKEN"] in words for words in processes)
    finally:
        child.kill()
        child.wait()


def test_a_run_with_an_engine_leaves_none(here: Path, tiny: Path, processes: set[str]) -> None:
    words = [f"model.path={tiny}", "data.train=my.jsonl", "data.shuffle=false", "run=runs/demo", *SMALL]
    env = {**os.environ, "PYTHONPATH": str(places.ROOT), "OMP_NUM_THREADS": "1"}
    (here / "my.jsonl").write_text(places.ROW * 4)
    done = subprocess.run(
        [sys.executable, "-m", "birl", "rl", *words], capture_output=True, text=True, timeout=220, env=env, cwd=here
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = here / "runs" / "demo"
    assert (run / "engines" / "engine-0.log").is_file() and (run / "metrics.jsonl").is_file()
    assert not leaks(here) and not processes
    assert not [name for name, value in CANARIES.items() if value in done.stdout + done.stderr]
