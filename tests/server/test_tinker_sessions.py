"""What ended makes room for what is new, and nothing else does."""

import time
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.server.tinker.futures import Promises
from birl.server.tinker.runs import Runs
from birl.server.tinker.store import Store
from birl.server.tinker.tenants import SILENT, Session, Sessions
from tests.server.test_tinker_store import BAD, GOOD, kept

NONE: Any = None  # no model is needed


def session(owner: str = "alice", silent: float = 0.0, **more: Any) -> Session:
    return Session(owner=owner, metadata={}, heard=time.monotonic() - silent, **more)


def test_sessions_that_ended_make_room_the_oldest_first(tmp_path: Path) -> None:
    sessions, ids = Sessions(Store(tmp_path)), [letter * 32 for letter in "abcdef"]
    sessions.add(ids[0], session(made=3.0, silent=SILENT + 1), 3)
    sessions.add(ids[1], session(made=2.0, finished=True), 3)
    sessions.add(ids[2], session(made=1.0, silent=SILENT - 60), 3)
    sessions.add(ids[3], session("bob"), 1)  # another's do not count
    sessions.add(ids[4], session(), 3)
    assert sessions.of("alice") == [ids[2], ids[0], ids[4]]
    assert sessions.ended(f"{ids[1]}:train:0") and not sessions.ended(f"{ids[2]}:sample:1")
    sessions.add(ids[5], session(), 3)
    with pytest.raises(BirlError, match="You have 3 sessions, which is your quota: close one"):
        sessions.add("0" * 32, session(), 3)
    again = Sessions(Store(tmp_path))
    again.restore()
    assert again.of("alice") == [ids[2], ids[4], ids[5]] and again.of("bob") == [ids[3]]


def test_a_run_that_is_forgotten_answers_what_waits_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    runs = Runs(kept(tmp_path), NONE, Promises(), 0)
    runs.restore()
    waiting = runs.by_id[GOOD].promises[2]
    runs.forget(GOOD)
    assert waiting.answer is not None and b"its session has ended" in waiting.answer.body
    assert [c.run for c in runs.store.checkpoints()] == [GOOD, BAD]
    assert {f.name for f in runs.store.run(GOOD).iterdir()} == {"run.json", "weights"}
    again = Runs(runs.store, NONE, Promises(), 0)
    again.restore()
    assert again.by_id[GOOD].deleted and not again.by_id[BAD].deleted
    runs.store.delete(next(runs.store.checkpoints(GOOD)))
    again.forget(GOOD)
    assert set(again.by_id) == {BAD} and not runs.store.run(GOOD).exists()
