"""What a Tinker service finds on disk: a damaged file takes nothing else with it, holds nothing up, and stays."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from birl.errors import BirlError
from birl.learner.low_rank_run import LowRankConfig
from birl.server.tinker import futures, tenants
from birl.server.tinker.checkpoints import Checkpoints
from birl.server.tinker.command import alone
from birl.server.tinker.futures import Answer, Promises
from birl.server.tinker.runs import Run, Runs
from birl.server.tinker.store import Checkpoint, Record, Store
from birl.server.tinker.work import Work
from tests.full_disk import full_disk

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
    store = Store(tmp_path)  # as after a restart
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
        assert [c.run for c in Store(tmp_path).checkpoints()] == [GOOD]
    assert not file.exists() and (tmp_path / "sessions").is_dir()  # the last one has expired


def test_a_save_reads_no_file_of_other_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read all of all tenants: 77 ms of processor time for a thousand."""
    store = kept(tmp_path)
    (path,) = (c.path for c in store.checkpoints(BAD))
    changed = store.find(path)
    assert changed is not None
    changed.public, changed.expires = True, 10.0**10
    with monkeypatch.context() as patch:
        patch.setattr("birl.server.tinker.store.read_json", lambda file: pytest.fail(f"{file} is read"))
        assert len(store.of("alice")) == 2 and store.find(path) != changed
        store.change(changed)
        assert store.find(path) == changed
        store.save(Checkpoint(run=BAD, kind="weights", name="y", owner="bob", made=2.0), {"file": b"1"}, False)
        store.delete(changed)
        assert store.find(path) is None and [c.name for c in store.checkpoints(BAD)] == ["y"]
    assert Store(tmp_path).known == store.known


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


