"""A vision tower whose weights are split over ranks: the losses, gradient norms and weights of one rank, also where a
rank's samples have no picture; and runs of the commands."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from birl.cli import main
from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.models import vision
from birl.models.load import load_model, load_tokenizer
from birl.models.processor import load_pictures
from birl.models.slices import sketched
from birl.parallel.ranks import Grid, Ranks
from birl.text.pictures import Bounds
from birl.types import Picture
from tests import sights
from tests.data.test_pack import make
from tests.learner.test_learner import reinforce
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
    batches = pack(samples, [0.1] * len(samples), 80, parts=ranks.shares)
    norms = []
    for _ in range(2):
        learner.learn([(batch, reinforce) for batch in batches], Stats())
        norms.append(learner.optim_step(1e-3))
    order = torch.cat([b.sample for b in batches]).argsort(stable=True)
    logprobs = torch.cat(learner.each(batches, learner.forward))[order]
    weights = {n: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for n, w in learner.weights().items()}
    return Outcome(norms, logprobs, weights)


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [("qwen3_vl", False), ("qwen3_vl", True), ("qwen3_5", False), ("gemma3", False), ("internvl", False)],
)
def test_a_split_tower_is_the_whole_one(kind: str, frozen: bool, tmp_path: Path) -> None:
    folder = sights.folder(tmp_path / "m", kind)
    one = trained(Ranks(), folder, kind, frozen)
    moved = vision.tower(load_model(folder, pictures=True)).items()
    assert all(torch.equal(weight, one.weights[name]) for name, weight in moved) == frozen
    for two in on_ranks(Grid(fsdp=2), trained, folder, kind, frozen):
        assert two.norms[0] == pytest.approx(one.norms[0], rel=1e-5)
        assert two.norms[1] == pytest.approx(one.norms[1], rel=1e-4)  # of weights that have moved
        torch.testing.assert_close(two.logprobs, one.logprobs, atol=1e-4, rtol=1e-5)
        for name, weight in one.weights.items():
            torch.testing.assert_close(
                two.weights[name], weight, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("sft", "qwen3_5", ("model.freeze_vision=true",)),
        ("rl", "qwen3_5", ()),
        ("rl", "qwen3_vl", ("lora.rank=2", "lora.targets=all-linear")),
        ("dpo", "gemma3", ()),
    ],
)
def test_runs_are_those_of_one_rank(command: str, kind: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Answers come from an engine on every rank, over a copy of the weights that sees."""
    folder, data = sights.folder(tmp_path / "m", kind), runs.rows(tmp_path)[command]
    words = (*words, "model.pictures=true", "steps=2", "optimizer.lr=1e-3", "optimizer.eps=1e-4")
    one = runs.run(command, folder, data, tmp_path / "one", *words)
    two = runs.run(command, folder, data, tmp_path / "two", "parallel.fsdp=2", *words)
    for name in ("loss", "grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
    a, b = runs.weights(tmp_path / "one"), runs.weights(tmp_path / "two")
    assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    if command == "rl":
        records = [[json.loads(x) for x in (tmp_path / f / "rollouts.jsonl").open()] for f in ("one", "two")]
        tokens = [[s["tokens"] for r in own for s in r["samples"]] for own in records]
        assert tokens[0] == tokens[1]
        assert max(gap for r in records[1] for s in r["samples"] for gap in s["gaps"]) <= 1e-4


@pytest.mark.parametrize("word", ["parallel.tp=2", "parallel.cp=2"])
def test_what_is_not_built_is_refused(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded."""
    folder, data = sights.folder(tmp_path / "m"), runs.rows(tmp_path)["sft"]
    (folder / "model.safetensors").write_bytes(b"nothing that could be loaded")
    words = [f"model={folder}", f"data.train=[{data}]", f"run={tmp_path / 'run'}", *runs.QUIET, "steps=1", word]
    assert main(["sft", *words]) == 2
    assert f"has a vision tower, for which {word} is not built" in capsys.readouterr().err
