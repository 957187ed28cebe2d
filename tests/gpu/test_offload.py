"""optimizer.offload=cpu with FSDP, on cards and among ranks that are not there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from birl.learner.learner import Learner
from birl.models import attention
from birl.parallel.layout import local
from birl.parallel.ranks import Grid
from tests.gpu.card import CUDA, card
from tests.gpu.test_ranks_memory import first_of
from tests.tiny import tiny_model


def test_parts_are_in_cpu_memory_and_batches_go_to_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that batches, weights for engines and the embedded engine's copy go to is not that of the parts."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, *args: tensor)
    with first_of(Grid(fsdp=2), monkeypatch) as ranks, card(monkeypatch, lambda name, args: None), CUDA:
        model: Any = tiny_model()
        model.set_attn_implementation(attention.NAME)
        learner = Learner(model, ranks=ranks, dtype=torch.bfloat16, offload=True)
        assert {local(t).device.type for t in learner.tensors().values()} == {"cpu"}
    assert learner.device == CUDA
