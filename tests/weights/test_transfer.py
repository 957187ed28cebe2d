"""weights.method=nccl with vLLM and SGLang: their own endpoints and, over Gloo, the tensors themselves."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import torch
import torch.distributed as dist

from birl.engines.collective import host_store
from birl.engines.sglang import SGLang
from birl.engines.vllm import transfer as vllm
from birl.engines.vllm.adapter import VLLM
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.digests import digests
from birl.types import SamplingParams, Update
from birl.weights.broadcast import Broadcast, Joined
from tests.weights.test_broadcast import TENSORS, Whole

SPAN = timedelta(seconds=20)
NCCL, UNIQUE_ID = vllm.Communicator, vllm.unique_id  # in place of which other tests have Gloo
KINDS = {"vllm": VLLM, "sglang": SGLang}


class Communicator:
    """In place of NCCL's: the unique id is the address of a store."""

    stores: ClassVar[list[Any]] = []

    @classmethod
    def unique_id(cls) -> bytes:
        store, place = host_store("127.0.0.1", 20.0)
        cls.stores.append(store)
        return place.encode().ljust(128, b"\0")

    def __init__(self, identity: bytes, size: int, device: torch.device) -> None:
        host, port = identity.rstrip(b"\0").decode().split(":")
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=SPAN)
        self.group = dist.ProcessGroupGloo(store, 0, size, SPAN)
        self.group.allreduce([torch.zeros(1)]).wait()  # pyright: ignore

    def broadcast(self, flat: torch.Tensor, root: int) -> Any:
        return self.group.broadcast(flat, root)  # pyright: ignore


def test_what_nccl_is_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that is not there: what vLLM's `PyNcclCommunicator` does, and one byte for each byte. On a stream of
    its own: the learner's waited for engines, and would have forever for one that is lost in the first all-reduce."""
    seen: list[tuple[Any, ...]] = []
    waited, recorded = list[Any](), list[Any]()

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: (seen.append((name, *args)), 6 if name == "ncclCommAbort" else 0)[1]

        def ncclGetErrorString(self, code: int) -> bytes:
            return b"remote process exited"

        def ncclGetLastError(self, comm: None) -> bytes:
            return b"socket of rank 1 is closed"

    learners = SimpleNamespace(cuda_stream=0)  # has no `synchronize`
    own = SimpleNamespace(cuda_stream=7, synchronize=lambda: None, wait_stream=waited.append)
    monkeypatch.setattr(vllm, "library", Library)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: learners)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append, query=lambda: True))
    assert len(UNIQUE_ID()) == 128
    group, flat = NCCL(bytes(range(128)), 3, torch.device("cpu")), torch.zeros(12, dtype=torch.uint8)
    assert bytes(seen[1][3]) == bytes(range(128)) and seen[1][2] == 3 and seen[1][4] == 0
    assert seen[2][0] == "ncclAllReduce" and seen[2][3:6] == (1, vllm.FLOAT32, vllm.SUM) and seen[2][-1] == 7
    assert group.broadcast(flat, 0).is_completed()
    assert seen[3] == ("ncclBroadcast", flat.data_ptr(), flat.data_ptr(), 12, vllm.UINT8, 0, group.comm, 7)
    assert waited == [learners, learners] and recorded == [own]
    group.comm.value = 1
    with pytest.raises(RuntimeError, match=r"ncclCommAbort: remote process exited\n.*\nsocket of rank 1 is closed"):
        group.abort()
    group.abort()  # once
    assert [name for name, *_ in seen].count("ncclCommAbort") == 1


class Process:
    """`peer_process.py`."""

    def __init__(self, ranks: int) -> None:
        words = [sys.executable, str(Path(__file__).with_name("peer_process.py")), str(ranks)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def url(self) -> str:
        if not hasattr(self, "port"):
            assert self.process.stdout is not None
            self.port = int(self.process.stdout.readline())
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, **body: Any) -> Any:
        return httpx.post(self.url + path, json=body, trust_env=False, timeout=20).json()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    found = [Process(2), Process(1)]
    yield found
    for one in found:
        one.end()


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "unique_id", Communicator.unique_id)
    monkeypatch.setattr(vllm, "Communicator", Communicator)


