"""Checkpoints in the background: what is written is what was there when it began, and no failure is lost."""

import threading
import time
from pathlib import Path

import pytest
import torch

from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.checkpoints import Writer
from birl.parallel.ranks import Ranks
from tests.full_disk import full_disk


def writing(root: Path, step: int, gate: threading.Event | None = None):
    def write(tensors: dict[str, torch.Tensor], group: object) -> None:
        assert gate is None or gate.wait(10)
        checkpoint.save(root, step, tensors, {})

    return write


def test_it_writes_what_was_there_when_it_began(tmp_path: Path) -> None:
    writer, gate, tensors = Writer(), threading.Event(), {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    writer.begin(tensors, writing(tmp_path, 1, gate), Ranks())
    assert writer.staged == 32
    for tensor in tensors.values():
        tensor.zero_()
    writer.check()  # not a failure, and no wait
    assert step_folders.latest(tmp_path) is None
    gate.set()
    writer.wait()
    found = checkpoint.read_tensors(tmp_path / "step-000001")
    assert torch.equal(found["a"], torch.arange(4.0)) and torch.equal(found["b"], torch.ones(2, 2))


def test_threads_that_begin_later_have_their_cores(tmp_path: Path) -> None:
    """PyTorch keeps what one thread sets for all that have computed nothing yet."""
    writer, before, found = Writer(), torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        writer.begin({"a": torch.zeros(3)}, writing(tmp_path, 1), Ranks())
        writer.wait()
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == [2]


def test_at_most_one_is_written_at_a_time(tmp_path: Path) -> None:
    writer, gate, running, most = Writer(), threading.Lock(), 0, 0

    def write(tensors: dict[str, torch.Tensor], group: object) -> None:
        nonlocal running, most
        with gate:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        checkpoint.save(tmp_path, int(tensors["n"]), tensors, {})
        with gate:
            running -= 1

    for step in (1, 2, 3):
        writer.begin({"n": torch.tensor(step)}, write, Ranks())
    writer.wait()
    assert most == 1 and [s.step for s in step_folders.saved(tmp_path)] == [1, 2, 3]


def test_a_failure_is_raised_once_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    writer = Writer()
    writer.begin({"a": torch.zeros(3)}, writing(tmp_path, 1), Ranks())
    writer.wait()
    with full_disk(100_000):
        writer.begin({"a": torch.zeros(10**6)}, writing(tmp_path, 2), Ranks())
        deadline = time.monotonic() + 20
        with pytest.raises(BirlError, match="Could not save the checkpoint"):
            while time.monotonic() < deadline:
                writer.check()
                time.sleep(0.01)
    writer.check()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert not checkpoint.verify(tmp_path / "step-000001")
