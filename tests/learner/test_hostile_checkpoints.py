"""Checkpoints from elsewhere: nothing in them is unpickled, and no name or link leads out of the folder."""

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from birl.cli import checkpoints, main
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.export import copy_files, export
from birl.learner.learner import Learner
from birl.learner.store import COMPLETE, Store
from birl.models.load import load_model, save_hf_config
from birl.models.manifest import digest
from birl.parallel.ranks import Ranks
from tests.tiny import tiny_model_folder, tiny_tokenizer


class Harm:
    """Unpickling it makes the folder `harm`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.arange(6.0).view(2, 3),
        "model.b": torch.ones(5, dtype=torch.bfloat16),
        "model.none": torch.zeros(0, 3),
        "optimizer.step": torch.tensor(3.0),
        "lora.base": torch.arange(4, dtype=torch.uint8),
    }


def sealed(path: Path) -> Path:
    """The manifest says what the files are now, as whoever wrote them would say it."""
    (path / "manifest.json").unlink(missing_ok=True)
    files = {str(f.relative_to(path)): f for f in path.rglob("*") if f.is_file()}
    listed = {name: {"bytes": f.stat().st_size, "sha256": digest(f)} for name, f in files.items()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": listed}))
    return path


def old(root: Path, harm: Path | None = None) -> Path:
    """A checkpoint as earlier versions wrote it: torch's own storage, with a pickle as its index."""
    path = root / "step-000001"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors(), storage_writer=dcp.FileSystemWriter(path / "tensors"), no_dist=True)
    if harm is not None:
        index = path / "tensors/.metadata"
        index.write_bytes(pickle.dumps((Harm(harm), index.read_bytes())))
    (path / "state.json").write_text(json.dumps({"format": 1, "step": 1, "version": 4}))
    return sealed(path)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.save(tmp_path, 1, tensors(), {"version": 2})
    assert sorted(f.name for f in (path / "tensors").iterdir()) == ["__0_0.distcp", "index.json"]
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("something was unpickled"))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("something was unpickled"))
    found = checkpoint.read_tensors(path)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in tensors().items())
    size = (path / "tensors/__0_0.distcp").stat().st_size
    assert size == sum(t.nbytes for t in tensors().values())


def test_an_old_checkpoint_is_converted_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old(tmp_path / "checkpoints")
    assert not checkpoint.verify(path)  # it is not set aside as a damaged one
    with pytest.raises(BirlError, match=r"earlier version.*`birl checkpoints .* convert`"):
        checkpoint.read_tensors(path)
    for word in ("converted", "nothing to convert"):
        assert checkpoints.run([str(tmp_path), "convert"]) == 0
        assert f"step-000001: {word}" in capsys.readouterr().out
    assert not checkpoint.verify(path) and step_folders.read_state(path)["version"] == 4
    found = checkpoint.read_tensors(path)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in tensors().items())
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_pickle_runs_nothing_not_even_when_it_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, harm = tmp_path / "run", tmp_path / "harm"
    old(run / "checkpoints", harm)
    (run / "model").mkdir()
    (run / "config.json").write_text("{}")
    for words in (
        *(["chat", "."], ["checkpoints", "."], ["checkpoints", ".", "verify"], ["checkpoints", ".", "convert"]),
        *(["checkpoints", ".", "export", "last", "out"], ["checkpoints", ".", "export-adapter", "last", "out"]),
    ):
        main([word.replace(".", str(run)) if word == "." else word for word in words])
        assert not harm.exists(), words
    assert "mkdir, which no index of a checkpoint has" in capsys.readouterr().err


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    index = json.loads((path / "tensors/index.json").read_text())
    change(index)
    (path / "tensors/index.json").write_text(json.dumps(index))
    return sealed(path)