def group(kind: str, found: list[Process], timeout: float = 20.0) -> tuple[Broadcast, list[Joined], list[Any]]:
    for process in found:
        process.ask("/test_fail")
        process.ask("/test_held")
    remotes = [KINDS[kind](process.url) for process in found]
    own = remotes[0].transfer.group
    broadcast = Broadcast([process.url for process in found], timeout=timeout, bucket_mb=1, group=own)
    broadcast.source = Whole(TENSORS)  # type: ignore[assignment]
    return broadcast, [Joined(remote, broadcast) for remote in remotes], remotes  # type: ignore[arg-type]


async def give(broadcast: Broadcast, joined: list[Joined], version: int) -> list[Any]:
    update = Update(version=version, digests=digests(TENSORS), tensors=TENSORS)
    broadcast.expect(dict.fromkeys(joined, 0), update)
    return await asyncio.gather(*(one.load(update) for one in joined), return_exceptions=True)


def sent() -> dict[str, str]:
    def digest(tensor: torch.Tensor) -> str:
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"

    return {name: digest(tensor) for name, tensor in TENSORS.items()}


async def closed(broadcast: Broadcast, remotes: list[Any]) -> None:
    broadcast.close()
    for remote in remotes:
        await remote.close()


async def test_ranks_of_vllm_get_every_tensor_from_one_broadcast(processes: list[Process]) -> None:
    broadcast, joined, remotes = group("vllm", processes)
    for version in (1, 2):
        answers = await give(broadcast, joined, version)
        assert [a.version for a in answers] == [version] * 2 and broadcast.groups == 1, answers
        assert all(a.digest == "" and a.bytes == sum(t.nbytes for t in TENSORS.values()) for a in answers)
    for process, ranks in zip(processes, (2, 1), strict=True):
        told = process.ask("/test_held")
        assert told["held"] == [sent()] * ranks
        once = [c.partition("?")[0] for c in told["calls"] if c not in ("/update_weights",)]
        assert once[-8:] == [
            *("/pause", "/start_weight_update", "/finish_weight_update", "/update_weight_version"),
            *("/reset_prefix_cache", "/weight_info", "/resume", "/test_held"),
        ]
        assert told["calls"].count("/update_weights") == 2 * 5  # buckets
    late = Update(version=2, digests={}, tensors=Whole(TENSORS), anew=True)
    late.tensors.check = lambda: None  # type: ignore[attr-defined]
    assert (await joined[1].load(late)).version == 2 and broadcast.groups == 2  # alone, in a group of its own
    assert [a.version for a in await give(broadcast, joined, 3)] == [3, 3] and broadcast.groups == 3
    await closed(broadcast, remotes)


async def test_sglang_joins_as_torch_does_and_takes_flat_buckets(processes: list[Process]) -> None:
    broadcast, joined, remotes = group("sglang", processes[1:])
    for version in (1, 2):
        answers = await give(broadcast, joined, version)
        assert [getattr(a, "version", a) for a in answers] == [version] and broadcast.groups == 1
    told = processes[1].ask("/test_held")
    assert told["held"] == [sent()] and remotes[0].version == 2
    assert told["calls"][-5:] == [
        *("/update_weights_from_distributed", "/end_weight_update", "/model_info"),
        *("/continue_generation", "/test_held"),
    ]
    broadcast._leave()
    assert (await give(broadcast, joined, 3))[0].version == 3 and broadcast.groups == 2
    assert "/destroy_weights_update_group" in processes[1].ask("/test_held")["calls"]
    await closed(broadcast, remotes)


