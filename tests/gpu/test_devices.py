"""Weights and states that come from elsewhere go to the device that computes with them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from birl.config import schema
from birl.engine import weights
from birl.engine.open import SHARE, cache_bytes
from birl.engine.weights import Weights
from birl.engines import servers
from birl.learner import low_rank_run
from birl.learner.low_rank_ranks import Copy, sent
from birl.learner.low_rank_run import LowRankConfig, LowRankRun
from birl.models.low_rank import AdapterWeights, Factors
from birl.parallel.ranks import Ranks
from birl.types import Update
from birl.weights.live import Live
from tests.gpu.card import CUDA, card
from tests.tiny import tiny_model

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_bucket_is_on_the_learners_gpu_wherever_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads it at its address there. Copies, and the matrices of what is quantised, are in CPU memory."""
    with card(monkeypatch, lambda name, args: None):
        quantized, norm = torch.empty(4, 6, device=CPU), torch.empty(5, device=CUDA)
        learner: Any = SimpleNamespace(version=1, device=CUDA)
        shapes: Any = {"q": ((4, 6), torch.float32), "norm": ((5,), torch.float32)}
        kept = {"q": quantized, "norm": torch.empty(5, device=CPU)}
        live = Live(learner, cast(Any, None), shapes, lambda names: [quantized, norm], kept)
        assert live._flat(["q", "norm"]).device == CUDA
        learner.version = 2
        assert live._flat(["q", "norm"]).device == CUDA and live._flat(["norm"]).shape == (5,)


def test_what_arrives_is_digested_on_the_gpu_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a thread of its own, whose current GPU would be the first one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
        assert current == [torch.device("cuda", 1)]
        return dict.fromkeys(tensors, "")

    monkeypatch.setattr(weights, "digests", digests)
    monkeypatch.setattr(weights, "nonfinite", lambda tensors: [])
    with card(monkeypatch, lambda name, args: None):
        model = nn.Linear(4, 4, bias=False, device="cuda:1")
        tensors = {"weight": torch.empty(4, 4, device="cuda:1")}
        Weights(model).stage(Update(version=1, digests={"weight": ""}, tensors=tensors))


def test_an_adapter_that_is_read_from_a_disk_goes_on_where_its_layers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its moments, its step count and the gradients that it had collected."""
    plain = torch.optim.AdamW
    monkeypatch.setattr(low_rank_run.torch.optim, "AdamW", lambda tensors, lr, fused: plain(tensors, lr=lr))
    config = LowRankConfig(rank=4)
    saved = LowRankRun(config, {"q": nn.Linear(8, 6, bias=False)}, torch.float32)
    saved.collect()
    state = saved.state() | saved.gradients()
    for name, master in saved.masters.items():
        state |= {f"optimizer.{name}.{key}": torch.zeros_like(master.detach()) for key in ("exp_avg", "exp_avg_sq")}
        state[f"optimizer.{name}.step"] = torch.ones(1)
    run = LowRankRun(config, {"q": nn.Linear(8, 6, bias=False, device=META)}, torch.float32)
    run.load(state, 1)
    run.load_gradients(state)
    moments = [t for each in run.optimizer.state.values() for t in each.values()]
    assert len(moments) == 6 and {t.device for t in (*moments, *run.gradients().values())} == {META}


def test_an_adapter_goes_to_each_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle of a GPU's tensor would come back on the GPU of rank 0."""
    with card(monkeypatch, lambda name, args: None):
        factors = Factors(torch.empty(32, 8, device=CUDA), torch.empty(6, 32, device=CUDA))
        assert {t.device for both in sent(AdapterWeights(1, {"q": factors})).values() for t in both} == {CPU}
    base: Any = SimpleNamespace(device=META, model=nn.Linear(1, 1), part=lambda name, a, b: (a, b))
    copy = Copy(base, Ranks())
    monkeypatch.setattr(Copy, "_forward", lambda *args: [])
    monkeypatch.setattr(Copy, "_gathered", lambda self, value: [value])
    copy.forward({1: {"q": (torch.zeros(32, 8), torch.zeros(6, 32))}}, [1], [], {}, [[]], False)
    assert {copy.adapters[1].factors["q"].a.device, copy.adapters[1].factors["q"].b.device} == {META}


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_a_server_gives_back_its_weights_in_the_type_that_it_has_them_in(held: torch.dtype) -> None:
    """Ranks that share out a model hold float32 parts of it."""
    model = nn.Linear(64, 64, bias=False, dtype=held)
    learner: Any = SimpleNamespace(model=model, device=CUDA, dtype=torch.bfloat16)
    assert servers.owed(schema.Engine(kind="vllm", sleep=True, tensor_parallel=2), learner) == 64 * 64


def test_what_loading_leaves_is_given_back_before_the_cache_is_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 weights of a server, cast by then, were half of an 80 GiB card for 8 billion parameters."""
    cached = [2**29]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30 - sum(cached), 2**30))
    assert cache_bytes(tiny_model(), 10**4, 512, device=CUDA) == int(SHARE * 2**30)
