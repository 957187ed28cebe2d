"""weights.method=ipc, in shared memory: the engine reads the learner's memory, all of it or nothing counts."""

import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from birl.engines import handles
from birl.engines.client import Client
from birl.engines.handles import borrowed, layouts, lent, parts
from birl.engines.wire import Info
from birl.errors import BirlError, WeightsFailed
from birl.learner.learner import Learner
from birl.models.digests import digests, whole
from birl.models.load import load_model
from birl.types import Held, Update
from birl.weights.canary import Canary
from birl.weights.gathered import Gathered
from birl.weights.lending import Lent
from birl.weights.publish import Sender
from birl.weights.publisher import published
from tests.server.running import running
from tests.weights.test_weights import PROMPTS, train

CPU = torch.device("cpu")


def buckets() -> list[str]:
    return [path.name for path in handles.ROOT.glob(f"birl-bucket-{os.getpid()}-*")]


def test_a_server_reads_every_version_and_a_part_of_one_changes_nothing(
    tiny: Path, tmp_path: Path, compute: ThreadPoolExecutor
) -> None:
    learner = Learner(load_model(tiny), dtype=torch.bfloat16)
    tensors, asked = published(learner.model), []

    def gather(names: Sequence[str]) -> list[torch.Tensor]:
        asked.append(len(buckets()))
        return [tensors[n] for n in names]

    canary = Canary(learner, PROMPTS, 1e-3)
    sender = Sender(
        **{"learner": learner, "fleet": None, "remotes": list, "method": "ipc", "root": tmp_path / "weights"},
        **{"beside": tiny, "compute": compute, "canary": canary, "timeout": 30.0},
        gathered=Gathered(learner.model, torch.bfloat16, gather),
    )  # type: ignore[arg-type]

    async def give(remote: Lent, change: dict[str, str]) -> tuple[Held, Info]:
        update = await asyncio.get_running_loop().run_in_executor(compute, sender.update)
        asked.clear()
        wrong = Update(version=update.version, digests={**update.digests, **change}, tensors=update.tensors)
        return await remote.load(wrong), await remote.info()

    async def main(url: str) -> None:
        client = Client(url)
        remote = Lent(client, 0.05)
        before = (await client.info()).digest
        train(learner, 1)
        with pytest.raises(WeightsFailed, match="other bytes than were sent"):
            await give(remote, {"model.norm.weight": "0" * 32})
        assert (await client.info()).digest == before and not buckets()

        async def refused(*_: object) -> None:
            raise BirlError("it does not see the learner's memory")

        lend, calls = client.lend, iter([client.lend, refused])
        client.lend = lambda *words: next(calls)(*words)  # type: ignore[method-assign]
        with pytest.raises(BirlError, match="does not see"):
            await give(remote, {})
        client.lend = lend  # type: ignore[method-assign]
        assert (await client.info()).digest == before and not buckets()
        held, info = await give(remote, {})
        assert held.digest == info.digest == whole(digests(tensors)) != before and info.version == 1
        assert held.bytes == sum(t.nbytes for t in tensors.values())
        assert len(asked) > 3 and set(asked) == {0}  # each bucket is gone before the next one is gathered
        assert await canary.check(remote, "it") == 0 and not buckets()  # type: ignore[arg-type]
        assert not (tmp_path / "weights").exists()
        await client.close()

    with running(tiny) as server:
        asyncio.run(main(server.url))