def part(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model.a"]["parts"][0]


def crumbs(count: int) -> dict[str, Any]:
    """A tensor in so many parts that comparing each with each other takes minutes."""
    parts = [{"at": [0, i], "shape": [1, 1], "file": "__0_0.distcp", "offset": 0} for i in range(count)]
    return {"shape": [1, count], "dtype": "float32", "parts": parts}


@pytest.mark.parametrize(
    "change",
    [
        lambda i: part(i).update(file="../../../secret"),
        lambda i: part(i).update(file="/etc/passwd"),
        lambda i: part(i).update(offset=-1),
        lambda i: part(i).update(offset=2**61),
        lambda i: part(i).update(offset=True),
        lambda i: part(i).update(shape=[2, 4]),
        lambda i: part(i).update(shape=[1, 3]),
        lambda i: part(i).update(at=[1, 0]),
        lambda i: part(i).update(at="00"),
        lambda i: part(i).update(code="x"),
        lambda i: i["tensors"]["model.a"].update(parts=[part(i)] * 2),
        lambda i: i["tensors"].update({"model.b": crumbs(5000)}),
        lambda i: i["tensors"]["model.a"].update(dtype="object"),
        lambda i: i["tensors"]["model.a"].update(dtype=["float32"]),
        lambda i: i["tensors"]["model.a"].update(shape=[2**40, 2**40]),
        lambda i: i["tensors"].update({"model.b": 3}),
        lambda i: i["tensors"].update({"model.b": i["tensors"]["model.a"]}),
        lambda i: i.update(format=1),
        lambda i: i.update(tensors=[]),
    ],
)
def test_an_index_that_lies_is_damage(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = edited(checkpoint.save(tmp_path, 1, tensors(), {}), change)
    assert "index.json cannot be read" in checkpoint.verify(path)[0]
    with pytest.raises(BirlError, match=r"index\.json cannot be read"):
        checkpoint.read_tensors(path)


def broken(name: str) -> Callable[[Path], object]:
    """A file of the checkpoint is replaced by something else."""
    content = {
        "no files": '{"files": {}}',
        "a list": "[]",
        "a text": '"x"',
        "deep": "[" * 100_000,
        "bytes": "\0\1",
        "no numbers": '{"files": {"state.json": {"bytes": "1", "sha256": 2}}}',
        "outside": '{"files": {"../../secret": {"bytes": 1, "sha256": "%s"}}}' % ("0" * 64),
    }[name]
    return lambda path: (path / "manifest.json").write_text(content)


@pytest.mark.parametrize("name", ["no files", "a list", "a text", "deep", "bytes", "no numbers", "outside"])
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x" * 4711)
    path = checkpoint.save(tmp_path / "checkpoints", 1, tensors(), {})
    broken(name)(path)
    problems = checkpoint.verify(path)
    assert problems and "manifest.json cannot be read" in problems[0] and "4711" not in problems[0]


@pytest.mark.parametrize(
    "state",
    ['{"step": 1, "best": "x"}', '{"step": 1, "logs": []}', '{"step": "1"}', "[]", "{}", '{"step": 2}', "[" * 100_000]
    + [f'{{"step": 1, "{name}": {{"a": "b"}}}}' for name in step_folders.STATE if name not in ("extra", "given")],
)
def test_a_state_of_another_type_is_damage(tmp_path: Path, state: str) -> None:
    path = checkpoint.save(tmp_path, 1, tensors(), {})
    (path / "state.json").write_text(state)
    assert "state.json cannot be read" in checkpoint.verify(sealed(path))[0]


def test_a_planted_step_is_not_the_newest(tmp_path: Path) -> None:
    real = checkpoint.save(tmp_path, 3, tensors(), {})
    shutil.copytree(real, tmp_path / "step-999999")
    (tmp_path / "step-999998").mkdir()
    (tmp_path / "step-999997").symlink_to("step-999997")
    assert step_folders.latest(tmp_path) == real
    assert "of step 3" in checkpoint.verify(tmp_path / "step-999999")[0]
    checkpoint.save(tmp_path, 4, tensors(), {})
    assert step_folders.prune(tmp_path, 1, set()) == [real]  # and not the newer one
    aside = step_folders.set_aside(tmp_path / "step-999997")
    assert aside.is_symlink()
    checkpoint.save(tmp_path, 999997, tensors(), {})


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float) -> None:
    """Every digest is right, and a run that went on from it would blame its first answer."""
    checkpoint.save(tmp_path, 1, tensors() | {"model.a": torch.tensor([[0.0, value, 2.0]])}, {})
    into = tensors() | {"model.a": torch.zeros(1, 3)}
    why = r"step-000001 cannot be read: __0_0\.distcp: model\.a holds NaN or infinity"
    for read in (lambda path: checkpoint.fill(path, into), checkpoint.read_tensors):
        with pytest.raises(BirlError, match=why):
            read(tmp_path / "step-000001")


def test_links_and_pipes_are_not_exported(tmp_path: Path) -> None:
    secret, model = tmp_path / "secret", tmp_path / "model"
    secret.mkdir()
    (secret / "key").write_text("KEY")
    (model / "sub").mkdir(parents=True)
    (model / "sub/inside.txt").write_text("x")
    copy_files(model, tmp_path / "good")
    assert (tmp_path / "good/sub/inside.txt").read_text() == "x"
    for name, target in (("README.md", secret / "key"), ("more", secret), ("round", model / "round")):
        (model / name).symlink_to(target)
        with pytest.raises(BirlError, match=name):
            copy_files(model, tmp_path / "out")
        (model / name).unlink()
    os.mkfifo(model / "README.md")
    with pytest.raises(BirlError, match=r"README\.md cannot be copied: it is a named pipe"):
        copy_files(model, tmp_path / "out")
    assert "KEY" not in "".join(f.read_text() for f in (tmp_path / "out").rglob("*") if f.is_file())


@pytest.mark.parametrize("written", ["float32", "bfloat16"])
def test_an_export_has_the_type_that_the_run_computed_in(tmp_path: Path, written: str) -> None:
    folder, run = tiny_model_folder(tmp_path / "model"), tmp_path / "run"
    model = load_model(folder)
    checkpoint.save(run / "checkpoints", 1, Learner(model, dtype=torch.float32).tensors(), {})
    save_hf_config(model, tiny_tokenizer(), run / "model")
    (run / "config.json").write_text(json.dumps({"model.dtype": written}))
    export(run / "checkpoints/step-000001", run, tmp_path / "out")
    from safetensors.torch import load_file

    assert {str(t.dtype) for t in load_file(tmp_path / "out/model.safetensors").values()} == {f"torch.{written}"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == written


@pytest.mark.parametrize("name", ["../escaped", "/tmp/birl-escaped", "a/../../escaped", "..", "C:\\escaped", ""])
def test_names_of_a_store_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/store"
    store = Store(url, pause=0.001)
    path = checkpoint.save(tmp_path / "here", 1, tensors(), {})
    store.put(path, 1, Ranks(), None)
    there = tmp_path / "store/step-000001"
    manifest = json.loads((there / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (there / "manifest.json").write_text(json.dumps(manifest))
    (there / COMPLETE).write_text(digest(there / "manifest.json"))
    with pytest.raises(BirlError, match="leads out of the folder"):
        store.take(1, tmp_path / "deep/er")
    assert not list(tmp_path.rglob("*escaped*"))


@pytest.mark.parametrize("name", ["manifest.json", "state.json", COMPLETE, "tensors/index.json"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_pipe_or_link_on_a_mounted_store_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    store = Store(f"file://{tmp_path}/store", pause=0.001)
    store.put(checkpoint.save(tmp_path / "here", 1, tensors(), {}), 1, Ranks(), None)
    file = tmp_path / "store/step-000001" / name
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved") if kind == "link" else os.mkfifo(file)
    with pytest.raises(BirlError, match="not a regular file"):
        store.take(1, tmp_path / "there")
