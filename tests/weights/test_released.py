"""Engines of other projects get the names, shapes and numbers of the files that transformers writes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.models import attention
from birl.models.slices import fill, sketched
from birl.parallel.ranks import Grid, Ranks
from birl.weights.folder import write
from birl.weights.gathered import Gathered, gathered
from birl.weights.publisher import released
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import reinforce
from tests.tiny import tiny_model, tiny_moe, tiny_moe_folder
from tests.zoo import build

#: experts together, two names for one tensor, a router's buffer, experts on disk as in the module, projections
#: together on disk
KINDS = ["qwen3_moe", "mixtral", "llama", "glm4_moe", "gpt_oss", "hrm_text"]


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_has_what_transformers_saves(kind: str, tmp_path: Path) -> None:
    model = tiny_model() if kind == "llama" else build(kind)
    wanted = saved(model, tmp_path / "saved")
    same(released(model), wanted)
    parameters, asked = dict(model.named_parameters()), []

    def gather(names: Sequence[str]) -> list[torch.Tensor]:
        asked.extend(names)
        return [parameters[name].detach() for name in names]

    split = Gathered(model, torch.float32, gather, originally=True)
    assert split.shapes == {name: (tuple(t.shape), t.dtype) for name, t in wanted.items()}
    same(load_file(write(tmp_path, 1, split, tmp_path / "saved") / "model.safetensors"), wanted)
    asked.clear()
    names = sorted(wanted)
    same({name: split.take([name])[0] for name in names}, wanted)
    assert sorted(asked) == sorted(parameters)  # each once, however small the buckets are
    split.take(names[:1])
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += 1
    same(dict(split.pieces()), saved(model, tmp_path / "later"))
    same(dict(zip(names, split.take(names), strict=True)), load_file(tmp_path / "later/model.safetensors"))


def made(moe: bool) -> Any:
    model = tiny_moe() if moe else tiny_model(kv_heads=2)
    model.set_attn_implementation(attention.NAME)
    return model


def sent(ranks: Ranks, cases: list[tuple[bool, dict[str, Any]]]) -> list[tuple[Any, Any]]:
    """After a step: what an engine is sent, and the learner's own weights."""
    return [after_a_step(Learner(made(moe), dtype=torch.float32, ranks=ranks, **given), ranks) for moe, given in cases]


def after_a_step(learner: Learner, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    samples = groups(3)
    work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
    learner.learn([(batch, reinforce) for batch in work], Stats())
    learner.optim_step(1e-2)
    whole = partial(gathered, learner, dtype=torch.float32, leads=True)
    pieces = Gathered(learner.model, torch.float32, whole, originally=True).pieces()
    own = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in learner.weights().items()}
    return {n: t.clone() for n, t in pieces}, own


LORA = {"lora": Lora(rank=4, seed=1)}


@pytest.mark.parametrize(
    ("grid", "cases"),
    [
        (Grid(fsdp=2, ep=2), [(True, {})]),
        (Grid(fsdp=2), [(True, {}), (True, LORA), (False, {"offload": True})]),
        (Grid(tp=2), [(False, LORA)]),
    ],
    ids=["ep", "fsdp", "tp"],
)
def test_so_do_ranks_that_have_parts(grid: Grid, cases: list[tuple[bool, dict[str, Any]]], tmp_path: Path) -> None:
    for (moe, _), (found, own) in zip(cases, on_ranks(grid, sent, cases)[0], strict=True):
        model = made(moe)
        before = {name: t.clone() for name, t in released(model).items()}
        model.load_state_dict(own, strict=False)
        wanted = saved(model, tmp_path)
        assert found.keys() == wanted.keys() and any(not torch.equal(found[n], t) for n, t in before.items())
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)


def test_a_model_that_is_read_in_parts_goes_back_to_the_names_of_its_files(tmp_path: Path) -> None:
    folder = tiny_moe_folder(tmp_path / "model", "mixtral")
    model = sketched(folder, torch.device("cpu"))
    fill(model)
    same(released(model), load_file(folder / "model.safetensors"))
