"""The most that one of 8 and of 64 ranks holds in a training step, on cards and among ranks that are not there, beside
what `birl plan --cluster` says.

PyTorch's engine of gradients knows no card where there is none: the tensors are those of a CPU, without contents, which
say that they are on a card."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.gpu_bench import loss, samples
from birl import kernels
from birl.config import schema
from birl.config.load import load
from birl.data.pack import Batch, pack
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.shape import Shape
from birl.parallel import shard
from birl.parallel.ranks import Grid
from birl.plan.cluster import Layout, Workload
from birl.plan.rank_memory import kept, memory
from birl.plan.run_memory import GIB, predict
from birl.plan.sizes import Load
from tests.gpu.card import CUDA, card
from tests.gpu.peak import Peak, peak
from tests.gpu.test_ranks_memory import first_of
from tests.gpu.test_waits import on_host

TOKENS, PROMPT = 8192, 512
HEADS: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 3}
ENDS: dict[str, Any] = {"vocab_size": 151_936, "tie_word_embeddings": False}
DENSE = Qwen3Config(**HEADS, **ENDS, hidden_size=4096, intermediate_size=12_288, num_key_value_heads=8)
LLAMA = LlamaConfig(**HEADS, **ENDS, hidden_size=4096, intermediate_size=14_336, num_key_value_heads=8)
TIED = Qwen3Config(
    **(HEADS | ENDS | {"num_attention_heads": 16, "tie_word_embeddings": True}),
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_key_value_heads": 8},
)
SPARSE = Qwen3MoeConfig(
    **HEADS, **ENDS, hidden_size=2048, intermediate_size=6144, num_key_value_heads=4, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def row() -> Batch:
    """Of one sequence."""
    return pack(samples(1, 1, PROMPT, TOKENS - PROMPT, 1000), [1.0], TOKENS)[0]


@contextmanager
def on_a_card(
    config: Any, grid: Grid, row: Batch, checkpointing: bool, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Learner, Batch, Peak]]:
    """A rank with a micro-batch, and what it holds. Every expert is chosen as often as every other."""
    each = TOKENS // grid.cp * getattr(config, "num_experts_per_tok", 0)

    def counts(tensor: Tensor) -> Any:
        """Of tokens that are sent to each rank of ep, or that ranks of cp have trained."""
        n = tensor.shape[-1]
        return [[each // n] * n] * 2 if tensor.ndim == 2 else [(TOKENS - PROMPT) // n] * n

    patch.setattr(kernels, "load", lambda *args: None)  # those for CPUs
    patch.setattr(shard, "device_of", lambda model: CUDA)
    patch.setattr("birl.models.varlen.upload", lambda tensor, device: tensor)
    patch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    patch.setattr(FakeTensor, "tolist", counts)
    with first_of(grid, patch, "cpu") as ranks, card(patch, lambda name, args: None), torch.enable_grad():
        own = deepcopy(config)  # spreading experts changes it
        model = AutoModelForCausalLM.from_config(own, attn_implementation=attention.NAME, dtype=torch.float32)
        learner = Learner(model, ranks=ranks, dtype=torch.bfloat16, gradient_checkpointing=checkpointing)
        batch = on_host(row)
        learner.forward(batch)  # what is learned of the model, once
        with peak(patch) as held:
            for tensor in (*learner.tensors().values(), *model.parameters()):
                held.hold(tensor)
            yield learner, batch, held


CASES = [
    *((DENSE, grid) for grid in (Grid(ddp=8), Grid(fsdp=8), Grid(tp=8), Grid(fsdp=4, cp=2))),
    *((DENSE, grid) for grid in (Grid(fsdp=64), Grid(ddp=8, fsdp=8), Grid(fsdp=8, tp=8), Grid(fsdp=8, cp=8))),
    *((SPARSE, grid) for grid in (Grid(ddp=8), Grid(fsdp=8), Grid(fsdp=8, ep=8), Grid(fsdp=4, cp=2, ep=8))),
    *((SPARSE, grid) for grid in (Grid(fsdp=64), Grid(fsdp=64, ep=8))),
    *((config, Grid(fsdp=8)) for config in (LLAMA, TIED)),
]


@pytest.mark.parametrize("checkpointing", [True, False], ids=["inputs", "all"])
@pytest.mark.parametrize(("config", "grid"), CASES, ids=[f"{config.model_type} {grid}" for config, grid in CASES])
def test_the_most_that_a_rank_holds_is_planned(
    config: Any, grid: Grid, checkpointing: bool, row: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_card(config, grid, row, checkpointing, monkeypatch) as (learner, batch, held):
        for _ in range(2):
            learner.forward_backward(batch, loss, Stats(), wait=False)
    layout = Layout(ddp=grid.ddp, fsdp=grid.fsdp, cp=grid.cp, tp=grid.tp, ep=grid.ep)
    keep = "inputs" if checkpointing else "all"
    work = Workload(batch=2 * TOKENS * layout.shares, microbatch=TOKENS, sequence=TOKENS, keep=keep)
    planned = memory(Shape.of(config.to_dict()), layout, work)
    del planned["reserved"]  # what no operation allocates
    assert sum(planned.values()) == pytest.approx(held.most, rel=0.05), planned
    if layout.splits > 1:
        assert of_a_run(config, layout, checkpointing) == pytest.approx(held.most, rel=0.05)


def of_a_run(config: Any, layout: Layout, checkpointing: bool) -> int:
    """What `birl plan` says of the same, but for CUDA and what lies between blocks."""
    words = [f"parallel.{axis}={getattr(layout, axis)}" for axis in ("ddp", "fsdp", "cp", "tp", "ep")]
    words += ["data.train=x.jsonl", f"learner.gradient_checkpointing={str(checkpointing).lower()}"]
    words += ["engine.kind=vllm", "engine.attach=[http://127.0.0.1:1]"]
    tokens = TOKENS // (layout.cp * layout.tp)
    step = Load(microbatch=tokens, several=True, sequences=1, group=1, prompt=PROMPT, longest=TOKENS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
    training = predict(model, load(schema.RL, words), step, card=80 * GIB)["training"]
    return sum(size for name, size in training.items() if name not in ("process", "between blocks"))


@pytest.mark.parametrize("checkpointing", [True, False], ids=["inputs", "all"])
@pytest.mark.parametrize("config", [DENSE, LLAMA, SPARSE], ids=lambda it: it.model_type)
def test_what_a_layer_keeps_is_planned(
    config: Any, checkpointing: bool, row: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    for layers in (2, 3):
        config = deepcopy(config)
        config.num_hidden_layers = layers
        with on_a_card(config, Grid(ddp=8), row, checkpointing, monkeypatch) as (learner, batch, held):
            before, figures = held.now, learner.outputs(batch)
            sizes.append(held.now - before)
            del figures
    planned = TOKENS * kept(Shape.of(config.to_dict()), "inputs" if checkpointing else "all")
    assert sizes[1] - sizes[0] == pytest.approx(planned, rel=0.02)
