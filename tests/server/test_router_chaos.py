"""The router while engines die, freeze and come back."""

import asyncio
import os
import random
import signal
import sys
import time
from typing import Any

import pytest
import torch

from birl.engines.client import Client
from birl.engines.router import Router
from birl.engines.wire import Remote
from birl.errors import EngineDown, WeightsFailed
from birl.models.digests import digests
from birl.models.load import cast, load_model
from birl.process import Process, answers, free_port
from birl.types import Completion, SamplingParams, Stop, Update
from tests.server.app import tiny_engine
from tests.server.fakes import PROMPT, Fake, expected, params, play, states, until, update
from tests.tiny import tiny_model_folder


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_request_is_answered_once_or_told_in_time(seed: int) -> None:
    """Engines that die, freeze, answer nonsense, come back with old weights, are paused by others, while weights
    change: an answer has exactly the tokens that its seed names, all of weights that were given, never older than those
    that were current when it was asked for, unless it has waited for the load itself."""

    async def main() -> None:
        rng = random.Random(seed)
        engines = [Fake(f"engine{i}", pace=rng.uniform(0.02, 0.3)) for i in range(rng.randint(1, 4))]
        router = Router(engines, timeout=300.0, attempt_timeout=60.0, retries=1000, load_timeout=20.0)
        given, over = {0}, asyncio.Event()

        async def weather() -> None:
            while not over.is_set():
                await asyncio.sleep(rng.expovariate(0.3))
                engine = rng.choice(engines)
                what = rng.choice(["crash", "freeze", "garbage", "restart", "pause", "heal", "heal", "heal"])
                if what == "crash":
                    engine.crash()
                elif what == "restart":
                    engine.restart()
                elif what == "pause":
                    engine.aborted |= set(engine.running)
                    engine.change(paused=True)
                elif what == "heal":
                    engine.restart() if engine.dead else engine.change(frozen=False, garbage=False, paused=False)
                else:
                    engine.change(**{"freeze": {"frozen": True}, "garbage": {"garbage": True}}[what])

        async def learner() -> None:
            version = 0
            while not over.is_set():
                await asyncio.sleep(rng.uniform(1, 20))
                version += 1
                given.add(version)
                try:
                    await router.load(update(version))
                except WeightsFailed:
                    assert router.version < version
                else:
                    assert router.version == version

        async def ask(i: int) -> str:
            await asyncio.sleep(rng.uniform(0, 60))
            asked, floor = asyncio.get_running_loop().time(), router.version
            wanted = params(rng.randint(1, 60), seed=i)
            try:
                answer = await router.generate(PROMPT, wanted, session=rng.choice(["", f"s{i % 5}"]))
            except EngineDown:
                assert asyncio.get_running_loop().time() - asked <= 300.01
                return "told"
            assert answer.ids == expected(PROMPT, wanted) and answer.stop is Stop.LENGTH
            assert set(answer.versions.tolist()) <= given and min(answer.versions.tolist()) >= floor
            return "answered"

        background = [asyncio.create_task(weather()), asyncio.create_task(learner())]
        found = await asyncio.gather(*(ask(i) for i in range(40)))
        over.set()
        await asyncio.gather(*background)
        for engine in engines:
            engine.restart()
        await asyncio.sleep(10)  # that is noticed, and
        await router.start(100.0)  # in the end all are well again
        assert len(found) == 40 and sum(row.served for row in router.table()) >= found.count("answered")
        assert {e.truth for e in engines} == {router.version} and not any(e.running for e in engines)
        assert all(row.in_flight == 0 for row in router.table())
        await router.close()

    play(main)


@pytest.mark.usefixtures("forking")
async def test_two_real_engines_one_is_killed_and_one_is_frozen(tmp_path) -> None:
    """kill -9 in the middle of answers, SIGSTOP in the middle of others, new weights while one does not listen: every
    answer is the undisturbed one, and nobody serves with old weights."""
    folders = [tiny_model_folder(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    tensors = {name: p.data for name, p in cast(load_model(folders[1]), torch.bfloat16).named_parameters()}
    new = Update(version=1, digests=digests(tensors), tensors=tensors)
    processes: dict[str, Process] = {}
    events: list[tuple[str, dict[str, Any]]] = []

    async def restart(remote: Remote) -> Remote:
        if processes[remote.address].alive:
            return remote
        await processes[remote.address].restart()
        return Client(remote.address)

    def engine(i: int) -> Client:
        port = free_port()
        client = Client(f"http://127.0.0.1:{port}")
        command = [sys.executable, "-m", "tests.server.app", str(folders[0]), str(port), "0.01"]
        keys = {"log": tmp_path / f"{i}.log", "ready": answers(client.info), "start_timeout": 60.0}
        processes[client.address] = Process(command, env={"OMP_NUM_THREADS": "1"}, backoff=0.1, **keys)
        return client

    def ask(n: int, name: str) -> list["asyncio.Task[Completion]"]:
        return [asyncio.create_task(router.generate(PROMPT, sampled(i), session=f"{name}{i}")) for i in range(n)]

    def sampled(i: int) -> SamplingParams:
        return params(150, seed=i, ignore_eos=True)

    clients = [engine(i) for i in range(2)]
    patience = {"interval": 0.3, "poll_timeout": 3.0, "load_timeout": 20.0}
    router = Router(clients, restart=restart, on_event=lambda n, **f: events.append((n, f)), **patience)
    undisturbed = tiny_engine(folders[0])
    try:
        await asyncio.gather(*(p.start() for p in processes.values()))
        await router.start(20.0)
        expect = await asyncio.gather(*(undisturbed.generate(PROMPT, sampled(i)) for i in range(8)))

        asked = ask(8, "killed")
        await asyncio.sleep(0.8)
        assert [row.in_flight for row in router.table()] == [4, 4]
        os.kill(processes[clients[0].address].pid, signal.SIGKILL)
        assert await asyncio.gather(*asked) == expect
        assert sum(name == "retry" for name, _ in events) == 4, events
        await until(lambda: states(router) == ["ready", "ready"], 60)

        held = await router.load(new)
        assert held.version == 1
        await undisturbed.load(new)
        expect = await asyncio.gather(*(undisturbed.generate(PROMPT, sampled(i)) for i in range(8)))
        events.clear()
        asked = ask(8, "frozen")
        await asyncio.sleep(0.8)
        os.kill(processes[clients[1].address].pid, signal.SIGSTOP)
        began = time.monotonic()
        assert await asyncio.gather(*asked) == expect and time.monotonic() - began < 200
        assert sum(name == "retry" for name, _ in events) == 4, events
        assert states(router) == ["ready", "down"]

        newer = Update(version=2, digests=new.digests, tensors=tensors)
        assert (await router.load(newer)).version == 2
        events.clear()
        os.kill(processes[clients[1].address].pid, signal.SIGCONT)
        await until(lambda: states(router) == ["ready", "ready"], 30)
        assert [name for name, f in events if f["address"] == clients[1].address] == ["engine_stale", "engine_ready"]
        late = await asyncio.gather(*ask(8, "late"))
        assert [a.ids for a in late] == [a.ids for a in expect] and {v for a in late for v in a.versions.tolist()} == {
            2
        }
        assert all(row.in_flight == 0 and row.served for row in router.table())
    finally:
        await router.close()
        await asyncio.gather(*(p.terminate() for p in processes.values()))
        await undisturbed.close()
