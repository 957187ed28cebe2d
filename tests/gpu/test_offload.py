"""optimizer.offload=cpu with FSDP, on cards and among ranks that are not there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from birl.learner.learner import Learner
from birl.learner.muon import Muon
from birl.learner.rounding import Dither, noise
from birl.models import attention
from birl.models.device import device_of
from birl.parallel.layout import Layout, local
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
        # a teacher is read to this device, and the run records it
        assert learner.device == device_of(model) == CUDA


def test_a_part_in_cpu_memory_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's `from_local` and `distribute_tensor` copy it to the mesh's GPU: dithered masters and Muon's matrices
    were on two devices, and a checkpoint was read into copies. Simulated tensors do not show that; these are real."""
    with first_of(Grid(fsdp=2), monkeypatch) as ranks:
        assert ranks.mesh is not None
        layout, every = Layout(ranks.mesh["shard"], (Shard(0),), (5, 4)), torch.randn(5, 4, dtype=torch.float32)
        every = every.bfloat16().float()
        part = layout.part(every).clone()
        assert torch.equal(part, every[:3]) and local(layout.whole(part)).data_ptr() == part.data_ptr()
        assert torch.equal(Dither.of("w", (5, 4), noise(part.device), layout)(part).bfloat16(), every[:3].bfloat16())
        muon = Muon([{"params": [part], "lr": 0.1, "weight_decay": 0.0}], {part: layout.whole}, betas=(0.9, 0.99))
        part.grad = torch.ones_like(part)
        muon.step()
        assert part.isfinite().all() and not torch.equal(part, every[:3])