@pytest.mark.parametrize("wrong", [{"made": "x"}, {"size": None}, {"metadata": 3}])
def test_an_item_with_a_value_of_another_type_is_left_out(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Lists of its owner's items, which were sorted and added up, failed."""
    store = kept(tmp_path)
    for name in "ab":
        store.write("sessions", name * 32, tenants.Session(owner="alice", metadata={}).about())
    for file in (tmp_path / "sessions" / f"{'b' * 32}.json", store.run(BAD) / "weights/x/checkpoint.json"):
        known = json.loads(file.read_text())
        file.write_text(json.dumps(known | {key: v for key, v in wrong.items() if key in known}))
    store = Store(tmp_path)
    sessions = tenants.Sessions(store)
    sessions.restore()
    assert [c.run for c in store.of("alice")] == [GOOD]
    assert sessions.of("alice") == ["a" * 32] if "size" not in wrong else len(sessions.of("alice")) == 2


def test_pipes_hold_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock", mode=0o600)
    with pytest.raises(OSError, match="named pipe"), alone(tmp_path):
        pass
    with pytest.raises(BirlError, match=r"keys=.*named pipe"):
        tenants.read(str(tmp_path / "lock"))
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(BirlError, match=r"folder=.*file: cannot be made \(File exists\)"), alone(tmp_path / "file"):
        pass
    with pytest.raises(BirlError, match=r"keys=.*file: has no key; write a name and a key"):  # it let everyone in
        tenants.read(str(tmp_path / "file"))
    os.mkfifo(tmp_path / "audit.jsonl")
    with pytest.raises(OSError, match="named pipe"):
        Store(tmp_path)


class Late(Store):
    """A request comes while a snapshot shortens the journal."""

    late: "threading.Thread | None" = None

    def journal(self, id: str, size: int | None = None) -> list[Record]:
        result = super().journal(id, size)
        if self.late is None:
            self.late = threading.Thread(target=self.append, args=(id, Record(3, "optim_step", b"{}")))
            self.late.start()
            self.late.join(0.1)
        return result


def test_a_snapshot_loses_no_request_that_was_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    store, state = Late(tmp_path), {"w": torch.zeros(3, dtype=torch.float32)}
    store.snapshot(GOOD, state, 1, {"steps": 1}, {})
    assert store.late is not None
    store.late.join()
    assert [r.seq for r in store.journal(GOOD)] == [2, 3]
    monkeypatch.setattr(Store, "append", lambda *_: os._exit(1))  # killed before it would write them again
    store.snapshot(GOOD, state, 2, {"steps": 2}, {})
    assert [r.seq for r in store.journal(GOOD)] == [3]


class Busy(Store):
    """A request of the run comes while it is put to disk."""

    request: Callable[[], object]

    def snapshot(self, *args: Any) -> None:
        self.asked = threading.Thread(target=self.request)
        self.asked.start()
        self.asked.join(0.2)
        super().snapshot(*args)


def test_a_request_that_comes_while_its_run_is_put_to_disk_has_the_tensors_that_stay(tmp_path: Path) -> None:
    """What it learned went into tensors that were dropped, and a snapshot said that it was in there."""
    kept(tmp_path)
    store = Busy(tmp_path)

    def adapter(*_: Any) -> Any:
        nothing = {"load": lambda *_: None, "load_gradients": lambda *_: None, "gradients": dict, "state": dict}
        return SimpleNamespace(steps=1, **nothing)

    shared: Any = SimpleNamespace(dtype=torch.float32, chosen=lambda _: {}, run=adapter)
    runs, loaded = Runs(store, shared, Promises(), 0), []
    runs.restore()
    run = runs.by_id[GOOD]
    run.adapter, run.done = adapter(), 2
    store.request = lambda: loaded.append(runs.load(run))
    runs.unload(run)
    store.asked.join()
    assert loaded == [run.adapter] and run.snapshot == 2
    run.working, run.done = object(), 3  # pyright: ignore
    runs.unload(run)
    assert run.adapter is loaded[0] and run.snapshot == 2  # it has something to do


def test_a_full_disk_takes_nothing_that_was_accepted_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = kept(tmp_path)
    journal = store.run(GOOD) / "journal"
    with full_disk(journal.stat().st_size + 30), pytest.raises(OSError, match="too large"):
        store.append(GOOD, Record(3, "optim_step", b"{}"))
    store.note("alice", "first")
    with full_disk((tmp_path / "audit.jsonl").stat().st_size + 9), pytest.raises(OSError, match="too large"):
        store.note("alice", "second")
    store.note("alice", "third")
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert events == ["first", "third"]
    store.append(GOOD, Record(4, "optim_step", b"{}"))  # there is room again
    assert [r.seq for r in store.journal(GOOD)] == [2, 4]
    runs = Runs(store, NONE, Promises(), 0)
    runs.restore()
    run, weights = runs.by_id[GOOD], {"w": torch.zeros(3000, dtype=torch.float32)}
    run.adapter, run.done = SimpleNamespace(steps=1, state=dict, gradients=lambda: weights), 2  # pyright: ignore
    with full_disk(1000):
        runs.try_to_save(run)
    assert "There is no snapshot" in caplog.text and run.snapshot == 1
    assert [r.seq for r in store.journal(GOOD)] == [2, 4] and not list(tmp_path.rglob("*.safetensors.partial"))
    runs.try_to_save(run)
    assert run.snapshot == 2 and [r.seq for r in store.journal(GOOD)] == [4]


def test_answers_for_which_there_is_no_room_leave_memory_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that never fetches them would fill both."""
    runs = Runs(kept(tmp_path), NONE, Promises(), 0)
    runs.restore()
    run, weights = runs.by_id[GOOD], {"w": torch.zeros(3, dtype=torch.float32)}
    run.adapter = SimpleNamespace(steps=1, state=dict, gradients=lambda: weights)  # pyright: ignore
    for run.done in range(2, 101):
        runs.promise(run, run.done).settle(Answer(b"x" * 10))
    runs.try_to_save(run)
    monkeypatch.setattr(futures, "MOST_KEPT", 0)
    monkeypatch.setattr(futures, "SWEEP", 0.0)
    runs.promise(run, 101)  # makes room
    assert all(p.answer is None for p in run.promises.values()) and len(runs.promises.by_id) == 2
    run.done = 101
    runs.try_to_save(run)
    left = sorted(int(f.name) for f in (runs.store.run(GOOD) / "answers").iterdir())
    assert left == list(range(38, 101)) and min(run.promises) == 38


@pytest.mark.parametrize(
    ("kind", "behind", "due"),
    [("forward_backward", 1000, 0), ("forward_backward", 1100, 1), ("optim_step", 250, 0), ("optim_step", 300, 1)],
)
def test_a_run_that_makes_no_steps_has_snapshots_too(kind: str, behind: int, due: int) -> None:
    run = Run(id=GOOD, owner="alice", base="model", done=behind, snapshot=0)
    assert Work._due(NONE, run, Record(behind, kind, b"")) == due


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the two was there between the renames, and the next start deleted both."""
    store, rename = kept(tmp_path), Path.rename
    (x,) = store.of("alice")[:1]

    def killed(path: Path, target: Path) -> Path:
        if target == store.folder(x):
            raise SystemExit("killed")
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "rename", killed)
        store.save(x, {"a": b"2"}, True)
    again = Store(tmp_path)
    assert (again.folder(x) / "a").read_bytes() == b"1" and again.find(x.path) is not None
    again.save(x, {"a": b"2"}, True)
    assert (again.folder(x) / "a").read_bytes() == b"2" and not list(tmp_path.rglob("*.partial"))
