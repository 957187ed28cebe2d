"""Servers and the learner have one GPU in turns: each gives it back before the other needs it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from birl.errors import BirlError
from birl.train.build import publisher_of
from birl.weights import publish
from tests.weights.test_weights import sender, train


async def published(tiny: Path, tmp_path: Path, compute: ThreadPoolExecutor) -> tuple[Any, Any]:
    """A sender with one engine that sleeps, and has the first weights."""
    found, local = sender(tiny, tmp_path, compute, "reload")
    found.sleeping = cast(Any, [local])
    await found.publish()
    return found, local


async def test_servers_that_sleep_and_keep_their_memory_stop_the_run(
    tiny: Path, tmp_path: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM without --enable-sleep-mode says that it sleeps, and keeps everything."""
    found, local = await published(tiny, tmp_path, compute)
    free = iter([10 * 2**30, 11 * 2**30, 10 * 2**30, 14 * 2**30])
    monkeypatch.setattr(publish, "free_memory", lambda device: next(free))
    found.owed = 4 * 2**30
    with pytest.raises(BirlError, match=r"1\.00 GiB .* 4\.00 GiB: 3\.00 GiB are missing.*--enable-sleep-mode"):
        await found.rest()
    found.owed = 4 * 2**30
    await found.rest()
    await local.engine.close()


async def test_what_the_learner_does_not_need_is_there_before_a_server_wakes(
    tiny: Path, tmp_path: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, local = await published(tiny, tmp_path, compute)
    await found.rest()
    order: list[str] = []
    wake = local.wake

    async def noted() -> None:
        order.append("wake")
        await wake()

    monkeypatch.setattr(local, "wake", noted)
    monkeypatch.setattr(publish, "give_back", lambda device: order.append("give back"))
    train(found.learner)
    await found.publish()
    assert order == ["give back", "wake"]
    await found.rest()
    found.clear = lambda: order.append("every rank")
    train(found.learner)
    await found.publish()
    assert order[2:] == ["every rank", "wake"]
    await local.engine.close()


def test_every_rank_gives_back_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has servers on its own GPU: rank 0 alone gave its memory back."""
    sender, freed, gpus = SimpleNamespace(canary=SimpleNamespace(begin=lambda: None)), list[str](), ["cuda:0", "cuda:1"]
    ranks = [SimpleNamespace(learner=SimpleNamespace(device=gpu)) for gpu in gpus]
    crew = SimpleNamespace(call=lambda worker, verb: [verb(r) for r in ranks], ranks=SimpleNamespace(sharded=False))
    monkeypatch.setattr("birl.engines.servers.sender", lambda *args: sender)
    monkeypatch.setattr(publish, "give_back", freed.append)
    worker = SimpleNamespace(policy=None, learner=None, crew=crew)
    publisher: Any = publisher_of(*cast(Any, (SimpleNamespace(config=None, folder=None), worker, object(), [], print)))
    publisher.clear()
    assert freed == gpus
