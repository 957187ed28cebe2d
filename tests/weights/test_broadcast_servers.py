"""weights.method=nccl with real servers, one of which is killed."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from birl.config import schema
from birl.engines import servers as engines
from birl.learner.learner import Learner
from birl.models.digests import digests, whole
from birl.models.load import load_model
from birl.types import SamplingParams, Update
from birl.weights.canary import Canary
from birl.weights.publish import Sender
from birl.weights.publisher import published
from tests.weights.test_weights import PROMPTS, train


@pytest.mark.usefixtures("forking")
async def test_real_servers_of_which_one_is_killed_in_the_middle(
    tiny: Path, tmp_path: Path, compute: ThreadPoolExecutor
) -> None:
    """Two real ones. One that has other weights is brought up to date alone; one is frozen, then killed in the middle
    of a broadcast, and the other goes on."""
    learner = Learner(load_model(tiny), dtype=torch.bfloat16)
    wanted = engines.Wanted(
        folder=tiny,
        dtype="bfloat16",
        device="cpu",
        context=256,
        longest=256,
        kv_cache_gb=0.01,
        end_ids=frozenset({2}),
        logs=tmp_path,
        method="nccl",
        timeout=30.0,
        bucket_mb=1,
    )
    servers = await engines.open_servers(
        schema.Engine(kind="birl", count=2, threads=1, max_batch=8, restarts=0), wanted
    )
    sender = Sender(
        learner=learner,
        fleet=servers.router,
        remotes=servers.ready,
        method="nccl",
        root=tmp_path / "weights",
        beside=tiny,
        compute=compute,
        canary=Canary(learner, PROMPTS, 1e-3),
        timeout=30.0,
        broadcast=servers.broadcast,
    )
    try:
        await servers.router.start(30)
        await both(sender, servers)
        assert servers.broadcast is not None and servers.broadcast.groups == 1
        other = {name: torch.zeros_like(t) for name, t in published(learner.model).items()}
        stray = next(iter(servers.remotes.values()))
        await stray.load(Update(version=7, digests=digests(other), tensors=other))
        servers.router.fleet.members[0].poke.set()  # look now
        assert await servers.router.fleet.wait(lambda: stray.version == 0 and len(servers.ready()) == 2, 20)
        await both(sender, servers, sent=0)
        train(learner, 1)
        answer = asyncio.create_task(servers.generate((5, 6, 7), SamplingParams(max_tokens=40, ignore_eos=True)))
        lost = servers.children[1]
        os.kill(lost.pid, signal.SIGSTOP)
        publishing = asyncio.create_task(sender.publish())
        await asyncio.sleep(0.5)
        assert not publishing.done()
        os.kill(lost.pid, signal.SIGKILL)
        sent = await publishing
        assert sent.version == 1 and sent.gap == 0 and len((await answer).tokens) == 40
        train(learner, 2)
        sent = await sender.publish()
        assert sent.version == 2 and sent.gap == 0 and len(servers.ready()) == 1 and servers.broadcast.groups == 2
    finally:
        await sender.close()
        await servers.close()


async def both(sender: Sender, servers: engines.Servers, sent: int | None = None) -> None:
    """After an update, or after `sent`, both servers have what the learner has, and say so."""
    if sent is None:
        found = await sender.publish()
        sent = found.version
        assert found.gap == 0 and found.bytes == 2 * sum(t.nbytes for t in published(sender.learner.model).values())
    infos = [await remote.info() for remote in servers.ready()]
    digest = whole(digests(published(sender.learner.model)))
    assert [(i.version, i.digest) for i in infos] == [(sent, digest)] * 2
