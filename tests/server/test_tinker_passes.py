"""Passes of several tenants: whose turn it is, what shares a pass, and a piece that fails alone."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from birl import kernels
from birl.errors import BirlError
from birl.learner.low_rank_run import LowRankConfig, LowRankRun, SharedBase
from birl.models.target_logprobs import TargetRow
from birl.server.tinker.passes import Loss, Passes, Piece
from birl.server.tinker.tenants import Tenant
from tests.tiny import tiny_model


@pytest.fixture
def passes() -> Iterator[Passes]:
    if kernels.load(torch.bfloat16, 32) is None:
        pytest.skip("no C compiler")
    with ThreadPoolExecutor(1) as compute:
        base = SharedBase(tiny_model().to(torch.bfloat16), torch.bfloat16, max_tokens=60)
        yield Passes(base, compute, together=True)


def made(passes: Passes, seed: int) -> LowRankRun:
    run = passes.base.run(LowRankConfig(rank=4, seed=seed))
    run.collect()
    return run


def row(seed: int, size: int = 20) -> TargetRow:
    ids = torch.randint(3, 300, (size + 1,), generator=torch.Generator().manual_seed(seed))
    return TargetRow(ids[:-1], ids[1:, None])


def minus(logp: list[torch.Tensor]) -> torch.Tensor:
    return -logp[0].sum()


def asked(passes: Passes, *wanted: tuple[Tenant, LowRankRun, TargetRow, Loss]) -> list:
    async def all_at_once() -> list:
        return await asyncio.gather(
            *(passes(t, r.weights, [x], loss) for t, r, x, loss in wanted), return_exceptions=True
        )

    return asyncio.run(all_at_once())


def test_pieces_of_different_runs_share_a_pass_and_change_nothing(passes: Passes) -> None:
    tenants, runs = [Tenant(name=n) for n in "abc"], [made(passes, i) for i in range(3)]
    together = asked(passes, *((t, r, row(i), minus) for i, (t, r) in enumerate(zip(tenants, runs, strict=True))))
    assert (passes.computed, passes.pieces) == (1, 3)
    for i, run in enumerate(runs):
        grads = run.gradients()
        run.drop_gradients()
        run.collect()
        (alone,) = asked(passes, (tenants[0], run, row(i), minus))
        assert torch.equal(alone[0], together[i][0])
        assert all(torch.equal(grads[name], own) for name, own in run.gradients().items())


def test_a_piece_that_fails_takes_no_other_with_it(passes: Passes) -> None:
    good, bad = made(passes, 1), made(passes, 2)
    wanted = [(Tenant(name="a"), good, row(1), minus), (Tenant(name="b"), bad, row(2), lambda p: p[0].sum() / 0)]
    result = asked(passes, *wanted)
    assert isinstance(result[0], list) and isinstance(result[1], BirlError)
    assert any(g.any() for g in good.gradients().values())
    assert not any(g.any() for g in bad.gradients().values())


def test_a_tenant_with_much_to_do_leaves_every_other_pass_to_one_who_comes(passes: Passes) -> None:
    busy, new = Tenant(name="busy", served=1000.0), Tenant(name="new")

    async def chosen() -> list[str]:
        loop = asyncio.get_running_loop()
        for tenant in (busy, busy, busy, new, new):
            rows = [row(1, 50)]  # no two fit into a pass
            passes.add(Piece(tenant=tenant, adapter=None, rows=rows, loss=None, result=loop.create_future()))
        return [passes.choose()[0].tenant.name for _ in range(5)]

    assert asyncio.run(chosen()) == ["busy", "new", "busy", "new", "busy"]
