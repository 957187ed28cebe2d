"""From the learner to engines: what arrives is what was sent, or the run stops and says why."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from birl import kernels
from birl.engine.engine import EmbeddedEngine
from birl.errors import EngineDown, WeightsFailed
from birl.learner.learner import Learner
from birl.learner.lora import Lora
from birl.models.digests import digests, whole
from birl.models.load import cast, load_model, load_tokenizer
from birl.types import Completion, Held, SamplingParams, Update
from birl.weights import folder
from birl.weights.canary import Canary
from birl.weights.publish import Sender, Volume, shared_memory
from birl.weights.publisher import published

PROMPTS = [tuple(range(5, 5 + n)) for n in (2, 9, 30)]


class Local:
    """An engine of this process in the place of one in another."""

    address = "local"
    refused: tuple[WeightsFailed, ...] = ()

    def __init__(self, path: Path, compute: ThreadPoolExecutor, dtype: torch.dtype) -> None:
        model = cast(load_model(path), dtype).requires_grad_(False)
        self.engine = EmbeddedEngine(
            model, load_tokenizer(path), end_ids=frozenset({2}), context=256, compute=compute, kv_cache_gb=0.01
        )
        self.loads: list[Update] = []

    async def load(self, update: Update) -> Held:
        self.loads.append(update)
        return await self.engine.load(update)

    async def generate(self, ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        return await self.engine.generate(ids, params)

    async def resume(self) -> None:
        await self.engine.resume()

    async def settle(self, timeout: float) -> None:
        assert not self.engine.paused

    def describe(self) -> str:
        return "local is ready"

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()


def train(learner: Learner, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for master in learner.masters.tensors.values():
        master.grad = torch.randn(master.shape, generator=generator)
    learner.optim_step(0.01)


def sender(tiny: Path, root: Path, compute, method: str, dtype=torch.bfloat16, **keys) -> tuple[Sender, Local]:
    learner = Learner(load_model(tiny), dtype=dtype, lora=keys.pop("lora", None))
    local = Local(tiny, compute, dtype)
    found = Sender(
        learner=learner,
        fleet=local,
        remotes=lambda: [local],  # type: ignore[arg-type, return-value]
        method=method,
        root=root / "weights",
        beside=tiny,
        compute=compute,
        canary=Canary(learner, PROMPTS, keys.pop("max_gap", 1e-3)),
        timeout=60.0,
        **keys,
    )
    return found, local


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["reload", "direct"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4.0, targets=("all-linear",), dora=False, seed=0)])
async def test_the_engine_has_what_was_trained(tiny: Path, tmp_path: Path, compute, method, dtype, lora) -> None:
    """verl #7495: adapters were never sent, and it looked like staleness for two months."""
    bound = 1e-5 if dtype == torch.float32 else 0.05 if kernels.problem() else 0.0
    found, local = sender(tiny, tmp_path, compute, method, dtype, lora=lora, max_gap=max(bound, 1e-3))
    for step in range(3):
        sent = await found.publish()
        tensors = published(found.learner.model)
        assert sent.version == local.engine.version == step and sent.bytes == sum(t.nbytes for t in tensors.values())
        assert sent.digest == whole(await local.engine.digests()) == whole(digests(tensors))
        assert sent.gap <= bound
        train(found.learner, step)
    assert len({u.version for u in local.loads}) == 3
    assert len(set(map(str, (tmp_path / "weights").glob("v*")))) == (2 if method == "reload" else 0)
    await local.engine.close()


@pytest.mark.parametrize("way", ["refuses", "hangs"])
async def test_an_engine_that_is_lost_before_its_canary_stops_nothing(tiny: Path, tmp_path: Path, compute, way) -> None:
    """It was killed, or frozen, after it took the weights; the other one proves them."""
    found, local = sender(tiny, tmp_path, compute, "reload")
    other = Local(tiny, compute, torch.bfloat16)
    ready = [local, other]

    async def lost(*_: object) -> Completion:
        if way == "refuses":
            raise EngineDown("connection refused")
        if other in ready:
            ready.remove(other)  # the router finds out
        await asyncio.sleep(60)
        raise AssertionError

    other.generate = lost  # type: ignore[method-assign]
    found.remotes = lambda: tuple(ready)  # type: ignore[assignment]
    began = time.monotonic()
    assert (await found.publish()).gap == 0 and time.monotonic() - began < 50
    train(found.learner)
    ready[:] = [other]
    found.timeout = 1.0
    with pytest.raises(WeightsFailed, match="did not arrive within") as caught:  # nobody is left to prove them
        await found.publish()
    assert caught.value.cause == "unreachable" and (way == "hangs" or "connection refused" in str(caught.value))
    await local.engine.close()