def test_memory_of_a_gpu_that_nobody_read_is_counted_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts one reader from the moment of lending, and keeps the memory until that one has counted down."""
    told: list[tuple[bytes, int]] = []
    release = staticmethod(lambda *counter: told.append(counter))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release, raising=False)
    monkeypatch.setattr(handles, "gpu", lambda device: "GPU-1")
    shared = SimpleNamespace(_share_cuda_=lambda: (0, b"handle", 8, 0, b"counter", 3, b"event", True))
    flat: Any = SimpleNamespace(device=torch.device("cuda", 0), nbytes=8, untyped_storage=lambda: shared)

    async def lend(refused: bool) -> None:
        async with lent(flat) as memory:
            assert memory["bytes"] == 8 and memory["counter_offset"] == 3
            if refused:
                raise BirlError("it is on another GPU")

    asyncio.run(lend(False))
    assert told == []
    with pytest.raises(BirlError, match="another GPU"):
        asyncio.run(lend(True))
    assert told == [(b"counter", 3)]


def test_what_stands_for_no_bucket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "ROOT", tmp_path)
    name = "birl-bucket-1-0123456789abcdef"
    (tmp_path / name).write_bytes(bytes(8))
    (tmp_path / "secret").write_bytes(bytes(8))
    assert borrowed({"bytes": 8, "file": name}, CPU, 8).tolist() == [0] * 8
    cuda = {"bytes": 8, "gpu": "GPU-1", "handle": "AA==", "size": 8, "offset": 0, "counter": "AA=="}
    cuda |= {"counter_offset": 0, "event": "", "wait": False}
    wrong = {
        "8 at most": {"bytes": 9, "file": name},
        "has 8 bytes": {"bytes": 8, "file": name, "of": 4},
        "above 0": {"bytes": 0, "file": name},
        "not a bucket": {"bytes": 8, "file": "../secret"},
        "learner's machine": {"bytes": 8, "file": "birl-bucket-2-0123456789abcdef"},
        "each of its type": {**cuda, "size": "8"},
        "one GPU for both": cuda,
    }
    for said, memory in wrong.items():
        if "of" in memory:
            (tmp_path / name).write_bytes(bytes(memory.pop("of")))
            said = "has 4 bytes"
        with pytest.raises(ValueError, match=said):
            borrowed(memory, CPU, 8)
    (tmp_path / "birl-bucket-3-0123456789abcdef").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="cannot be opened"):
        borrowed({"bytes": 8, "file": "birl-bucket-3-0123456789abcdef"}, CPU, 8)
    for row in (["a", [3], "float32", 0], ["a", [1], "float32", 2], ["a", [-1], "float32", 0], ["a", [1], "object", 0]):
        with pytest.raises(ValueError, match="tensors: a is"):
            parts(torch.zeros(8, dtype=torch.uint8), [row])
    for rows in ("a", [["a", [1], "float32"]], [["a", [1], "float32", True]]):
        with pytest.raises(ValueError, match="must be a list"):
            parts(torch.zeros(8, dtype=torch.uint8), rows)


def test_a_handle_of_cuda_crosses_json_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that is not there: what torch gives for a storage comes to torch again in the engine."""
    given = (0, b"handle\x00\xff", 64, 32, b"/torch_1", 3, b"event", True)
    flat = torch.arange(6, dtype=torch.float32)
    shapes = {"a": ((2, 2), torch.float32), "b": ((2,), torch.float32)}
    lends = SimpleNamespace(
        device=torch.device("cuda", 0), nbytes=24, untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: given)
    )
    seen: list[tuple] = []

    def opened(*words: object) -> torch.UntypedStorage:
        seen.append(words)
        return flat.untyped_storage()

    monkeypatch.setattr(handles, "gpu", lambda device: "GPU-1")
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened, raising=False)

    async def main() -> str:
        async with lent(lends) as memory:  # type: ignore[arg-type]
            return json.dumps({"memory": memory, "tensors": layouts(["a", "b"], shapes)})

    body = json.loads(asyncio.run(main()))
    result = parts(borrowed(body["memory"], CPU, 100), body["tensors"])
    assert seen == [(CPU.index, *given[1:])]
    assert result["a"].tolist() == [[0, 1], [2, 3]] and result["b"].tolist() == [4, 5]
    monkeypatch.setattr(handles, "gpu", lambda device: "GPU-2")
    with pytest.raises(ValueError, match="GPU GPU-1, and the engine's on GPU-2"):
        borrowed(body["memory"], CPU, 100)


def test_buckets_of_processes_that_are_gone_are_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "ROOT", tmp_path)
    names = [f"birl-bucket-{pid}-0123456789abcdef" for pid in (os.getpid(), 2**22 + 1)]
    for name in (*names, "birl-bucket-x"):
        (tmp_path / name).write_bytes(b"")
    handles.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[0], "birl-bucket-x"])
