"""A checkpoint belongs to no layout: what so many ranks wrote, any other number reads, and the curve goes on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from birl.data.pack import pack
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.checkpoints import Writer
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.parallel.ranks import Grid, Ranks
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import EPS, reinforce
from tests.tiny import tiny_model


def went_on(
    ranks: Ranks, root: Path, steps: range, background: bool, offload: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Optimizer steps `steps`, from the checkpoint before them, with one behind them: losses, and whole weights."""
    model = tiny_model(seed=steps.start)  # other weights than the checkpoint has
    if steps.start == 0:
        model = tiny_model()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks, dtype=torch.float32, max_grad_norm=0.5, eps=EPS, offload=offload)
    writer = Writer()
    if steps.start > 0:
        state = checkpoint.fill(root / f"step-{steps.start:06d}", learner.tensors(), ranks)
        learner.loaded(state["version"])
    losses = []
    for step in steps:
        samples = groups(step + 3)
        work = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
        stats = Stats()
        learner.learn([(batch, reinforce) for batch in work], stats)
        learner.optim_step(1e-3 / (learner.version + 1))
        losses.append(stats.loss)
        if background:  # written while the next step changes everything
            writer.begin(learner.tensors(), partial(written, root / "every", step, ranks), ranks)
    writer.wait()
    checkpoint.save(root, steps.stop, learner.tensors(), {"version": learner.version}, ranks)
    return losses, {n: whole(t).clone() for n, t in learner.weights().items()}


def written(root: Path, step: int, ranks: Ranks, tensors: dict[str, Tensor], group: Any) -> None:
    checkpoint.save(root, step, tensors, {}, ranks, group)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


LAYOUTS = [[Grid(fsdp=8), Grid(fsdp=2), Grid(fsdp=5)], [Grid(ddp=2, fsdp=2), Grid(), Grid(ddp=3)]]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=["parts", "copies"])
def test_another_layout_continues_the_same_curve(layouts: list[Grid], tmp_path: Path) -> None:
    expected, weights = went_on(Ranks(), tmp_path / "alone", range(6), False)
    losses, last = [], {}
    for part, grid in enumerate(layouts):
        steps = range(2 * part, 2 * part + 2)
        found = on_ranks(grid, went_on, tmp_path / "moved", steps, True, timeout=120.0)
        losses += found[0][0]
        last = found[0][1]
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(last[name], weight, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    ends = [checkpoint.read_tensors(tmp_path / run / "step-000006") for run in ("alone", "moved")]
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[1][n] == t for n, t in ends[0].items() if n.endswith(".step"))


def test_parts_in_cpu_memory_are_saved_and_resumed(tmp_path: Path) -> None:
    """optimizer.offload=cpu: every bit of what ranks without it have, while it is written beside the next step, too."""
    ends = {}
    for offload in (False, True):
        root = tmp_path / str(offload)
        for steps in (range(2), range(2, 4)):
            on_ranks(Grid(fsdp=2), went_on, root, steps, True, offload)
        ends[offload] = checkpoint.read_tensors(root / "step-000004")
    assert ends[True].keys() == ends[False].keys()
    assert all(torch.equal(torch.as_tensor(t), torch.as_tensor(ends[False][n])) for n, t in ends[True].items())


