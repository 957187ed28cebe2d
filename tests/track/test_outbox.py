import posixpath
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from birl.errors import BirlError
from birl.track import mlflow, outbox
from birl.track.outbox import Marks, Outbox, Record
from birl.track.sink import HIDDEN, Figures, Start, hidden, public


class Notes:
    """A tracker that keeps what it is told; `away`: how often it fails first."""

    def __init__(self, away: int = 0) -> None:
        self.told: list[tuple[int, float]] = []
        self.started: list[Start] = []
        self.closed: list[tuple[Figures, bool]] = []
        self.away, self.gate = away, threading.Event()
        self.gate.set()

    def start(self, start: Start) -> None:
        self.started.append(start)

    def log(self, step: int, figures: Figures) -> None:
        self.gate.wait()
        if self.away:
            self.away -= 1
            raise ConnectionError("nobody there")
        self.told.append((step, figures["x"]))

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None: ...

    def close(self, summary: Figures, failed: bool) -> None:
        self.closed.append((summary, failed))


def _box(run: Path, sink: Any, patience: float = 5.0, room: int = 100, resumed: bool = False) -> Outbox:
    box = Outbox("Notes", sink, Marks(run, "notes"), patience=patience, room=room)
    box.open(Start(run=run, mode="offline", id="new", config={}, resumed=resumed))
    return box


def _put(box: Outbox, *steps: int) -> None:
    for step in steps:
        box.put(Record("log", step, {"x": float(step)}))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PAUSES", (0.01,))


def test_everything_arrives_in_order(tmp_path: Path) -> None:
    sink = Notes()
    box = _box(tmp_path, sink)
    _put(box, 1, 2, 3)
    box.close({"best": 1.0})
    box.close({}, failed=True)
    assert sink.told == [(1, 1.0), (2, 2.0), (3, 3.0)] and sink.closed == [({"best": 1.0}, False)]
    assert not box.unsaid


def test_a_resumed_run_has_the_same_id_and_tells_nothing_twice(tmp_path: Path) -> None:
    first = Notes()
    box = _box(tmp_path, first)
    _put(box, 1, 2, 3)
    box.close({}, failed=True)
    second = Notes()
    box = _box(tmp_path, second, resumed=True)
    _put(box, 2, 3, 4)
    box.close({})
    assert second.told == [(4, 4.0)] and second.started[0].resumed
    assert second.started[0].id == first.started[0].id and not first.started[0].resumed


def test_a_new_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    box = _box(tmp_path, Notes())
    _put(box, 1, 2)
    box.close({})
    again = Notes()
    box = _box(tmp_path, again)
    _put(box, 1)
    box.close({})
    assert again.told == [(1, 1.0)]


def test_a_tracker_that_fails_for_a_while_loses_nothing_and_is_told_of_once(tmp_path: Path) -> None:
    sink = Notes(away=3)
    box = _box(tmp_path, sink)
    _put(box, 1, 2)
    while sink.away:
        threading.Event().wait(0.01)
    box.close({})
    assert sink.told == [(1, 1.0), (2, 2.0)]
    assert len(box.unsaid) == 1 and "nobody there" in box.unsaid[0] and "Notes" in box.unsaid[0]


def test_a_record_that_can_never_be_sent_holds_no_other_up(tmp_path: Path) -> None:
    """Half an emoji in a name, say: until the end of the run nothing came after it."""

    class Strict(Notes):
        def log(self, step: int, figures: Figures) -> None:
            if step == 2:
                "\ud83d".encode()
            super().log(step, figures)

    sink = Strict()
    box = _box(tmp_path, sink)
    for step in (1, 2, 3):
        _put(box, step)
    box.close({})
    assert [step for step, _ in sink.told] == [1, 3]
    first, second = box.unsaid
    assert "Notes refused step 2 (UnicodeEncodeError: " in first and "1 records did not reach Notes" in second


def test_a_tracker_that_is_gone_holds_nobody_up(tmp_path: Path) -> None:
    sink = Notes(away=10**9)
    box = _box(tmp_path, sink, patience=0.3)
    _put(box, 1, 2)
    box.close({})
    assert "2 records did not reach Notes" in box.unsaid[-1]
    later = Notes()
    box = _box(tmp_path, later, resumed=True)  # what was not told is told now
    _put(box, 1, 2, 3)
    box.close({})
    assert [step for step, _ in later.told] == [1, 2, 3]


def test_a_tracker_that_hangs_gets_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    sink = Notes()
    sink.gate.clear()
    box = _box(tmp_path, sink, patience=0.2, room=5)
    _put(box, *range(1, 21))
    box.close({})
    assert "20 records did not reach Notes" in box.unsaid[-1]
    sink.gate.set()


