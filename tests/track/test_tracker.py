import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from birl.track.log import read_jsonl
from tests.track import runs

FILES = ("metrics.jsonl", "rollouts.jsonl", "validation.jsonl")


def _timeless(run: Path) -> dict[str, list[dict[str, object]]]:
    return {name: [{k: v for k, v in r.items() if k != "time"} for r in read_jsonl(run / name)] for name in FILES}


def sizes(offsets: dict[str, int]) -> dict[str, int]:
    """Without the trace: its first line says when the process began."""
    return {name: offsets[name] for name in FILES}


def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    with runs.tracker(tmp_path / "whole") as whole:
        whole.rewind(None, 0)
        runs.train(whole, 1, 10)
    with runs.tracker(tmp_path / "killed") as killed:
        killed.rewind(None, 0)
        runs.train(killed, 1, 5)
        offsets = killed.offsets()
        runs.train(killed, 6, 7)
    for name in FILES:
        with (tmp_path / "killed" / name).open("ab") as file:
            file.write(b'{"step":8,"torn')
    with runs.tracker(tmp_path / "killed") as resumed:
        resumed.rewind(offsets, 5)
        assert sizes(resumed.offsets()) == sizes(offsets)
        runs.train(resumed, 6, 10)
    assert _timeless(tmp_path / "killed") == _timeless(tmp_path / "whole")


def test_offsets_are_the_sizes_of_the_files(tmp_path: Path) -> None:
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        assert sizes(tracker.offsets()) == dict.fromkeys(FILES, 0)
        runs.train(tracker, 1, 2)
        assert tracker.offsets() == {name: (tmp_path / name).stat().st_size for name in (*FILES, "trace.json")}


def test_a_new_run_empties_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n')
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_log_shorter_than_the_checkpoint_says_is_told_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with runs.tracker(tmp_path, console="plain") as tracker:
        tracker.rewind(dict.fromkeys(FILES, 10), 5)
        tracker.step(6, runs.metrics(6))
    assert "metrics.jsonl is shorter" in capsys.readouterr().out.replace("\n", "")
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["step"] == 6


def test_a_ledger_shorter_than_at_the_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It closes without the lines that it has lost."""
    (tmp_path / "ledger.jsonl").write_text('{"life":1}\n' * 2)
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        offsets = tracker.offsets()
    line = '{"life":1}\n'
    for left, told in (
        (2 * line, False),
        (line, True),
        ("", True),
        ("\0" * 2 * len(line), True),
        (2 * line + "{", False),
    ):
        (tmp_path / "ledger.jsonl").write_text(left)
        with runs.tracker(tmp_path, console="plain") as tracker:
            tracker.rewind(offsets, 1)
        assert ("ledger.jsonl is shorter" in capsys.readouterr().out.replace("\n", "")) is told


def test_rollouts_can_be_switched_off(tmp_path: Path) -> None:
    with runs.tracker(tmp_path, rollouts=False) as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 1)
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b""


def test_finish_writes_and_prints_what_the_run_came_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with runs.tracker(tmp_path, console="plain") as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 10)
        tracker.finish({"next": ["birl chat here"]})
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    measured = {"first": 0.2, "first_step": 0, "last": 0.4, "last_step": 10, "best": 0.4, "name": "all/pass@1"}
    assert summary["validation"] == measured
    assert summary["generated"] == 9000
    out = capsys.readouterr().out
    for words in (
        "0.200 before",
        "0.400 after",
        "0.220 first step",
        "1m1",
        "9,000 generated",
        "birl chat here",
        "2 became right",
    ):
        assert words in out
    assert "\x1b" not in out and "\u202e" not in out
    assert (tmp_path / "report.html").exists()


def test_off_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 5)
        tracker.message("resumed")
        tracker.finish({})
    assert capsys.readouterr().out == ""


def test_live_view_keeps_warnings_and_gives_the_terminal_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler(screen)
    logger = logging.getLogger("tests.live")
    logger.addHandler(handler)
    with pytest.raises(KeyboardInterrupt), runs.tracker(tmp_path, console="auto") as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 5)
        assert sys.stdout is not screen and handler.stream in (sys.stderr, sys.stdout)
        logger.warning("a log line")
        print("a warning", file=sys.stderr)
        tracker.message("resumed from step 5")
        raise KeyboardInterrupt
    logger.removeHandler(handler)
    assert sys.stdout is screen and handler.stream is screen
    shown = screen.getvalue()
    for words in ("a log line", "a warning", "resumed from step 5", "step 5/10"):
        assert words in shown
    assert "\x1b[?25l" not in shown  # a hidden cursor would outlive `kill -9`


def test_a_closed_pipe_does_not_stop_a_run(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.track import runs
with runs.tracker(Path({str(tmp_path)!r}), console="plain") as tracker:
    tracker.rewind(None, 0)
    runs.train(tracker, 1, 10)
    tracker.finish({{}})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() in (0, 120), errors  # 120: the interpreter could not flush its standard output
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 10
    assert (tmp_path / "report.html").exists()


def test_a_record_that_was_turned_off_for_a_while_keeps_its_rows(tmp_path: Path) -> None:
    """It was emptied when it was turned on again, as the checkpoint in between did not know its size."""
    offsets = None
    for step, record in ((1, True), (2, False), (3, True)):
        with runs.tracker(tmp_path, record=record) as tracker:
            tracker.rewind(offsets, step - 1)
            tracker.record({"step": step})
            offsets = tracker.offsets()
            tracker.record({"step": step + 0.5})  # behind the checkpoint
    steps = [json.loads(line)["step"] for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert steps == [1, 3, 3.5]
