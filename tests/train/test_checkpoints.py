"""What a run makes of its checkpoints: damage is found and said, a failing disk stops the run, none is lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config.load import load_with_choices
from birl.config.schema import SFT
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.store import Store
from birl.models.manifest import digest
from birl.train.command import train

pytestmark = pytest.mark.usefixtures("forking")


def trained(tiny: Path, folder: Path, *words: str, run: str = "run") -> dict[str, Any]:
    rows = [{"prompt": f"What is {i} + 2?", "response": f"It is {i + 2}."} for i in range(12)]
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = [
        *(f"model.path={tiny}", "model.dtype=float32", f"data.train={folder}/a.jsonl", "batch_size=2"),
        *(
            "optimizer.lr=0.001",
            "optimizer.schedule=constant",
            "checkpoint.every=1",
            "checkpoint.keep_last=0",
            "steps=3",
            "threads=1",
        ),
        *("track.console=plain", "track.tensorboard=false", "track.report=false", f"run={folder}/{run}"),
    ]
    by_key = {word.partition("=")[0]: word for word in (*settings, *words)}
    return train(*load_with_choices(SFT, list(by_key.values())))


def tensors(folder: Path, step: int, run: str = "run") -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / run / "checkpoints" / f"step-{step:06d}")


def spoil(folder: Path, step: int, how: str) -> None:
    path = folder / "run" / "checkpoints" / f"step-{step:06d}"
    file = next((path / "tensors").glob("*.distcp"))
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "missing":
        file.unlink()
    else:
        (path / "manifest.json").write_text("{")


def test_another_run_does_not_inherit_scores(tiny: Path, tmp_path: Path) -> None:
    """They may be of other data: with resume=FOLDER `before` and the best were those, and no checkpoint was kept."""
    for name, answer in (("easy", "It is 3."), ("hard", "apples " * 9)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "What is 1 + 2?", "response": answer}))
    trained(tiny, tmp_path, "validation.every=1", f"data.validation={tmp_path}/easy.jsonl", run="one")
    words = ("validation.every=1", f"data.validation={tmp_path}/hard.jsonl", f"resume={tmp_path}/one", "steps=5")
    summary = trained(tiny, tmp_path, *words, run="other")
    records = [json.loads(r) for r in (tmp_path / "other/validation.jsonl").read_text().splitlines()]
    assert summary["before"]["step"] == 3 and [r["step"] for r in records] == [3, 4, 5]
    assert summary["best"] == max(-r["validation/nll"] for r in records)


@pytest.mark.parametrize("how", ["flipped", "missing", "manifest"])
def test_a_damaged_newest_one_is_set_aside_loudly(tiny: Path, tmp_path: Path, capsys: Any, how: str) -> None:
    trained(tiny, tmp_path, "steps=5", run="whole")
    trained(tiny, tmp_path)
    spoil(tmp_path, 3, how)
    capsys.readouterr()
    trained(tiny, tmp_path, "steps=5", "checkpoint.keep_last=1")
    said = capsys.readouterr().out
    assert "WARNING: the checkpoint step-000003 is damaged" in said and "Resumed from" in said and "at step 2" in said
    assert {"flipped": "SHA-256", "missing": "is missing", "manifest": "cannot be read"}[how] in said
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-000003.damaged",
        "step-000005",
    ]
    whole = tensors(tmp_path, 5, "whole")
    assert all(torch.equal(t, whole[n]) for n, t in tensors(tmp_path, 5).items())


def test_a_damaged_one_that_was_asked_for_is_refused(tiny: Path, tmp_path: Path) -> None:
    trained(tiny, tmp_path)
    spoil(tmp_path, 3, "flipped")
    chosen = tmp_path / "run" / "checkpoints" / "step-000003"
    with pytest.raises(BirlError, match=r"step-000003 is damaged: .*SHA-256.*Choose an older one"):
        trained(tiny, tmp_path, f"resume={chosen}", run="other")
    assert chosen.is_dir()


def test_all_damaged_is_an_error_that_says_so_and_touches_nothing(tiny: Path, tmp_path: Path) -> None:
    trained(tiny, tmp_path)
    for step, how in ((1, "flipped"), (2, "missing"), (3, "manifest")):
        spoil(tmp_path, step, how)
    with pytest.raises(BirlError, match=r"All 3 checkpoints of .*(?s:.)*step-000003: .*(?s:.)*step-000001: ") as error:
        trained(tiny, tmp_path, "steps=5")
    assert "run=ANOTHER_FOLDER" in str(error.value)
    assert [s.step for s in step_folders.saved(tmp_path / "run" / "checkpoints")] == [1, 2, 3]


def test_a_write_that_fails_stops_the_run_at_the_next_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.digest

    def full(file: Path) -> str:
        if "step-000002" in str(file):
            raise OSError(28, "No space left on device")
        return original(file)

    monkeypatch.setattr(checkpoint, "digest", full)
    with pytest.raises(BirlError, match=r"Could not save the checkpoint .*step-000002: No space left on device"):
        trained(tiny, tmp_path, "steps=6")
    monkeypatch.undo()
    assert [s.step for s in step_folders.saved(tmp_path / "run" / "checkpoints")] == [1]
    assert len((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()) <= 3
    assert trained(tiny, tmp_path, "steps=6")["step"] == 6


def test_a_run_goes_on_with_other_ranks(tiny: Path, tmp_path: Path) -> None:
    """Two ranks with parts of the weights, then one alone, then two copies: the losses of one rank."""
    trained(tiny, tmp_path, "steps=6", run="whole")
    for steps, layout in ((2, "parallel.fsdp=2"), (4, "parallel.fsdp=1"), (6, "parallel.ddp=2")):
        assert trained(tiny, tmp_path, f"steps={steps}", layout)["step"] == steps
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_bytes().splitlines()]
        for run in ("whole", "run")
    ]
    assert len(losses[1]) == 6 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    whole = tensors(tmp_path, 6, "whole")
    for name, tensor in tensors(tmp_path, 6).items():
        torch.testing.assert_close(tensor, whole[name], atol=1e-5, rtol=1e-4)


def test_an_empty_run_folder_goes_on_from_the_store(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    store = f"checkpoint.store=file://{tmp_path}/store"
    trained(tiny, tmp_path, "steps=5", run="whole")
    trained(tiny, tmp_path, store, "checkpoint.keep_last=2")
    kept = sorted(p.name for p in (tmp_path / "store" / "run").glob("step-*"))
    assert kept == ["step-000002", "step-000003"]
    (tmp_path / "run").rename(tmp_path / "lost")
    (tmp_path / "store" / "run" / "step-000003" / "COMPLETE").unlink()
    capsys.readouterr()
    trained(tiny, tmp_path, store, "steps=5")
    assert "taking step 2 from" in capsys.readouterr().out
    whole = tensors(tmp_path, 5, "whole")
    assert all(torch.equal(t, whole[n]) for n, t in tensors(tmp_path, 5).items())
    (tmp_path / "run").rename(tmp_path / "lost again")
    with pytest.raises(BirlError, match="belongs to a run with another configuration"):
        trained(tiny, tmp_path, store, "steps=5", "optimizer.lr=0.5")
    other = trained(tiny, tmp_path, f"resume=file://{tmp_path}/store/run", "steps=6", "optimizer.lr=0.5", run="other")
    assert other["step"] == 6


def test_a_store_that_fails_at_first_learns_later_what_the_run_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    about, tried = Store.about, list[Path]()

    def failing(store: Store, run: Path) -> None:
        tried.append(run)
        if len(tried) == 1:
            raise BirlError("no connection")
        about(store, run)

    monkeypatch.setattr(Store, "about", failing)
    trained(tiny, tmp_path, f"checkpoint.store=file://{tmp_path}/store")
    assert "WARNING: step 1 is not on the store. no connection" in capsys.readouterr().out
    assert len(tried) == 2 and (tmp_path / "store" / "run" / "config.json").is_file()


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refused(*_: Any) -> list[Path]:
        raise PermissionError("step-000001 is not ours")

    monkeypatch.setattr(step_folders, "prune", refused)
    assert trained(tiny, tmp_path)["step"] == 3
    assert "WARNING: an old checkpoint cannot be deleted. step-000001 is not ours" in capsys.readouterr().out


def test_whatever_is_damaged_is_set_aside_and_the_run_goes_on(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    """One run, of which one thing after the other is spoilt; metrics that are gone are a warning."""
    root = tmp_path / "run" / "checkpoints"
    trained(tiny, tmp_path, "steps=2")

    def no_files() -> None:
        (root / "step-000002/manifest.json").write_text('{"files": {}}')

    def other_type() -> None:
        path, manifest = root / "step-000002", json.loads((root / "step-000002/manifest.json").read_text())
        state = json.dumps({**json.loads((path / "state.json").read_text()), "totals": [1]})
        (path / "state.json").write_text(state)
        manifest["files"]["state.json"] = {"bytes": len(state), "sha256": digest(path / "state.json")}
        (path / "manifest.json").write_text(json.dumps(manifest))

    def loop() -> None:
        shutil.rmtree(root / "step-000002")
        (root / "step-000002").symlink_to("step-000002")

    for damage in (no_files, other_type, loop):
        damage()
        capsys.readouterr()
        trained(tiny, tmp_path, "steps=2")
        said = capsys.readouterr().out
        assert "WARNING: the checkpoint step-000002 is damaged" in said and "at step 1" in said, damage.__name__
        assert not checkpoint.verify(root / "step-000002")
    shutil.copytree(root / "step-000002", root / "step-999999")
    (tmp_path / "run/metrics.jsonl").unlink()
    trained(tiny, tmp_path, "steps=3")
    said = capsys.readouterr().out
    assert "step-999999 is damaged" in said and "metrics.jsonl is shorter than at the checkpoint" in said
    assert "at step 2" in said
    assert step_folders.latest(root) == root / "step-000003"
