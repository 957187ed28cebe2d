import os
from pathlib import Path

import pytest
import torch

from birl.cli import checkpoints
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from tests.full_disk import full_disk


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.a": torch.arange(6.0).view(2, 3) * scale, "optimizer.a.step": torch.tensor(3.0) * scale}


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, tensors(), {"position": 12})
    found = {k: torch.zeros_like(t) for k, t in tensors().items()}
    state = checkpoint.fill(path, found)
    assert state["step"] == 7 and state["position"] == 12
    assert all(torch.equal(found[k], t) for k, t in tensors().items())
    assert step_folders.latest(tmp_path) == path
    assert torch.equal(checkpoint.read_tensors(path, "model.")["a"], tensors()["model.a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.a"), "model.a is not in the model"),
        (lambda t: t.update({"module.model.a": torch.zeros(1)}), "module.model.a is missing"),
        (lambda t: t.update({"model.a": torch.zeros(3, 2)}), r"\[2, 3\] float32 in the checkpoint and \[3, 2\]"),
        (lambda t: t.update({"model.a": torch.zeros(2, 3, dtype=torch.bfloat16)}), "bfloat16 in the model"),
    ],
)
def test_any_difference_in_key_shape_or_type_is_refused(tmp_path: Path, change, message: str) -> None:
    """EasyRL's defect: every key had a prefix, strict=False, and nothing was loaded without a word."""
    path = checkpoint.save(tmp_path, 1, tensors(), {})
    wanted = tensors(0.0)
    change(wanted)
    with pytest.raises(BirlError, match=message):
        checkpoint.fill(path, wanted)
    assert all(not t.any() for t in wanted.values())


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, tensors(), {})
    file = next((path / "tensors").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "SHA-256" in checkpoint.verify(path)[0]
    with pytest.raises(BirlError, match=r"damaged.*SHA-256"):
        checkpoint.check(path)
    file.write_bytes(content[:-3])
    assert "bytes instead of" in checkpoint.verify(path)[0]
    (path / "manifest.json").unlink()
    assert "missing" in checkpoint.verify(path)[0]


def test_a_crash_while_saving_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checkpoint.save(tmp_path, 1, tensors(), {})
    for place in ("digest", "_sync", "_files"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, place, lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(tmp_path, 2, tensors(2.0), {})
        assert step_folders.latest(tmp_path) == first and not checkpoint.verify(first)
    checkpoint.save(tmp_path, 2, tensors(2.0), {})
    assert [s.step for s in step_folders.saved(tmp_path)] == [1, 2]


@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_is_said_and_leaves_no_half_checkpoint(tmp_path: Path, step: int) -> None:
    """Where there is an earlier one, it says so, and only there."""
    earlier = [checkpoint.save(tmp_path, 1, tensors(), {}).name] if step > 1 else []
    said = "step-000001, the newest complete checkpoint, is untouched" if earlier else "no complete checkpoint yet"
    with full_disk(100_000), pytest.raises(BirlError, match=f"Could not save the checkpoint .*{said}"):
        checkpoint.save(tmp_path, step, {"model.a": torch.zeros(10**6)}, {})
    assert [p.name for p in tmp_path.iterdir()] == earlier


@pytest.mark.parametrize("error", [MemoryError(), TimeoutError(), AssertionError("\n"), ValueError("two\nlines")])
def test_what_failed_is_named_even_where_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(checkpoint, "digest", lambda file: (_ for _ in ()).throw(error))
    with pytest.raises(BirlError, match=f"step-000001: ({type(error).__name__}|two) "):
        checkpoint.save(tmp_path, 1, tensors(), {})
    assert not list(tmp_path.iterdir())


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, tensors(), {})
    for step in (2, 3):
        (tmp_path / f"step-00000{step}.part").mkdir()
    step_folders.prune(tmp_path, 2, {1})
    assert [s.step for s in step_folders.saved(tmp_path)] == [1, 3, 4]
    assert not list(tmp_path.glob("*.part"))
    step_folders.prune(tmp_path, 0, set())
    assert [s.step for s in step_folders.saved(tmp_path)] == [1, 3, 4]


def test_a_kill_while_an_old_one_is_deleted_leaves_none_that_is_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a checkpoint, or, without its state, stayed for ever."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, tensors(), {})

    def killed(path: Path) -> None:
        (Path(path) / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(step_folders.shutil, "rmtree", killed)
        step_folders.prune(tmp_path, 1, set())
    assert [s.step for s in step_folders.saved(tmp_path)] == [2]
    step_folders.prune(tmp_path, 1, set())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_prune_leaves_a_run_what_it_is_writing(tmp_path: Path) -> None:
    """`birl checkpoints RUN prune 1` beside a run that saves."""
    checkpoint.save(tmp_path, 4, tensors(), {})
    part = tmp_path / "step-000005.part"
    part.mkdir()
    step_folders.prune(tmp_path, 1, set())
    assert part.exists()
    os.utime(part, (0, 0))  # what a crash left long ago
    step_folders.prune(tmp_path, 1, set())
    assert not part.exists() and [s.step for s in step_folders.saved(tmp_path)] == [4]


def test_a_damaged_state_is_listed_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        path = checkpoint.save(tmp_path / "checkpoints", step, tensors(), {"best_step": 1})
    (path / "state.json").write_bytes(b"\xff{")
    assert checkpoints.run([str(tmp_path)]) == 0
    rows = capsys.readouterr().out
    assert "best" in rows and "damaged" in rows
    with pytest.raises(BirlError, match=r"step-000002/state\.json cannot be read .* verify"):
        checkpoints.run([str(tmp_path), "prune", "1"])  # which one to keep as the best nobody knows
    assert [s.step for s in step_folders.saved(tmp_path / "checkpoints")] == [1, 2]
