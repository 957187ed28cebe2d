"""The pool of actors of `env=ray`, with a stand-in for Ray: who gets room when. `test_ray.py` has the real one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from birl.errors import BirlError
from birl.launch import ray_envs
from birl.launch.ray_envs import Collectors, Config, Place


class StandIn:
    """Of the package ray: actors that are ready when `gate` is open, or that do not start at all."""

    def __init__(self) -> None:
        self.gate, self.broken, self.made, self.killed = asyncio.Event(), False, 0, 0
        error = type("RayError", (Exception,), {})
        names = ("RayTaskError", "RayActorError", "ActorUnschedulableError")
        self.exceptions = SimpleNamespace(RayError=error, **{name: type(name, (error,), {}) for name in names})
        self.reason = self.exceptions.RayActorError

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **keys: SimpleNamespace(remote=self.make))

    def make(self, *arguments: Any) -> Any:
        self.made += 1

        async def ready() -> str:
            await self.gate.wait()
            if self.broken:
                raise self.reason("no node has it")
            return "here"

        async def leave() -> None: ...

        return SimpleNamespace(ready=SimpleNamespace(remote=ready), leave=SimpleNamespace(remote=leave))

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def available_resources(self) -> dict[str, float]:
        return {}


def play(coroutine: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10):
            return await coroutine

    return asyncio.run(bounded())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def config(**keys: Any) -> Config:
    return Config(inner="guess_number", **{"least": 1, "most": 2, "episodes": 2, "idle": 0.05, **keys})


def test_room_is_given_in_the_order_of_asking_and_bounded() -> None:
    async def run() -> None:
        ray = StandIn()
        ray.gate.set()
        pool = await Collectors.start(ray, config(), {})
        order: list[int] = []

        async def ask(n: int) -> tuple[Place, int]:
            found = await pool.room()
            order.append(n)
            return found

        asked = [asyncio.create_task(ask(n)) for n in range(6)]
        await settled()
        assert order == [0, 1, 2, 3] and len(pool.places) == 2 and len(pool.waiting) == 2
        pool.leave(*asked[1].result())
        await settled()
        assert order[4:] == [4]
        asked[5].cancel()
        await settled()
        assert not pool.waiting
        await pool.close()
        assert ray.killed == ray.made == 2

    play(run())


def test_a_turn_that_is_cancelled_goes_to_the_next() -> None:
    async def run() -> None:
        ray = StandIn()
        ray.gate.set()
        pool = await Collectors.start(ray, config(most=1, episodes=1), {})
        first = await pool.room()
        second, third = (asyncio.create_task(pool.room()) for _ in range(2))
        await settled()
        pool.leave(*first)
        second.cancel()  # it was its turn, and it has not gone on yet
        await third
        await pool.close()

    play(run())


def test_actors_that_nobody_needs_are_ended() -> None:
    async def run() -> None:
        ray = StandIn()
        ray.gate.set()
        pool = await Collectors.start(ray, config(), {})
        held = [await pool.room() for _ in range(4)]
        assert len(pool.places) == 2
        for one in held:
            pool.leave(*one)
        while len(pool.places) > 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(pool.places) == 1
        await pool.close()

    play(run())


@pytest.mark.parametrize("reason", ["RayActorError", "ActorUnschedulableError"])
def test_what_does_not_start_is_said_and_tried_again(reason: str) -> None:
    async def run() -> None:
        ray = StandIn()
        ray.reason = getattr(ray.exceptions, reason)
        ray.gate.set()
        pool = await Collectors.start(ray, config(most=1), {})
        ray.broken = True
        pool.gone(pool.places[0])
        with pytest.raises(BirlError, match="no node has it"):
            await pool.room()
        ray.broken = False
        assert (await pool.room())[0].node == "here"
        assert pool.lost == 1
        await pool.close()

    play(run())


def test_the_first_actor_has_a_deadline_and_we_tell_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_envs, "SILENT", 0.01)

    async def run() -> None:
        with pytest.raises(BirlError, match=r"env\.start_timeout=0\.3 s. It needs env.cpus=1, and .* 0 of 2 CPU free"):
            await Collectors.start(StandIn(), config(start_timeout=0.3), {})
        told = capsys.readouterr().out
        assert "not started for 0.01 s. It needs env.cpus=1, and the cluster has 0 of 2 CPU free." in told

    play(run())
