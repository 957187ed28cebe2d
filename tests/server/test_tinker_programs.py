"""Programs of Tinker's cookbook run unchanged against `birl tinker`, from their first step to their last checkpoint."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.tinker_programs import (
    MODEL,
    NAMES,
    PROGRAMS,
    PYTHON,
    SMALL,
    Program,
    environment,
    missing,
    play,
    world,
)
from tests.server.tinker_server import Server, serving

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Tinker cookbook: make setup-tinker"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    folder = tmp_path_factory.mktemp("cookbook")
    with serving(world(folder), folder / "state", f"names=[{','.join(NAMES)}]") as server:
        yield folder, server


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_to_its_end(place: tuple[Path, Server], name: str) -> None:
    if missing(name):
        pytest.skip(f"{PROGRAMS[name].beside} is missing")
    folder, server = place
    found = play(name, folder, server.url)
    if PROGRAMS[name].kl:
        gaps = {key: value for key, value in found.items() if key.startswith("optim/kl_sample_train")}
        assert gaps and all(abs(value) <= 1e-6 for value in gaps.values())


def test_a_program_that_is_killed_goes_on_from_its_checkpoint(place: tuple[Path, Server]) -> None:
    """The cookbook's `checkpoint_utils`: weights and optimizer of the last batch that was saved."""
    folder, server = place
    log = folder / "logs" / "killed"
    words = (MODEL, SMALL[0], "max_steps=4", "groups_per_batch=2", "eval_every=0", "save_every=1", "max_tokens=8")
    program = Program("math_rl.train", (*words, "behavior_if_log_dir_exists=resume"))
    given: dict[str, Any] = {
        "cwd": folder,
        "env": environment(folder, server.url, program, log),
        "stdin": subprocess.DEVNULL,
    }
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(program.words(log), **given, **quiet)
    saved, until = log / "checkpoints.jsonl", time.monotonic() + 300
    while not (saved.exists() and "\n" in saved.read_text()) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    first.kill()
    first.wait()
    before = [json.loads(line) for line in saved.read_text().splitlines()]
    again = subprocess.run(program.words(log), **given, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stderr[-3000:]
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    steps = [line["optimizer_steps"] for line in lines if "optimizer_steps" in line]
    assert before[0]["batch"] == 1 and steps[-1] == 4, (before, steps)  # not begun anew: four steps of one optimizer
    assert json.loads(saved.read_text().splitlines()[-1])["name"] == "final"
