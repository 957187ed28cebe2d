"""LoRA and DoRA on weights that are split over ranks: the matrices, norms and checkpoints of one rank."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birl.data.pack import pack
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.learner.low_rank_ranks import Copy, SplitBase, sent
from birl.learner.low_rank_run import LowRankConfig, SharedBase
from birl.models import attention
from birl.models.heads import add_score_head
from birl.models.slices import quantize
from birl.models.target_logprobs import Top
from birl.parallel.ranks import Grid, Ranks
from birl.server.tinker.requests import Sample
from birl.server.tinker.sampling import Scores, scored, top_behind
from birl.types import SamplingParams
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import reinforce, same
from tests.parallel.test_tensor import EPS, made, trained_on
from tests.tiny import tiny_model

LORA, DORA = Lora(rank=4, seed=1), Lora(rank=4, alpha=8.0, seed=1, dora=True)


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("grid", [Grid(fsdp=2), Grid(tp=2), Grid(fsdp=2, tp=2), Grid(cp=2, tp=2)], ids=str)
@pytest.mark.parametrize("name", ["llama untied, with biases", "states"])
def test_split_weights_change_no_number(name: str, grid: Grid, lora: Lora) -> None:
    """Biases, that nothing trains, rows of both kinds of linear layers, and layers that every rank has whole."""
    alone = trained_on(Ranks(), name, {"lora": lora})
    for found in on_ranks(grid, trained_on, name, {"lora": lora}):
        same(found, alone, 1e-5)


@pytest.mark.parametrize("name", ["phi3", "sinks"])
def test_nor_do_matrices_of_several_layers_and_experts(name: str) -> None:
    test_split_weights_change_no_number(name, Grid(tp=2), DORA)


def steps(ranks: Ranks, folder: str, first: int, last: int, alpha: float = 8.0) -> dict[str, Any]:
    """Optimizer steps of a reward model with DoRA, from the checkpoint before `first` on; saves one at the end."""
    model = made("qwen3")
    add_score_head(model, 0)
    dora = Lora(rank=4, alpha=alpha, seed=1, dora=True)
    learner = Learner(model, ranks=ranks, dtype=torch.float32, max_grad_norm=0.5, eps=EPS, lora=dora)
    if first > 0:
        checkpoint.fill(Path(folder) / f"step-{first:06d}", learner.tensors(), ranks)
        learner.loaded(first)
    norms = []
    for step in range(first, last):
        samples = groups(step + 3)
        work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
        learner.learn([(batch, reinforce) for batch in work], Stats())
        norms.append(learner.optim_step(1e-2))
    path = checkpoint.save(Path(folder), last, learner.tensors(), {}, ranks)
    return {"norms": norms, "path": path}


def test_a_checkpoint_fits_every_layout(tmp_path: Path) -> None:
    """Names and shapes are those of one rank: 4 ranks -> 2 -> 1 -> 2 others, and the numbers of one all along."""
    wanted = steps(Ranks(), str(tmp_path / "one"), 0, 4)
    other = str(tmp_path / "other")
    norms = on_ranks(Grid(fsdp=2, tp=2), steps, other, 0, 1)[0]["norms"]
    norms += on_ranks(Grid(tp=2), steps, other, 1, 2)[0]["norms"]
    norms += steps(Ranks(), other, 2, 3)["norms"]
    last = on_ranks(Grid(fsdp=2), steps, other, 3, 4)[0]
    assert norms + last["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    one, two = (checkpoint.read_tensors(found["path"]) for found in (wanted, last))
    assert one.keys() == two.keys()
    assert {"model.score.weight", "model.model.layers.0.self_attn.o_proj.lora_magnitude"} <= one.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert any(t.abs().max() > 1e-2 for name, t in one.items() if name.startswith("model.") and "lora_B" in name)


def refused(ranks: Ranks, folder: str) -> str:
    try:
        steps(ranks, folder, 1, 2, alpha=16.0)
    except BirlError as error:
        return str(error)
    return ""


def test_matrices_of_another_alpha_are_refused_on_every_rank(tmp_path: Path) -> None:
    steps(Ranks(), str(tmp_path), 0, 1)
    for said in on_ranks(Grid(tp=2), refused, str(tmp_path)):
        assert "lora.alpha=16: the checkpoint was trained with lora.alpha=8" in said


def quantised(ranks: Ranks) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of LoRA on a base in 4 bits: losses, and what a checkpoint would hold."""
    model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(quantize(model, "nf4"), ranks=ranks, dtype=torch.float32, lora=LORA, eps=EPS)
    losses, samples = [], groups(4)
    for _ in range(3):
        stats, work = Stats(), pack(samples, [0.1] * len(samples), 80, parts=ranks.shares)
        learner.learn([(batch, reinforce) for batch in work], stats)
        learner.optim_step(1e-3)
        losses.append(stats.loss)
    return losses, {name: t.clone() for name, t in learner.tensors().items()}