async def test_weights_that_did_not_change_are_not_sent_again(tiny: Path, tmp_path: Path, compute) -> None:
    found, local = sender(tiny, tmp_path, compute, "reload")
    await found.publish()
    again = await found.publish()
    assert len(local.loads) == 1 and again.bytes == 0
    await local.engine.close()


async def test_what_is_sent_is_a_model_that_transformers_loads(tiny: Path, tmp_path: Path, compute) -> None:
    """vLLM and SGLang read the same folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found, local = sender(tiny, tmp_path, compute, "reload", torch.float32)
    train(found.learner)
    await found.publish()
    path = local.loads[-1].folder
    model = AutoModelForCausalLM.from_pretrained(path)
    own = dict(found.learner.model.named_parameters())
    assert all((p == own[n]).all() for n, p in model.named_parameters())
    assert len(AutoTokenizer.from_pretrained(path)) == len(load_tokenizer(tiny))
    await local.engine.close()


async def test_a_sleeping_engine_wakes_with_the_new_weights(tiny: Path, tmp_path: Path, compute) -> None:
    found, local = sender(tiny, tmp_path, compute, "reload")
    found.sleeping = [local]  # type: ignore[list-item]
    await found.publish()
    await found.rest()
    assert local.engine.asleep and not sum(p.nbytes for p in local.engine.runner.model.parameters())
    train(found.learner)
    sent = await found.publish()
    assert sent.gap == 0 and local.engine.version == 1 and not local.engine.paused
    await local.engine.close()


async def test_engines_that_slept_wake_after_a_step_that_moved_nothing(tiny: Path, tmp_path: Path, compute) -> None:
    """All rewards were equal: the learner has no newer weights, and the engines have none at all."""
    found, local = sender(tiny, tmp_path, compute, "reload")
    found.sleeping = [local]  # type: ignore[list-item]
    before = await found.publish()
    await found.rest()
    sent = await found.publish()
    assert not local.engine.asleep and not local.engine.paused
    assert (sent.version, sent.digest, sent.gap) == (0, before.digest, 0) and len(local.loads) == 2
    assert (await found.publish()).bytes == 0  # awake, and up to date
    await local.engine.close()


async def test_one_that_is_lost_does_not_keep_the_others_from_sleeping(tiny: Path, tmp_path: Path, compute) -> None:
    class Lost:
        async def gone(self) -> None:
            raise EngineDown("connection refused")

        sleep = wake = resume = gone

    found, local = sender(tiny, tmp_path, compute, "reload")
    found.sleeping = [Lost(), local]  # type: ignore[list-item]
    await found.publish()
    await found.rest()
    assert local.engine.asleep
    train(found.learner)
    assert (await found.publish()).gap == 0 and not local.engine.paused
    await local.engine.close()


@pytest.mark.parametrize("damage", ["bytes", "truncated", "gone", "adapter", "stale"])
async def test_damage_on_the_way_stops_the_run_with_its_cause(tiny: Path, tmp_path: Path, compute, damage: str) -> None:
    causes = {"bytes": "mismatch", "truncated": "truncated", "gone": "missing", "adapter": "missing", "stale": "stale"}
    found, local = sender(tiny, tmp_path, compute, "reload")
    await found.publish()
    train(found.learner)
    before = await local.engine.digests()
    original = local.engine.load

    async def damaged(update: Update) -> Held:
        file = Path(update.folder) / "model.safetensors"
        data = file.read_bytes()
        if damage == "bytes":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif damage == "truncated":
            file.write_bytes(data[: len(data) // 2])
        elif damage == "gone":
            file.unlink()
        elif damage == "adapter":
            from safetensors.torch import load_file, save_file

            save_file(dict(list(load_file(file).items())[1:]), file)
        elif damage == "stale":
            local.engine.weights.version = 5  # type: ignore[union-attr]
            update = replace(update, anew=False)
        return await original(update)

    local.engine.load = damaged  # type: ignore[method-assign]
    with pytest.raises(WeightsFailed) as caught:
        await found.publish()
    assert caught.value.cause == causes[damage]
    assert await local.engine.digests() == before
    await local.engine.close()


async def test_one_engine_of_several_that_refuses_stops_the_run(tiny: Path, tmp_path: Path, compute) -> None:
    """MRL's defect: a failed update was a warning, and training went on with a stale engine."""
    found, local = sender(tiny, tmp_path, compute, "reload")
    local.refused = (WeightsFailed("truncated", "the other one read half a file"),)
    with pytest.raises(WeightsFailed, match="half a file"):
        await found.publish()
    await local.engine.close()


