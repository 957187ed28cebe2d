"""What a Tinker service finds on disk: a damaged file takes nothing else with it, holds nothing up, and stays."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.errors import BirlError
from birl.learner.low_rank_run import LowRankConfig
from birl.server.tinker import tenants
from birl.server.tinker.checkpoints import Checkpoints
from birl.server.tinker.command import alone
from birl.server.tinker.futures import Answer, Promises
from birl.server.tinker.runs import Run, Runs
from birl.server.tinker.store import Checkpoint, Record, Store

GOOD, BAD = f"{'a' * 32}:train:0", f"{'b' * 32}:train:0"
NONE: Any = None  # a model is not needed to read files
FILES = ("run.json", "state.safetensors", "journal", "answers/1", "weights/x/checkpoint.json")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "pipe": pipe,
    "endless": endless,
    "deep": lambda path: path.write_text("[" * 100_000),
    "empty": lambda path: path.write_text(""),
    "list": lambda path: path.write_text("[]"),
    "other": lambda path: path.write_text('{"owner": 3, "seq": 1, "expires": "x"}'),
    "long": lambda path: path.write_text('{"seq": 2, "kind": "x", "size": 99999999999999, "crc": 0}\nabc'),
}


def kept(root: Path) -> Store:
    store = Store(root)
    for id in (GOOD, BAD):
        store.make_run(id, Run(id=id, owner="alice", base="model", config=LowRankConfig(rank=4)).about())
        about = {"steps": 1, "broken": ""}
        store.snapshot(id, {"w": torch.zeros(3, dtype=torch.float32)}, 1, about, {1: Answer(b"{}")})
        store.append(id, Record(2, "optim_step", b"{}"))
        store.save(Checkpoint(run=id, kind="weights", name="x", owner="alice", made=1.0), {"a": b"1"}, False)
    return store


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_of_a_run_takes_no_other_run_with_it(
    file: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = kept(tmp_path)
    path = store.run(BAD) / file
    DAMAGE[damage](path)
    runs = Runs(store, NONE, Promises(), 0)
    assert GOOD in {run.id for run in runs.restore()}
    assert runs.by_id[GOOD].done == 1 and list(runs.by_id[GOOD].waiting) == [2]
    assert [c.run for c in store.checkpoints()] == ([GOOD, BAD] if "checkpoint" not in file else [GOOD])
    if file in ("run.json", "state.safetensors"):
        assert set(runs.by_id) == {GOOD} and str(store.run(BAD)) in caplog.text
        with pytest.raises(BirlError, match="cannot be read"):
            runs.create(BAD, "alice", "model", None, {})
    assert path.is_symlink() or path.exists()


def test_a_checkpoint_that_says_it_is_another_is_none(tmp_path: Path) -> None:
    """Its path would lead out of the folder, where removing it removes something else."""
    store = kept(tmp_path)
    file = store.run(BAD) / "weights/x/checkpoint.json"
    about = json.loads(file.read_text())
    for more in ({"name": "../../../sessions"}, {"run": GOOD}, {"kind": "sampler_weights"}, {"expires": 1.0}):
        file.write_text(json.dumps(about | more))
        assert [c.run for c in store.checkpoints()] == [GOOD]
    assert not file.exists() and (tmp_path / "sessions").is_dir()  # the last one has expired


def test_damaged_samplers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    about = {"owner": "alice", "base": "model", "path": None, "clients": 0}
    store.write("samplers", f"{'a' * 32}:sample:0", about)
    for i, text in enumerate(("[]", "", '{"owner": "alice"}', "[" * 100_000)):
        (tmp_path / f"samplers/{'b' * 32}-sample-{i}.json").write_text(text)
    (tmp_path / "samplers/notes.json").write_text("{}")
    checkpoints = Checkpoints(store, NONE, 0, NONE, NONE)
    checkpoints.restore()
    assert list(checkpoints.samplers) == [f"{'a' * 32}:sample:0"]
    assert caplog.text.count("is left out") == 4


def test_pipes_hold_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock", mode=0o600)
    with pytest.raises(OSError, match="named pipe"), alone(tmp_path):
        pass
    with pytest.raises(BirlError, match=r"keys=.*named pipe"):
        tenants.read(str(tmp_path / "lock"))
    os.mkfifo(tmp_path / "audit.jsonl")
    with pytest.raises(OSError, match="named pipe"):
        Store(tmp_path)