async def test_what_fails_is_one_line_and_the_next_update_mends_it(processes: list[Process]) -> None:
    own = processes[1:]
    for kind, path, status, said in (
        ("vllm", "/init_weight_transfer_engine", 500, "/init_weight_transfer_engine: 500"),
        ("vllm", "/update_weights", 500, "/update_weights: 500: it is out of order"),
        ("sglang", "/update_weights_from_distributed", 400, "_distributed: 400: it is out of order"),
        ("sglang", "/init_weights_update_group", 400, "_group: 400: it is out of order"),
    ):
        broadcast, joined, remotes = group(kind, own)
        processes[1].ask("/test_fail", fail={path: status})
        error = (await give(broadcast, joined, 1))[0]
        assert isinstance(error, WeightsFailed if "update_w" in path or kind == "vllm" else BirlError), error
        assert said in str(error) and "\n" not in str(error)
        if "update_w" in path:
            assert "The engine is broken" in str(error) and remotes[0].broken
            with pytest.raises(EngineDown, match="half-way"):
                await remotes[0].generate((5, 6), SamplingParams(max_tokens=1))
        processes[1].ask("/test_fail")
        assert (await give(broadcast, joined, 2))[0].version == 2 and not remotes[0].broken
        assert processes[1].ask("/test_held")["held"] == [sent()]
        await closed(broadcast, remotes)


async def test_what_cannot_work_is_told_before_it_is_tried(processes: list[Process]) -> None:
    broadcast, joined, remotes = group("vllm", processes[1:])
    processes[1].ask("/test_fail", backend=None)
    error = (await give(broadcast, joined, 1))[0]
    processes[1].ask("/test_fail", backend="nccl")
    assert isinstance(error, BirlError) and '--weight-transfer-config \'{"backend": "nccl"}\'' in str(error)
    await closed(broadcast, remotes)
    broadcast, joined, remotes = group("sglang", processes[1:])

    async def more() -> int:  # than come
        return 2

    remotes[0].transfer.ranks = more
    broadcast.timeout = 1.0
    error = (await give(broadcast, joined, 1))[0]
    assert isinstance(error, WeightsFailed) and error.cause == "unreachable" and ("of 3" in (line := str(error)))
    assert "rank 0 of 3" in line or "group of 3 ranks from rank 1 on" in line  # who is late first
    await closed(broadcast, remotes)


async def test_one_that_dies_in_the_middle_leaves_the_other_to_go_on(processes: list[Process]) -> None:
    dies = Process(1)
    broadcast, joined, remotes = group("vllm", [processes[0], dies])
    assert [a.version for a in await give(broadcast, joined, 1)] == [1, 1]
    dies.ask("/test_fail", fail={"/update_weights": 0})
    answers = await give(broadcast, joined, 2)
    assert answers[0].version == 2 and processes[0].ask("/test_held")["held"] == [sent()] * 2
    assert isinstance(answers[1], WeightsFailed) and answers[1].cause == "unreachable"
    assert broadcast.groups == 2
    dies.end()
    await closed(broadcast, remotes)


async def test_an_engine_never_waits_for_weights_that_are_gone(processes: list[Process]) -> None:
    """Its workers cannot be called back: they get the other buckets, and what they hold then does not count."""

    class Going(Whole):
        left = 2

        def flat(self, names: Any) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise WeightsFailed("stale", "The learner has trained on.")
            return super().flat(names)

    broadcast, joined, remotes = group("vllm", processes[1:])
    broadcast.source = Going(TENSORS)  # type: ignore[assignment]
    error = (await give(broadcast, joined, 1))[0]
    assert isinstance(error, WeightsFailed) and error.cause == "stale"
    assert processes[1].ask("/test_held")["held"] != [sent()]
    broadcast.source = Whole(TENSORS)  # type: ignore[assignment]
    assert (await give(broadcast, joined, 2))[0].version == 2
    assert processes[1].ask("/test_held")["held"] == [sent()]
    await closed(broadcast, remotes)