async def test_an_engine_that_hangs_does_not_hang_the_run(tiny: Path, tmp_path: Path, compute) -> None:
    found, local = sender(tiny, tmp_path, compute, "reload")
    found.timeout = 0.3

    async def never(update: Update) -> Held:
        await asyncio.sleep(3600)
        raise AssertionError

    local.load = never  # type: ignore[method-assign]
    with pytest.raises(WeightsFailed, match=r"weights.timeout=0.3") as caught:
        await found.publish()
    assert caught.value.cause == "unreachable"
    await local.engine.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError()], ids=repr)
def test_a_full_disk_leaves_nothing_half_written(tiny: Path, tmp_path: Path, error: Exception) -> None:
    tensors = {"a": torch.zeros(4)}
    (tmp_path / "w").mkdir()
    folder.write(tmp_path / "w", 1, tensors, tiny)

    def full(*args: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "save_file", full)
        with pytest.raises(WeightsFailed, match=r"No space left|RuntimeError"):
            folder.write(tmp_path / "w", 2, tensors, tiny)
    assert [p.name for p in (tmp_path / "w").iterdir()] == ["v000001"]


def test_a_folder_that_is_announced_is_complete(tiny: Path, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4.0)}
    assert folder.latest(tmp_path) is None
    path = folder.write(tmp_path, 3, tensors, tiny)
    update = Update(version=3, digests=digests(tensors), folder=str(path), anew=True)
    folder.announce(tmp_path, update)
    assert folder.latest(tmp_path) == update
    (tmp_path / folder.LATEST).write_text('{"version"')
    with pytest.raises(WeightsFailed):
        folder.latest(tmp_path)


def test_old_folders_go_and_those_of_a_lost_future_too(tiny: Path, tmp_path: Path) -> None:
    for version in (1, 2, 3, 9):
        folder.write(tmp_path, version, {"a": torch.zeros(1)}, tiny)
    (tmp_path / ".v000004.1.part").mkdir()
    folder.prune(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000002", "v000003"]


def test_an_engine_that_looks_by_itself_is_waited_for(tmp_path: Path) -> None:
    from birl.engines.wire import Info

    update = Update(version=4, digests={"a": "x"}, folder=str(tmp_path))

    class Looks:
        address = "there"

        def __init__(self, arrives: int) -> None:
            self.asked, self.arrives = 0, arrives

        async def info(self) -> Info:
            self.asked += 1
            there = self.asked >= self.arrives
            state = {"version": 4 if there else 3, "digest": whole(update.digests) if there else "old"}
            rest = {"engine": "birl", "model": "", "dtype": "", "context": 1, "vocabulary": 1, "running": 0}
            return Info(**state, **rest, waiting=0, paused=False, asleep=False, pid=1)

    held = asyncio.run(Volume(Looks(3), 5.0, 0.01).load(update))  # type: ignore[arg-type]
    assert held.version == 4 and held.digest == whole(update.digests)
    with pytest.raises(WeightsFailed, match="has version 3") as caught:
        asyncio.run(Volume(Looks(10**9), 0.1, 0.01).load(update))  # type: ignore[arg-type]
    assert caught.value.cause == "stale"


def test_digests_tell_type_shape_and_bytes_apart() -> None:
    from birl.models.digests import digest

    a = torch.arange(6.0)
    others = [a.reshape(2, 3), a.bfloat16(), a + 0.0001, a[:5]]
    assert len({digest(t) for t in (a, *others)}) == 5
    assert digest(a.reshape(2, 3).T) == digest(a.reshape(2, 3).T.contiguous())
    assert whole({"a": "1", "b": "2"}) == whole({"b": "2", "a": "1"}) != whole({"a": "2", "b": "1"})


def test_shared_memory_of_dead_processes_is_swept() -> None:
    gone = Path(f"/dev/shm/birl-weights-{2**22 + 1}")
    gone.mkdir(exist_ok=True)
    (gone / "v000001").mkdir(exist_ok=True)
    assert shared_memory().name.endswith(str(os.getpid())) and not gone.exists()
