"""Continuous refill on a card that is not there: new prompts are prefilled beside the graphed rows, not instead."""

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from birl.engine import graphs
from birl.engine.engine import EmbeddedEngine
from birl.engine.graphs import AHEAD
from birl.engine.request import Request
from birl.engine.scheduler import SOON
from birl.types import SamplingParams
from tests.families import family
from tests.gpu.card import card


def request(prompt: int, answer: int, first: int) -> Request:
    return Request(
        prompt=tuple(range(first, first + prompt)), params=SamplingParams(max_tokens=answer, seed=0),
        max_tokens=answer, end_ids=frozenset(), checker=None, future=cast(Any, None),
    )  # fmt: skip


def test_prompts_are_launched_beside_replayed_graphs(
    compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By order of launches: a kernel of attention belongs to a prompt, a replay is a token of every row."""
    order: list[str] = []

    def launched(name: str, args: tuple[Any, ...]) -> None:
        order.extend(["prompt"] if name == "write_kernel" else [])

    monkeypatch.setattr(graphs, "captured", lambda device: lambda work: lambda: order.append("replay"))
    monkeypatch.setattr(graphs, "fill", lambda *args, **options: None)  # a fake tensor has no memory to write to
    monkeypatch.setattr(FakeTensor, "tolist", lambda t: np.zeros(t.shape, dtype=int).tolist())
    with card(monkeypatch, launched):
        model = family("qwen3", torch.bfloat16, "cuda")
        engine = EmbeddedEngine(
            model, cast(Any, None), end_ids=frozenset(), context=256, compute=compute, version=lambda: 0, max_batch=3,
        )  # fmt: skip
        for place, answer in enumerate((60, 60, 9, 60)):
            engine.scheduler.add(request(40, answer, first=50 * place))
        steps: list[list[tuple[str, int]]] = []
        with engine.runner.steady(0, engine.scheduler.pages):
            order.clear()
            while engine.scheduler.busy:
                engine.steps.step()
                steps.append([(kind, len([*same])) for kind, same in groupby(order)])
                order.clear()
    layers = 3
    assert steps[:3] == [[("prompt", layers)], [("replay", SOON)], [("replay", SOON)]]  # one waits for a place
    assert steps[3] == [("prompt", layers), ("replay", SOON)]  # it has one: the others go on beside its prompt
    assert steps[4:] == [[("replay", n)] for n in (AHEAD, AHEAD, AHEAD, 11)]