def test_what_the_user_has_to_mend_is_an_error_at_the_start(tmp_path: Path) -> None:
    class LoggedOut(Notes):
        def start(self, start: Start) -> None:
            raise BirlError("log in first")

    with pytest.raises(BirlError, match="log in first"):
        _box(tmp_path, LoggedOut())


def test_a_start_that_hangs_is_a_warning(tmp_path: Path) -> None:
    class Slow(Notes):
        def start(self, start: Start) -> None:
            self.gate.wait()

    sink = Slow()
    sink.gate.clear()
    box = _box(tmp_path, sink, patience=0.1)
    assert "does not answer" in box.unsaid[0]
    _put(box, 1)
    sink.gate.set()
    box.close({})
    assert sink.told == [(1, 1.0)]


def test_an_error_of_the_user_that_comes_too_late_is_a_warning(tmp_path: Path) -> None:
    class LoggedOutSlowly(Notes):
        def start(self, start: Start) -> None:
            self.gate.wait()
            raise BirlError("log in first")

    sink = LoggedOutSlowly()
    sink.gate.clear()
    box = _box(tmp_path, sink, patience=0.1)
    _put(box, 1)
    sink.gate.set()
    box.close({})
    assert any("log in first" in text for text in box.unsaid)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"notes":', '{"notes": [1]}', '{"notes": {"id": "a", "log": "x"}}'])
def test_a_broken_list_of_marks_begins_a_new_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "trackers.json").write_text(text)
    sink = Notes()
    box = _box(tmp_path, sink, resumed=True)
    _put(box, 1)
    box.close({})
    assert sink.told == [(1, 1.0)] and Marks(tmp_path, "notes").read()["log"] == 1


def test_what_opens_doors_is_not_told() -> None:
    config = {
        "env.api_key": "abc",
        "env.options": {"login": {"Password": "x", "user": "me"}},
        "reward.judge": "http://me:pw@host:80/v1#model",
        "engine.urls": ["https://h/v1?api_key=abc&a=1", "http://plain/v1"],
        "hub_token": "hf_x",
        "engine.arguments": ["--api-key=abc", "--hf-token", "abc", "--max-tokens", "9"],
        "env.mcp": ["GITHUB_TOKEN=abc npx server --auth-token abc --verbose"],
        "data.train": ["caf\udce9.jsonl"],  # bytes of a name that are no UTF-8
    }
    told = public(config)
    assert told["engine.arguments"] == [f"--api-key={HIDDEN}", "--hf-token", HIDDEN, "--max-tokens", "9"]
    assert told["env.mcp"] == [f"GITHUB_TOKEN={HIDDEN} npx server --auth-token {HIDDEN} --verbose"]
    assert told["data.train"] == ["caf\\udce9.jsonl"]
    nested = {"env": {"api_key": "abc", "token": ""}, "engine": {"arguments": config["engine.arguments"]}}
    text = yaml.safe_dump(nested | {"judge": config["reward.judge"]})
    assert yaml.safe_load(hidden(text)) == {
        "env": {"api_key": HIDDEN, "token": ""},
        "engine": {"arguments": told["engine.arguments"]},
        "judge": told["reward.judge"],
    }
    assert told["env.api_key"] == told["hub_token"] == told["env.options"]["login"]["Password"] == HIDDEN
    assert told["reward.judge"] == f"http://{HIDDEN}@host:80/v1#model"
    assert told["engine.urls"] == [f"https://h/v1?api_key={HIDDEN}&a=1", "http://plain/v1"]
    assert told["env.options"]["login"]["user"] == "me"


def test_keys_that_only_sound_like_it_stay() -> None:
    config = {
        "rollout.max_tokens": 256,
        "algorithm.denominator": "token",
        "learner.tokens_per_microbatch": 4,
        "data.train": ["a/b@main"],
        "env.token": "",
    }
    assert public(config) == config


@pytest.mark.parametrize(
    "source", ["all", "https://host/rows", "/data/x.jsonl", "../x", ".", "", "a/", "x" * 300, "ü²\ud83d"]
)
def test_mlflow_takes_every_name(source: str) -> None:
    """What mlflow.utils.validation asks of one. It refused the others, and whatever came after them."""
    for name in (f"validation/{source}/score", source):
        known = mlflow._name(name)
        assert (
            len(known) <= 250
            and posixpath.normpath(known) == known
            and known not in (".", "..")
            and known[0] not in "/"
        )
        assert all(char.isalnum() or char in "/_-. " for char in known)
    assert mlflow._name("validation/openai/gsm8k/pass@1") == "validation/openai/gsm8k/pass_1"
