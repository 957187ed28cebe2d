"""Models that see, split over ranks: the losses, gradient norms and weights of one rank, also where a rank's samples,
or its part of a row, have no picture; and runs of the commands."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from birl.cli import main
from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.models import vision
from birl.models.load import load_model, load_tokenizer
from birl.models.slices import sketched
from birl.models.vision import load_pictures
from birl.parallel.ranks import Grid, Ranks
from birl.text.pictures import Bounds
from birl.types import Picture
from tests import sights
from tests.data.test_pack import make
from tests.learner.test_learner import reinforce
from tests.models.test_vision import NEEDS
from tests.parallel.processes import on_ranks
from tests.train import test_pictures as runs


@dataclass(frozen=True)
class Outcome:
    norms: list[float]
    logprobs: torch.Tensor
    weights: dict[str, torch.Tensor]


def trained(ranks: Ranks, folder: Path, kind: str, frozen: bool) -> Outcome:
    """Two steps on rows of which the second half has no picture."""
    split = ranks.sharded
    model: Any = sketched(folder, torch.device("cpu"), pictures=True) if split else load_model(folder, pictures=True)
    pictures = load_pictures(folder, model, load_tokenizer(folder), Bounds())
    assert pictures is not None
    vision.give(model, pictures, frozen=frozen)
    learner = Learner(model, ranks=ranks, dtype=torch.float32, max_grad_norm=0.5, eps=1e-4)
    mark, sizes = sights.MARKS[kind][0], {"7": (24, 16), "3": (16, 32)}
    shown = [Picture.of(sights.drawn(text, size)) for text, size in sizes.items()]
    texts = [(f"Hi {mark} and {mark}", shown), (f"{mark}: ", shown[1:]), ("Only text", []), ("No more", [])]
    samples = [
        make(pictures.encode(text, iter(own)), tuple(range(40 + i, 46 + i + e)), i, e, 1.0 - e + i)
        for i, (text, own) in enumerate(texts)
        for e in range(2)
    ]
    batches = pack(samples, [0.1] * len(samples), max(80, *(len(s.tokens) for s in samples)), parts=ranks.shares)
    norms = []
    for _ in range(2):
        learner.learn([(batch, reinforce) for batch in batches], Stats())
        norms.append(learner.optim_step(1e-3))
    order = torch.cat([b.sample for b in batches]).argsort(stable=True)
    logprobs = torch.cat(learner.ranks.each(batches, learner.forward))[order]
    weights = {n: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for n, w in learner.weights().items()}
    return Outcome(norms, logprobs, weights)


BOTH = Grid(cp=2, tp=2)
PLAIN = Grid(tp=2, sequence=False)
SWAPPED = Grid(cp=2, context="ulysses")


@pytest.mark.parametrize(
    ("kind", "frozen", "grid"),
    [
        *((kind, False, Grid(fsdp=2)) for kind in ("qwen3_vl", "qwen3_5", "gemma3", "internvl", "qwen3_vl_moe")),
        *(("qwen3_vl", True, grid) for grid in (Grid(fsdp=2), Grid(tp=2), Grid(cp=2))),
        *(
            (kind, False, grid)
            for kind in ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "smolvlm")
            for grid in (Grid(tp=2), Grid(cp=2))
        ),
        *((kind, False, grid) for kind in ("qwen3_vl", "qwen3_5", "gemma3") for grid in (PLAIN, SWAPPED, BOTH)),
        *((kind, False, Grid(cp=2)) for kind in ("gemma4", "internvl")),
        *(("lfm2_vl", False, grid) for grid in (Grid(fsdp=2), Grid(tp=2), Grid(cp=2))),
        *(("qwen3_vl_moe", False, grid) for grid in (Grid(fsdp=2, ep=2), Grid(cp=2, ep=2), Grid(tp=2))),
        ("qwen3_5_moe", False, Grid(fsdp=2, ep=2)),
    ],
    ids=lambda value: f"{value} {value.context} {value.sequence}" if isinstance(value, Grid) else str(value),
)
def test_a_split_model_is_the_whole_one(kind: str, frozen: bool, grid: Grid, tmp_path: Path) -> None:
    """Qwen's positions have three axes, and Qwen3-VL's features are added behind its first layers; tokens of Gemma's
    pictures see later ones, which another rank has."""
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    folder = sights.folder(tmp_path / "m", kind)
    one = trained(Ranks(), folder, kind, frozen)
    moved = vision.tower(load_model(folder, pictures=True)).items()
    assert all(torch.equal(weight, one.weights[name]) for name, weight in moved) == frozen
    for two in on_ranks(grid, trained, folder, kind, frozen):
        assert two.norms[0] == pytest.approx(one.norms[0], rel=1e-5)
        assert two.norms[1] == pytest.approx(one.norms[1], rel=1e-4)  # of weights that have moved
        torch.testing.assert_close(two.logprobs, one.logprobs, atol=1e-4, rtol=1e-5)
        for name, weight in one.weights.items():
            torch.testing.assert_close(
                two.weights[name], weight, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("command", "kind", "axis", "words"),
    [
        ("sft", "qwen3_5", "fsdp", ("model.freeze_vision=true",)),
        *(("rl", "qwen3_5", axis, ()) for axis in ("fsdp", "cp")),
        ("rl", "qwen3_vl", "fsdp", ("lora.rank=2", "lora.targets=all-linear")),
        ("rl", "qwen3_vl", "tp", ("lora.rank=2", "lora.targets=all-linear", "lora.dora=true")),
        ("rl", "gemma3", "tp", ()),
        ("dpo", "gemma3", "cp", ()),
    ],
)
def test_runs_are_those_of_one_rank(command: str, kind: str, axis: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Answers come from an engine on every rank, over a copy of the weights that sees."""
    folder, data = sights.folder(tmp_path / "m", kind), runs.rows(tmp_path)[command]
    words = (*words, "model.pictures=true", "steps=2", "optimizer.lr=1e-3", "optimizer.eps=1e-4")
    one = runs.run(command, folder, data, tmp_path / "one", *words)
    two = runs.run(command, folder, data, tmp_path / "two", f"parallel.{axis}=2", *words)
    for name in ("loss", "grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
    a, b = runs.weights(tmp_path / "one"), runs.weights(tmp_path / "two")
    assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    if command == "rl":
        records = [[json.loads(x) for x in (tmp_path / f / "rollouts.jsonl").open()] for f in ("one", "two")]
        tokens = [[s["tokens"] for r in own for s in r["samples"]] for own in records]
        assert tokens[0] == tokens[1]
        gaps = [s.get("gaps", 0.0) for r in records[1] for s in r["samples"]]  # 0.0: of all tokens of a sample
        assert max(np.abs(each).max() for each in gaps) <= 1e-4


def test_a_run_resumes_on_another_layout(tmp_path: Path) -> None:
    folder, data = sights.folder(tmp_path / "m", "gemma3"), runs.rows(tmp_path)["sft"]
    words = ("optimizer.lr=1e-3", "optimizer.eps=1e-4")
    runs.run("sft", folder, data, tmp_path / "one", *words, "steps=3")
    for steps, axis in enumerate(("tp", "cp", "fsdp"), 1):
        runs.run("sft", folder, data, tmp_path / "two", *words, f"steps={steps}", f"parallel.{axis}=2")
    a, b = runs.weights(tmp_path / "one"), runs.weights(tmp_path / "two")
    assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


@pytest.mark.parametrize(
    ("kind", "word", "reason"), [("gemma4", "tp", " of Gemma4TextModel is nothing that birl can split")]
)
def test_what_is_not_built_is_refused(
    kind: str, word: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded."""
    folder, data = sights.folder(tmp_path / "m", kind), runs.rows(tmp_path)["sft"]
    (folder / "model.safetensors").write_bytes(b"nothing that could be loaded")
    words = [f"model={folder}", f"data.train=[{data}]", f"run={tmp_path / 'run'}", *runs.QUIET, "steps=1"]
    assert main(["sft", *words, "model.pictures=true", f"parallel.{word}=2"]) == 2
    assert reason in capsys.readouterr().err