def test_copies_of_a_quantised_base_train_as_one() -> None:
    losses, tensors = quantised(Ranks())
    for found, matrices in on_ranks(Grid(ddp=2), quantised):
        assert found == pytest.approx(losses, abs=1e-5) and matrices.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(matrices[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "layer"), [("phi3", r"qkv_proj"), ("states", r"linear_attn\.\w+")])
def test_adapters_of_what_ranks_do_not_share_out_are_refused(name: str, layer: str) -> None:
    with pytest.raises(BirlError, match=rf"parallel\.tp=2: birl cannot share out adapters of \S+{layer},"):
        SplitBase(made(name), torch.float32, 80, Ranks(Grid(tp=2)))


def scored_on(ranks: Ranks, name: str) -> tuple[Scores, Top] | None:
    """All that may be asked about a prompt, computed with this rank's part of a base and an adapter."""
    model, how = made(name), (torch.float32, 80)
    base = SharedBase(model, *how) if ranks.alone else SplitBase(model, *how, ranks)
    run = base.run(LowRankConfig(rank=4, seed=1))
    for key, master in run.masters.items():
        if key.endswith("lora_B"):
            master.data.fill_(0.02)
    run.round()
    ids = torch.arange(5, 30, dtype=torch.int64)
    targets = torch.stack([ids[1:], (ids[1:] * 7) % 300, torch.full((24,), -1, dtype=torch.int64)], 1).numpy()
    sample = Sample(prompt=tuple(ids.tolist()), count=1, params=SamplingParams(max_tokens=1), scored_from=1, top=3,
                    targets=targets, alternatives=4)  # fmt: skip
    copy, number = Copy(base, ranks), run.weights.number
    given = ({number: sent(run.weights)}, [number], {}, number, ids[:-1])
    found = [copy.evaluate(*given, partial(*f)) for f in ((scored, sample, 3), (top_behind, 20, 5))]
    return None if ranks.share else (found[0], found[1])


@pytest.mark.parametrize("grid", [Grid(fsdp=2), Grid(tp=2), Grid(ddp=2, tp=2)], ids=str)
@pytest.mark.parametrize("name", ["many heads", "llama untied, with biases"])
def test_what_is_asked_about_a_prompt_needs_no_whole_base(name: str, grid: Grid) -> None:
    """Rank 0 of `birl tinker` kept a copy of the whole model for it."""
    alone = scored_on(Ranks(), name)
    assert alone is not None and alone[0].logprobs is not None and np.isnan(alone[0].logprobs[0])
    for found in (f for f in on_ranks(grid, scored_on, name) if f is not None):
        for one, other in zip(everything(*found), everything(*alone), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


def everything(scores: Scores, top: Top) -> list[Any]:
    assert scores.top is not None and scores.alternatives is not None
    return [scores.logprobs, scores.targets, *scores.top, *scores.alternatives, top.tokens, top.logprobs]
