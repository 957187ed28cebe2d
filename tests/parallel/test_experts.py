"""Expert parallelism: whatever ranks the experts are on, the numbers are those of one rank."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from birl.data.pack import pack
from birl.learner import checkpoint
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.parallel.experts import experts_of, grouped, spread
from birl.parallel.ranks import Grid, Ranks
from birl.types import Sample
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.parallel.test_learner import Outcome, reinforce, same, trained
from tests.tiny import tiny_model, tiny_moe, tiny_moe_folder
from tests.train import test_rl as rl


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(kind: str) -> Outcome:
    return trained(Ranks(), {"moe": kind})


GRIDS = [Grid(fsdp=2, ep=2), Grid(fsdp=4, ep=2), Grid(fsdp=4, ep=4), Grid(ddp=2, fsdp=2, ep=2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_more_ranks_change_no_number(grid: Grid, kind: str, alone: Outcome) -> None:
    for found in on_ranks(grid, trained, {"moe": kind}):
        same(found, alone, 1e-5)


def routed_groups(seed: int) -> list[Sample]:
    """Generated groups; each token has been to the experts that its id names."""
    pairs = {t: bytes((t + i) % 4 for i in (0, 1, 2, 3)) for t in range(320)}
    return [replace(s, routes=b"".join(pairs[t] for t in s.tokens)) for s in groups(seed)]


OPTIONS = [
    {"router_aux_coef": 0.5},
    {"router_aux_coef": 0.5, "gradient_checkpointing": True},
    {"router_replay": True, "samples": routed_groups},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["balance", "balance and checkpointing", "replay"])
def test_routers_may_be_balanced_and_replayed(options: dict[str, Any], kind: str, alone: Outcome) -> None:
    wanted = trained(Ranks(), {"moe": kind, **options})
    for found in on_ranks(Grid(fsdp=2, ep=2), trained, {"moe": kind, **options}):
        same(found, wanted, 1e-5)
    assert wanted.norms != pytest.approx(alone.norms, rel=1e-3)


def taken(ranks: Ranks, folder: Path, work: str) -> float:
    """Save after one step, or load and take the next; the gradient norm."""
    model = tiny_moe(seed=0 if work == "save" else 1)
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, dtype=torch.float32, ranks=ranks)
    if work == "load":
        checkpoint.fill(folder / "step-000001", learner.tensors(), ranks)
        learner.loaded(1)
    samples = groups(3 if work == "save" else 4)
    batches = pack(samples, [1 / len(samples)] * len(samples), 80, parts=ranks.shares)
    learner.learn([(batch, reinforce) for batch in batches], Stats())
    norm = learner.optim_step(1e-2)
    if work == "save":
        checkpoint.save(folder, 1, learner.tensors(), {}, ranks)
    return norm


def test_a_checkpoint_goes_to_any_number_of_ranks(tmp_path: Path) -> None:
    on_ranks(Grid(fsdp=4, ep=2), taken, tmp_path / "four", "save")
    taken(Ranks(), tmp_path / "one", "save")
    wanted = taken(Ranks(), tmp_path / "one", "load")
    assert taken(Ranks(), tmp_path / "four", "load") == pytest.approx(wanted, rel=1e-5)
    for grid in (Grid(fsdp=2), Grid(fsdp=2, ep=2)):
        assert on_ranks(grid, taken, tmp_path / "four", "load")[1] == pytest.approx(wanted, rel=1e-5)


def test_in_bfloat16_with_checkpointing_it_trains_the_same_way() -> None:
    options = {"moe": "qwen3_moe", "dtype": torch.bfloat16, "gradient_checkpointing": True}
    wanted = trained(Ranks(), {**options})
    for found in on_ranks(Grid(fsdp=2, ep=2), trained, options):
        assert found.losses == pytest.approx(wanted.losses, abs=0.02)
        assert found.norms == pytest.approx(wanted.norms, rel=0.1)


#: which two of four experts the tokens of a layer go to; with ep=2 a rank has experts 0 and 1, or 2 and 3
ROUTINGS = {
    "all to one rank": lambda tokens: torch.tensor([[0, 1]]).expand(tokens, 2),
    "nobody to expert 2": lambda tokens: torch.tensor([[0, 1], [3, 0], [1, 3]]).repeat(tokens, 1)[:tokens],
    "as many to each": lambda tokens: torch.tensor([[0, 2], [3, 1]]).repeat(tokens, 1)[:tokens],
}
TOKENS = [0, 7]  # of each rank


def routed(ranks: Ranks, routing: str) -> tuple[torch.Tensor, ...]:
    """One layer's experts on this rank's tokens: results and gradients by tokens, weights and parameters."""
    model = tiny_moe()
    module = spread(model, ranks)[0]
    hidden, weights = (x.split(TOKENS)[ranks.rank].requires_grad_() for x in inputs())
    index = ROUTINGS[routing](sum(TOKENS)).split(TOKENS)[ranks.rank]
    found = module(hidden, index, weights)
    found.square().sum().backward()
    grads = [cast(DTensor, p.grad).full_tensor() for p in module.parameters()]
    return found.detach(), cast(torch.Tensor, hidden.grad), cast(torch.Tensor, weights.grad), *grads


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(TOKENS), 32, generator=generator), torch.rand(sum(TOKENS), 2, generator=generator)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_uneven_routing_gives_what_transformers_gives(routing: str) -> None:
    module = experts_of(tiny_moe())[0]
    hidden, weights = (x.requires_grad_() for x in inputs())
    wanted = module(hidden, ROUTINGS[routing](sum(TOKENS)), weights)
    wanted.square().sum().backward()
    expected = [wanted.detach(), hidden.grad, weights.grad, *(p.grad for p in module.parameters())]
    found = on_ranks(Grid(fsdp=2, ep=2), routed, routing)
    for place, value in enumerate(expected):
        both = torch.cat([f[place] for f in found]) if place < 3 else found[0][place]
        torch.testing.assert_close(both, value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [6, 8])  # 24 bytes are no multiple of 16, which PyTorch's grouped matmul requires
def test_experts_of_any_width_are_multiplied(width: int) -> None:
    rows, weights = torch.randn(5, width, dtype=torch.float32), torch.randn(3, 8, width, dtype=torch.float32)
    counts = torch.tensor([2, 0, 3])
    result = grouped(rows, weights, counts)
    torch.testing.assert_close(result, torch.cat([rows[:2] @ weights[0].T, rows[2:] @ weights[2].T]))


@pytest.mark.parametrize(
    ("grid", "model", "told"),
    [
        (Grid(fsdp=2, ep=2), tiny_model, "parallel.ep=2: LlamaForCausalLM has no experts"),
        (Grid(fsdp=3, ep=3), tiny_moe, "has 4 experts, which 3 ranks cannot share"),
    ],
    ids=["no experts", "no divisor"],
)
def test_what_cannot_be_spread_is_refused_with_the_numbers(grid: Grid, model: Callable[[], Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        on_ranks(grid, refused, model)


def refused(ranks: Ranks, model: Callable[[], Any]) -> None:
    spread(model(), ranks)


def test_ep_must_divide_the_ranks_that_weights_are_split_over() -> None:
    with pytest.raises(AssertionError, match="ep must divide fsdp x cp = 2"):
        on_ranks(Grid(fsdp=2, ep=4), nothing)


def nothing(ranks: Ranks) -> None:
    return


def test_a_run_with_experts_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    """The engine's own weights are refreshed from experts that no rank has all of; routes go to the other process."""
    model = tiny_moe_folder(tmp_path / "model")
    words = ("steps=3", "algorithm.router_replay=rollout", "learner.router_aux_coef=0.1")
    for folder, keys in (("one", ()), ("two", ("parallel.fsdp=2", "parallel.ep=2"))):
        rl.run(model, tmp_path / folder, *words, *keys)
    one, two = (rl.log(tmp_path / folder) for folder in ("one", "two"))
    for name in ("reward/mean", "loss", "grad_norm", "entropy", "router/balance"):
        assert [s[name] for s in two] == pytest.approx([s[name] for s in one], rel=2e-3, abs=1e-5), name
    assert max(s["mismatch/mean"] for s in two) < 1e-5


def judged(ranks: Ranks) -> list[torch.Tensor]:
    """Log-probs of a frozen model, as a reference has them."""
    model = tiny_moe()
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, dtype=torch.float32, trainable=False, ranks=ranks)
    batches = pack(groups(3), [0.0] * len(groups(3)), 80, parts=ranks.shares)
    order = torch.cat([b.sample for b in batches]).argsort(stable=True)
    return [torch.cat(learner.ranks.each(batches, learner.forward))[order]]


def test_a_frozen_model_is_spread_as_well() -> None:
    (wanted,) = judged(Ranks())
    for (found,) in on_ranks(Grid(fsdp=2, ep=2), judged):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
