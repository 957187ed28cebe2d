"""What one of 8 and of 64 ranks holds, on cards and among ranks that are not there, beside what `birl plan` says."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from birl.learner import learner as learning
from birl.learner.learner import Learner
from birl.models import attention
from birl.models.shape import Shape
from birl.parallel.layout import local
from birl.parallel.ranks import Grid, Ranks
from birl.plan.cluster import Layout, Workload
from birl.plan.rank_memory import memory
from tests.gpu.card import CUDA, card

WIDE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = Qwen3Config(**WIDE, intermediate_size=6144)
SPARSE = Qwen3MoeConfig(
    **WIDE, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
)


def real(function: Any) -> Any:
    """A mesh holds the numbers of its ranks in a tensor, and reads them."""

    def outside(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily(), torch.device("cpu"):
            return function(*args, **options)

    return outside


@contextmanager
def first_of(grid: Grid, patch: pytest.MonkeyPatch, device: str = "cuda") -> Iterator[Ranks]:
    """This process as rank 0; what the others would send is never there, and streams and events do nothing."""
    nothing = SimpleNamespace(wait_stream=lambda stream: None, record_event=lambda: None, device_index=0, device=CUDA)
    for name in ("Stream", "Event"):
        patch.setattr(torch.cuda, name, lambda *args, **options: nothing)
        patch.setattr(torch, name, lambda *args, **options: nothing)
    patch.setattr(torch.cuda, "current_stream", lambda *args: nothing)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for name, value in (("current_device", 0), ("device_count", 8), ("set_device", None)):
        patch.setattr(torch.cuda, name, lambda *args, value=value: value)
    for name in ("__init__", "__getitem__", "_get_or_create_default_group", "get_coordinate"):
        if hasattr(DeviceMesh, name):
            patch.setattr(DeviceMesh, name, real(getattr(DeviceMesh, name)))
    patch.setattr(DeviceMesh, "_concatenate", staticmethod(real(DeviceMesh._concatenate)))
    patch.setattr(DeviceMesh, "mesh", property(real(DeviceMesh.mesh.fget)))  # pyright: ignore
    patch.setattr(learning, "dither", lambda *args: 0)  # counts what it changes
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.size)
    try:
        shard, names = grid.fsdp * grid.cp, ("ddp", "shard", "tp")
        mesh = init_device_mesh(device, (grid.ddp, shard, grid.tp), mesh_dim_names=names)
        sizes = (grid.ddp, shard // grid.ep, grid.ep)
        experts = init_device_mesh(device, sizes, mesh_dim_names=("ddp", "rest", "ep")) if grid.ep > 1 else None
        yield Ranks(grid, mesh, experts)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "grid"),
    [
        (DENSE, Grid(fsdp=8)),
        (DENSE, Grid(fsdp=64)),
        (DENSE, Grid(tp=8)),
        (DENSE, Grid(fsdp=8, tp=8)),
        (DENSE, Grid(ddp=8, fsdp=8)),
        (SPARSE, Grid(fsdp=8, ep=8)),
        (SPARSE, Grid(fsdp=64, ep=8)),
    ],
    ids=lambda it: it.model_type if hasattr(it, "model_type") else str(it),
)
def test_weights_and_state_of_a_rank_are_those_that_are_planned(
    config: Any, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_of(grid, monkeypatch) as ranks, card(monkeypatch, lambda name, args: None), CUDA:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
        learner = Learner(model, ranks=ranks, dtype=torch.bfloat16)
        held = {name: local(t) for name, t in learner.tensors().items()}
        assert all(t.device == CUDA for t in held.values())
        weights = sum(t.nbytes for name, t in held.items() if name.startswith("model."))
        state = sum(t.nbytes for name, t in held.items() if name.startswith("optimizer."))
    layout = Layout(ddp=grid.ddp, fsdp=grid.fsdp, tp=grid.tp, ep=grid.ep)
    planned = memory(Shape.of(config.to_dict()), layout, Workload(batch=8192, microbatch=8192, sequence=8192))
    assert weights == pytest.approx(planned["weights, float32"], rel=0.001)
    assert state == pytest.approx(planned["optimizer state"], rel=0.001)
