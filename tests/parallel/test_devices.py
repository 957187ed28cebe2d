"""Each rank computes on a GPU of its own: `torch.cuda` with cards that only remember, in one process and in two."""

import asyncio
import json
import os
import re
import socket
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.integrations import moe

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.hosts import interface
from birl.learner import policy
from birl.learner.policy import load_policy
from birl.models import device
from birl.models.device import choose
from birl.parallel import crew, grid, ranks
from birl.parallel.crew import RankGroup
from birl.parallel.machine import compute_thread
from birl.parallel.processes import follow, rank_processes
from birl.parallel.ranks import Grid, Ranks
from tests.parallel.processes import on_ranks
from tests.weights.test_broadcast import listening

PAIR = Grid(ddp=2)


def cards(patch: pytest.MonkeyPatch, count: int, shared: bool = False) -> dict[int, int]:
    """`count` faked GPUs; gives the current one of each thread by its identity. `shared`: all processes see the same
    one as their first."""
    current: dict[int, int] = {}
    index = lambda device: torch.device(device).index if isinstance(device, str | torch.device) else device  # noqa: E731
    name = lambda device: 0 if shared else f"{os.environ.get('LOCAL_RANK', '0')}-{device.index}"  # noqa: E731
    faked = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "set_device": lambda device: current.__setitem__(threading.get_ident(), index(device)),
        "current_device": lambda: current.get(threading.get_ident(), 0),
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{name(device)}"),
    }
    for key, function in faked.items():
        patch.setattr(torch.cuda, key, function)
    start, mesh = dist.init_process_group, ranks.init_device_mesh
    patch.setattr(dist, "init_process_group", lambda backend, *words, **more: start("gloo", *words, **more))
    patch.setattr(ranks, "init_device_mesh", lambda device, *words, **more: mesh("cpu", *words, **more))
    return current


@pytest.mark.parametrize(
    ("visible", "rank", "index"),
    [(2, None, 0), (2, "1", 1), (8, "5", 5), (1, "3", 0)],  # the last: Slurm or Ray show each rank its own GPU alone
)
def test_a_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch, visible: int, rank: str | None, index: int) -> None:
    cards(monkeypatch, visible)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert choose("cuda") == choose("auto") == torch.device("cuda", index)
    assert choose("cpu") == torch.device("cpu")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with pytest.raises(BirlError, match=r"LOCAL_RANK=2 wants GPU 2, and .* sees 2 \(CUDA_VISIBLE_DEVICES=4,7\)"):
        choose("auto")
    cards(monkeypatch, 0)
    assert choose("auto") == torch.device("cpu")
    with pytest.raises(BirlError, match=r"model\.device=cuda: .* Set model\.device=cpu"):
        choose("cuda")


class Stale(torch.autograd.Function):
    """What Blackwell's product does to the gradients of weights: an accumulator that is not cleared."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor) -> torch.Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].where(grads[0].abs().amax((1, 2), keepdim=True) > 0, float("nan"))


@pytest.mark.parametrize(("major", "mended"), [(9, False), (10, True)])
def test_experts_without_tokens_have_no_gradient(major: int, mended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in transformers' experts, which call the product by its name in PyTorch's module."""
    plain = torch.nn.functional.grouped_mm
    stale = lambda rows, weights, *, offs: plain(rows, Stale.apply(weights), offs=offs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", stale)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (major, 3))
    device.empty_groups.__wrapped__()
    weights = torch.randn(4, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 8, 8, 16], dtype=torch.int32)
    rows = torch.randn(16, 32, dtype=torch.bfloat16)
    moe._grouped_mm(rows, weights.transpose(1, 2), offsets).square().sum().backward()
    assert weights.grad is not None
    for expert, used in enumerate((False, True, False, True)):
        grad = weights.grad[expert]
        assert grad.isfinite().all() and grad.any() if used else (grad == 0).all() == mended


