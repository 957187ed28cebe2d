import math
from pathlib import Path

import pytest

from tests.track import runs

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def _read(run: Path):
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def test_events_can_be_read_back(tmp_path: Path) -> None:
    with runs.tracker(tmp_path, tensorboard=True) as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 5)
    events = _read(tmp_path)
    assert [e.step for e in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5]
    assert events.Scalars("reward/mean")[2].value == pytest.approx(0.26)
    assert [e.step for e in events.Scalars("validation/all/pass@1")] == [0, 5]
    assert math.isnan(events.Scalars("grad_norm")[2].value)
    table = events.Tensors("validation/samples")[0].tensor_proto.string_val[0].decode()
    assert "What is 3 + 4?" in table and "<script" not in table and "\u202e" not in table


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    with runs.tracker(tmp_path, tensorboard=True) as killed:
        killed.rewind(None, 0)
        runs.train(killed, 1, 5)
        offsets = killed.offsets()
        runs.train(killed, 6, 9)
    with next((tmp_path / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"\x07torn")
    with runs.tracker(tmp_path, tensorboard=True) as resumed:
        resumed.rewind(offsets, 5)
        runs.train(resumed, 6, 7)
    assert [e.step for e in _read(tmp_path).Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_machine_whose_clock_is_behind_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file came before that of the first machine, whose steps behind the checkpoint were shown."""
    offsets = None
    for first, last, clock in ((1, 9, 2e9), (6, 7, 1e9)):
        monkeypatch.setattr("birl.track.tensorboard.time.time", lambda now=clock: now)
        with runs.tracker(tmp_path, tensorboard=True) as tracker:
            tracker.rewind(offsets, first - 1)
            runs.train(tracker, first, 5 if first == 1 else last)
            offsets = tracker.offsets()
            if first == 1:
                runs.train(tracker, 6, last)
    assert [e.step for e in _read(tmp_path).Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_begun_anew_forgets_the_old_one(tmp_path: Path) -> None:
    for last in (6, 2):
        with runs.tracker(tmp_path, tensorboard=True) as tracker:
            tracker.rewind(None, 0)
            runs.train(tracker, 1, last)
    assert [e.step for e in _read(tmp_path).Scalars("reward/mean")] == [1, 2]
    assert [e.step for e in _read(tmp_path).Scalars("validation/all/pass@1")] == [0]