def split_two_ways(ranks: Ranks, scale: float) -> dict[str, Tensor]:
    """Two linear layers over tp and fsdp, as tensor parallelism and FSDP2 leave them, and a buffer that all have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    for parameter in model.parameters():
        parameter.data *= scale
    if not ranks.alone:
        assert ranks.mesh is not None
        if ranks.grid.tp > 1:
            parallelize_module(model, ranks.mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=ranks.mesh["shard"])
    return {**{n: p.data for n, p in model.named_parameters()}, "buffer": torch.full((3,), 2.0 * scale)}


def wrote(ranks: Ranks, root: Path) -> None:
    checkpoint.save(root, 1, split_two_ways(ranks, 1.0), {}, ranks)


def read(ranks: Ranks, root: Path) -> dict[str, Tensor]:
    tensors = split_two_ways(ranks, 0.0)
    checkpoint.fill(root / "step-000001", tensors, ranks)
    return {name: whole(t).clone() for name, t in tensors.items()}


def test_tensor_parallel_sizes_may_change_too(tmp_path: Path) -> None:
    expected = split_two_ways(Ranks(), 1.0)
    for source in (Grid(fsdp=2, tp=2), Grid(ddp=2, fsdp=1, tp=2)):
        on_ranks(source, wrote, tmp_path)
        for grid in (Grid(fsdp=3), Grid(tp=2), Grid()):
            for found in on_ranks(grid, read, tmp_path):
                assert all(torch.equal(found[n], t) for n, t in expected.items()), (source, grid)


def moments(ranks: Ranks, root: Path, first: bool, hidden: int = 512) -> dict[str, Tensor]:
    """Of AdamW in 8 bits, whole: after a step, which is saved, or read."""
    model = tiny_model(layers=1, hidden=hidden, heads=16, kv_heads=8)
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks, dtype=torch.float32, optimizer="adamw8bit")
    tensors = learner.tensors()
    if first:
        work = pack(groups(3), [0.1] * len(groups(3)), 80, parts=ranks.shares)
        learner.learn([(batch, reinforce) for batch in work], Stats())
        learner.optim_step(1e-3)
        checkpoint.save(root, 1, tensors, {}, ranks)
    else:
        checkpoint.fill(root / "step-000001", tensors, ranks)
    return {name: whole(t).clone() for name, t in tensors.items() if "exp_avg" in name}


def test_moments_in_8_bits_belong_to_no_layout_either(tmp_path: Path) -> None:
    wanted, *_ = on_ranks(Grid(fsdp=2, tp=2), moments, tmp_path, True)
    assert {t.dtype for t in wanted.values()} == {torch.uint8, torch.float32}
    assert sum(t.ne(0).sum() for n, t in wanted.items() if n.endswith("_scale")) > 1000
    for found in ([moments(Ranks(), tmp_path, False)], on_ranks(Grid(fsdp=3), moments, tmp_path, False)):
        assert found[0].keys() == wanted.keys() and all(torch.equal(found[0][n], t) for n, t in wanted.items())


def test_blocks_of_moments_that_were_cut_elsewhere_are_refused(tmp_path: Path) -> None:
    """Two ranks have 224 of a row's 448 elements each: two scales, as one rank has, but of other elements."""
    wanted, *_ = on_ranks(Grid(tp=2), moments, tmp_path, True, 448)
    with pytest.raises(BirlError, match=r"set optimizer\.kind and parallel\.tp as they were"):
        moments(Ranks(), tmp_path, False, 448)
    found = on_ranks(Grid(fsdp=2, tp=2), moments, tmp_path, False, 448)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


def failing(ranks: Ranks, root: Path, bad: int) -> list[str]:
    """One rank cannot write its part of the second checkpoint. What each says."""
    tensors = split_two_ways(ranks, 1.0)
    checkpoint.save(root, 1, tensors, {}, ranks)
    if ranks.rank == bad:
        checkpoint.digest = lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    writer, said = Writer(), []
    writer.begin(tensors, partial(written, root, 2, ranks), ranks)
    try:
        writer.wait()
    except BirlError as error:
        said.append(str(error))
    return said


def test_one_rank_that_cannot_write_fails_all_and_keeps_the_one_before(tmp_path: Path) -> None:
    for said in on_ranks(Grid(fsdp=3), failing, tmp_path, 2):
        assert len(said) == 1 and "No space left on device" in said[0]
    assert [s.step for s in step_folders.saved(tmp_path)] == [1] and not checkpoint.verify(tmp_path / "step-000001")


def damaged(ranks: Ranks, path: Path) -> list[str]:
    return checkpoint.verify(path, ranks)


def test_every_rank_finds_the_damage_that_one_sees(tmp_path: Path) -> None:
    on_ranks(Grid(fsdp=3), wrote, tmp_path)
    path = tmp_path / "step-000001"
    assert on_ranks(Grid(fsdp=2), damaged, path) == [[], []]
    file = path / "tensors" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    one, other = on_ranks(Grid(fsdp=2), damaged, path)
    assert one == other and len(one) == 1 and "__1_0.distcp has" in one[0]
