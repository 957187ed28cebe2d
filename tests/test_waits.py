"""Who waits for whom, and what happens when nothing happens."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from birl import waits


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> waits.Table:
    monkeypatch.setattr(waits, "TABLE", waits.Table())
    return waits.TABLE


def test_the_table_says_who_waits_for_what(table: waits.Table) -> None:
    with (
        waits.waiting("training", "group 12", "engine 1", deadline=600),
        waits.waiting("rollout", "a slot", "training"),
    ):
        waits.event("step 3 trained")
        text = table.text()
    for word in ("training", "group 12", "engine 1", "600 s", "a slot", "step 3 trained"):
        assert word in text
    assert not table.waits and "group 12" not in table.text()


def test_only_the_last_events_are_kept(table: waits.Table) -> None:
    for number in range(200):
        waits.event(f"event {number}.")
    assert "event 199." in table.text() and "event 150." in table.text() and "event 149." not in table.text()


def test_a_wait_beyond_its_deadline_is_a_stall(table: waits.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "GRACE", 0.0)
    with waits.waiting("a", "b", "c", deadline=0.01):
        time.sleep(0.02)
        assert "beyond its deadline" in waits.stalled(1e9)
    assert not waits.stalled(1e9)


def test_silence_is_a_stall_and_life_is_none(table: waits.Table) -> None:
    table.last -= 10
    assert "nothing has happened for 5 s" in waits.stalled(5)
    waits.alive()
    assert not waits.stalled(5)


def test_a_stall_is_acted_on_whatever_somebody_waits_for(table: waits.Table, tmp_path: Path) -> None:
    table.last -= 10
    reports: list[str] = []
    with waits.waiting("group \ud83d", "rewards", "reward workers"):  # half of a character, as a row may have
        dog = waits.Watchdog(5, reports.append, tmp_path / "stall.txt", interval=0.0)
        dog._watch()
    assert "nothing has happened" in reports[0] and "reward workers" in (tmp_path / "stall.txt").read_text()


PROGRAM = """
import sys, time
from pathlib import Path
from birl.waits import Watchdog, event, exit_at_once, waiting
with Watchdog(0.3, exit_at_once, Path(sys.argv[1]), interval=0.05):
    event("the last thing that happened")
    with waiting("training", "group 7", "engine 2"):
        time.sleep(60)  # an event loop that is stuck
"""


def test_a_stuck_process_ends_and_says_who_waited(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "stall.txt")], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 3
    for text in (done.stderr, (tmp_path / "stall.txt").read_text()):
        assert "nothing has happened" in text and "group 7" in text and "the last thing that happened" in text
    assert "goes on from it" in done.stderr