@pytest.mark.parametrize("name", ["cuda:1", "cuda:2"])
def test_a_gpu_by_its_index(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cards(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    if name == "cuda:1":
        assert choose(name) == torch.device(name)
        return
    with pytest.raises(BirlError, match=r"^model\.device=cuda:2: this process sees 2.* the last cuda:1\.$"):
        choose(name)
    words = ["data.train=x.jsonl", "model.device=cuda:1", "parallel.tp=2"]
    with pytest.raises(BirlError, match=r"model\.device=cuda:1: is a single GPU, but each of the 2 processes"):
        load(schema.SFT, words)


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """cuda is refused with PyTorch's reason; auto takes the CPU and says why, once, but not where GPUs were hidden."""
    cards(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "DRIVER", Path(__file__))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.")

    monkeypatch.setattr(torch.cuda, "init", init)
    device.warn.cache_clear()
    reason = r"sees no GPU: The NVIDIA driver on your system is too old \(found version 11040\)"
    with pytest.raises(BirlError, match=r"^model\.device=cuda:0: PyTorch [^ ]+ " + reason):
        choose("cuda:0")
    assert {choose("auto"), choose("auto")} == {torch.device("cpu")}
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"birl: model\.device=auto: this machine has NVIDIA's driver, and PyTorch [^ ]+ " + reason, line)
    device.warn.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    choose("auto")
    assert not capsys.readouterr().err


def test_no_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cards(monkeypatch, 1)
    device.warn.cache_clear()
    for there in (True, False, False):
        monkeypatch.setattr(device, "has_triton", lambda there=there: there)
        choose("auto")
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no Triton" in line and line.endswith("pip install triton")


def test_a_gpu_that_is_too_small_for_the_model(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Before its weights are read."""
    cards(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**10, 2**30))
    monkeypatch.setattr(policy, "load_model", lambda folder: pytest.fail("it was loaded"))
    with ThreadPoolExecutor(1) as compute, pytest.raises(BirlError, match=r"and cuda:1 has 0\.0 GiB free\. Take a sma"):
        load_policy(schema.Model(path=str(tiny), device="cuda:1"), compute)


def test_evaluations_and_conversations_compute_on_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that thread, too: Triton launches on its current device, whatever the device of its tensors."""
    from birl.cli import chat, evaluation

    cards(monkeypatch, 2)
    seen: list[int] = []

    async def instead(*words: Any) -> None:
        seen.append(words[-1].submit(torch.cuda.current_device).result())

    monkeypatch.setattr(evaluation, "_run", instead)
    monkeypatch.setattr(chat, "_converse", lambda *words: asyncio.run(instead(*words[:-1])))
    evaluation.run(load(schema.Eval, ["data.validation=x.jsonl", "model.device=cuda:1"]))
    chat.run(["device=cuda:1"])
    assert seen == [1, 1]
    with pytest.raises(BirlError, match=r"^device=cuda:2: this process sees 2"):  # the key of this command
        chat.run(["device=cuda:2"])


def test_the_thread_that_computes_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks as threads: CUDA's current device is one for each thread."""
    current = cards(monkeypatch, 2)
    with compute_thread(1, torch.device("cuda", 0)) as first, compute_thread(1, torch.device("cuda", 1)) as second:
        for index, compute in enumerate((first, second)):
            assert compute.submit(torch.cuda.current_device).result() == index
    assert len(current) == 2 and threading.get_ident() not in current


def test_ranks_share_the_cores_of_their_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun started 16 ranks, 8 on each of two machines with 32 cores."""
    monkeypatch.setattr(grid, "cores", lambda: 32)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert grid.rank_threads(load(schema.SFT, ["data.train=x", "parallel.fsdp=16"])) == 4


def test_more_ranks_than_gpus_are_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cards(monkeypatch, 1)
    words = [sys.executable, "-c", "raise SystemExit('it was started')"]
    with (
        pytest.raises(BirlError, match=r"ddp=2 makes 2 ranks, each on a GPU of its own, and this machine shows 1"),
        rank_processes(PAIR, torch.device("cuda", 0), 20.0, words, "", 1, tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


# --- two processes; this file is the program of the second


class Recorder:
    """A rank's worker: what its policy's model was moved to, and the current device where verbs run."""

    def __init__(self, crew: RankGroup, compute: Executor, model: str) -> None:
        moved: list[str] = []

        def to(module: torch.nn.Module, device: Any) -> torch.nn.Module:
            moved.extend([str(device)] if "cuda" in str(device) else [])
            return module

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Module, "to", to)
            patch.setattr(policy, "free_memory", lambda device: 2**30)
            load_policy(schema.Model(path=model, device="cuda"), compute, crew.ranks)
        self.crew, self.moved = crew, moved

    def told(self) -> list[Any]:
        thread = threading.current_thread()
        return self.crew.gather((self.moved, torch.cuda.current_device(), thread.name.startswith("compute")))


def second(visible: str, shared: str, model: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cards(patch, int(visible), bool(shared))
        follow(PAIR, choose("cuda"), 30.0, 1, lambda crew, compute: Recorder(crew, compute, model))


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("visible", [2, 1])
def test_models_of_two_ranks_are_on_two_gpus(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path, visible: int
) -> None:
    """All GPUs visible, or one of its own for each rank."""
    cards(monkeypatch, 2)  # more than a launcher would show: here rank 0 starts the other
    words = [sys.executable, "-m", "tests.parallel.test_devices", str(visible), "", str(tiny)]
    device = torch.device("cuda", 0)
    with rank_processes(PAIR, device, 30.0, words, "", 1, tmp_path) as crew, compute_thread(1, device) as compute:
        worker = compute.submit(Recorder, crew, compute, str(tiny)).result()
        told = compute.submit(crew.call, worker, Recorder.told).result()
    assert told == [(["cuda:0"], 0, True), ([f"cuda:{visible - 1}"], visible - 1, True)]


@pytest.mark.usefixtures("forking")
def test_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cards(monkeypatch, 2, shared=True)
    words = [sys.executable, "-m", "tests.parallel.test_devices", "1", "shared", "no-model-is-loaded"]
    with (
        pytest.raises(BirlError, match=r"ranks 0 and 1 have one GPU, GPU-0\. Start no more ranks"),
        rank_processes(PAIR, torch.device("cuda", 0), 30.0, words, "", 1, tmp_path),
    ):
        pass


def places(ranks: Ranks) -> set[str]:
    return listening()


def test_ranks_listen_where_rank_0_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo alone would take the address of the host's name, which many machines have on the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            asks.connect(("192.0.2.1", 9))  # a documentation address; nothing is sent
        except OSError:
            pytest.skip("no network but the loopback")
        own = asks.getsockname()[0]
    assert interface(own) in {name for _, name in socket.if_nameindex()} and not interface("127.0.0.1")
    for name in ("GLOO_SOCKET_IFNAME", "BIRL_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", own)
    expected = bytes(reversed(socket.inet_aton(own))).hex().upper()
    for found in on_ranks(PAIR, places):
        addresses = {place.partition(":")[0] for place in found}
        assert expected in addresses and "0100007F" not in addresses


@pytest.mark.usefixtures("forking")
def test_after_a_failure_no_kernel_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> None:
    """NCCL's kernels of this rank may wait for the others, which are gone, and `destroy_process_group` for these."""
    cards(monkeypatch, 2)
    for place in (dist, dist.distributed_c10d):
        monkeypatch.setattr(place, "destroy_process_group", lambda: pytest.fail("it would wait"))
    words = [sys.executable, "-m", "tests.parallel.test_devices", "2", "", str(tiny)]
    with pytest.raises(ZeroDivisionError), rank_processes(PAIR, torch.device("cuda", 0), 30.0, words, "", 1, tmp_path):
        raise ZeroDivisionError
    assert not dist.is_initialized()


if __name__ == "__main__":
    second(*sys.argv[1:])


def test_a_report_names_collectives_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a recorder of their own."""

    def dump(name: str, *times: int, **keys: Any) -> bytes:
        entry = {"input_sizes": [[8]], "input_dtypes": ["Float"], "process_group": ["0", "default_pg"], **keys}
        entries = [{**entry, "profiling_name": name, "collective_seq_id": t, "time_created_ns": t} for t in times]
        return json.dumps({"entries": entries}).encode()

    def broken() -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(crew.c10d, "_dump_fr_trace_json", lambda: dump("gloo:broadcast", 1, 3, retired=True))
    alone = crew.last_collectives()
    monkeypatch.setattr(
        crew.c10d, "_dump_nccl_trace_json", lambda: dump("nccl:all_reduce", 2, 4, state="started"), raising=False
    )
    assert [line.split()[:2] for line in crew.last_collectives().splitlines()] == [
        ["#4", "nccl:all_reduce"],
        ["#3", "gloo:broadcast"],
        ["#2", "nccl:all_reduce"],
        ["#1", "gloo:broadcast"],
    ]
    assert crew.last_collectives(1).strip() == "#4 nccl:all_reduce of [8] float, not finished (default_pg)"
    monkeypatch.setattr(crew.c10d, "_dump_nccl_trace_json", broken)  # as an event does after an error of its card
    assert crew.last_collectives() == alone != ""
