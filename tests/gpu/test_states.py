"""A step of decoding of models whose layers keep states, on a card that is not there: nothing waits or leaves the card,
and the states stay where they are."""

import pytest
import torch
from torch import nn

from birl.engine.graphs import Watch, begin_states
from birl.engine.runner import Runner
from birl.engine.sampler import draw
from birl.models.paged import Cache
from birl.models.slots import slots_of
from tests.engine.test_states import KINDS
from tests.gpu.card import CUDA, card
from tests.zoo import build


def made(kind: str) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CUDA:
            return build(kind)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_can_be_captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with card(monkeypatch, lambda name, args: None):
        model = made(kind)
        runner, rows = Runner(model, sequences=8), 8
        runner.cache = Cache.make(9, slots_of(model), torch.bfloat16, CUDA, 9)
        begin_states(model, runner.cache, 8, page=8)
        before = [id(t) for kept in runner.cache.states.layers.values() for t in kept.values()]
        table = torch.zeros(rows, 4, dtype=torch.int32, device=CUDA)
        one, uniforms = torch.ones(rows, dtype=torch.int32, device=CUDA), torch.zeros(rows, device=CUDA)
        with Watch(CUDA) as watch:
            drawn = draw(runner.step_of_graph(one.long(), one, table, one), uniforms, uniforms)
        after = [id(t) for kept in runner.cache.states.layers.values() for t in kept.values()]
    assert not watch.problem and drawn.tokens.shape == (rows,)
    assert before and before == after
