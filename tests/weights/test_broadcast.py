"""weights.method=nccl, over Gloo: every engine has what was trained, or the others go on without it."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WorkResult  # pyright: ignore

from birl.engines import collective
from birl.engines.collective import pieces, store_address
from birl.engines.wire import Invitation, invitation_from
from birl.errors import EngineDown, WeightsFailed
from birl.hosts import own_address
from birl.learner.learner import Learner
from birl.models.digests import digests, whole
from birl.models.load import load_model
from birl.models.released import shapes_of
from birl.server.limits import Refused
from birl.server.staging import Membership
from birl.types import Held, Update
from birl.weights.broadcast import Broadcast, Joined
from birl.weights.canary import Canary
from birl.weights.gathered import Gathered
from birl.weights.live import Live
from birl.weights.publish import Sender
from birl.weights.publisher import published
from tests.server.running import running
from tests.weights.test_weights import PROMPTS, train

CPU = torch.device("cpu")
TENSORS = {
    "b.weight": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
    "a.bias": torch.arange(5.0),
    "a.weight": torch.arange(700_000.0).reshape(7, 100_000),
    "scale": torch.tensor(3.5),
    "steps": torch.tensor([1, 2, 3]),
}


class There:
    """An engine in this process in the place of a `Client`: a real member of real groups. `ails` says what is wrong
    with it: gone (it never takes part), dies (it joins, takes nothing, and is found dead), hangs (the same, and is not
    found), refuses."""

    def __init__(self, ails: str = "", shapes: collective.Shapes | None = None) -> None:
        self.membership = Membership(shapes=shapes or shapes_of(TENSORS), device=CPU)
        self.ails, self.groups, self.had, self.alone_loads = ails, [], {}, 0

    async def ranks(self) -> int:
        return 1

    async def join(self, invitation: Invitation) -> None:
        self.groups.append(invitation)
        if self.ails == "gone":
            raise EngineDown("connection refused")
        await self.membership.join(invitation)

    async def receive(self, update: Update, group: str) -> Held:
        if self.ails == "dies":
            await asyncio.sleep(0.3)
            raise EngineDown("it was killed")
        if self.ails == "hangs":
            await asyncio.sleep(60)
        found = await self.membership.receive(group)
        if self.ails == "refuses":
            raise WeightsFailed("stale", "it has a newer one")
        if digests(found) != update.digests:
            raise WeightsFailed("mismatch", "other bytes")
        self.had = found
        return Held(version=update.version, digest=whole(update.digests), bytes=sum(t.nbytes for t in found.values()))

    async def load(self, update: Update) -> Held:
        self.alone_loads += 1
        return Held(version=update.version, digest=whole(update.digests))

    async def leave(self) -> None:
        if self.ails != "gone":
            self.membership.leave()


class Whole(dict[str, torch.Tensor]):
    """Tensors in the place of a `Live`."""

    device = CPU

    @property
    def shapes(self) -> dict:
        return shapes_of(self)

    def flat(self, names: Sequence[str]) -> torch.Tensor:
        return torch.cat([self[name].reshape(-1) for name in names])


def broadcast(there: list[There], timeout: float = 30.0, bucket_mb: float = 1) -> tuple[Broadcast, list[Joined]]:
    found = Broadcast(["http://127.0.0.1:1"] * len(there), timeout=timeout, bucket_mb=bucket_mb)
    found.source = Whole(TENSORS)  # type: ignore[assignment]
    return found, [Joined(one, found) for one in there]  # type: ignore[arg-type]


async def give(found: Broadcast, joined: list[Joined], version: int = 1, pids: list[int] | None = None) -> list:
    """What the fleet does; what each engine answered."""
    update = Update(version=version, digests=digests(TENSORS), tensors=TENSORS)
    found.expect(dict(zip(joined, pids or range(10, 10 + len(joined)), strict=True)), update)
    return await asyncio.gather(*(one.load(update) for one in joined), return_exceptions=True)


async def test_every_engine_gets_every_tensor() -> None:
    there = [There() for _ in range(3)]
    found, joined = broadcast(there)
    for version in (1, 2):
        answers = await give(found, joined, version)
        assert [a.version for a in answers] == [version] * 3
        assert all(a.bytes == sum(t.nbytes for t in TENSORS.values()) for a in answers)
    assert found.groups == 1 and all(len(one.groups) == 1 for one in there)  # the same one
    await give(found, joined, 3, pids=[10, 99, 12])
    assert found.groups == 2  # one was started again
    await give(found, joined[:2], 4)
    assert found.groups == 3 and len(there[2].groups) == 2
    late = Update(version=4, digests={}, tensors=TENSORS)
    await joined[0].load(late)  # the fleet mends it
    assert there[0].alone_loads == 1 and not any(one.alone_loads for one in there[1:])
    found.close()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("ails", ["gone", "dies"])
async def test_the_others_go_on_without_one_that_is_lost(ails: str, place: int) -> None:
    """Wherever it is in Gloo's tree: some of the others wait for it and not for the learner."""
    there = [There(ails if i == place else "") for i in range(3)]
    found, joined = broadcast(there, timeout=120.0)
    await give(found, joined[:place] + joined[place + 1 :])  # a group without it is there already
    began = time.monotonic()
    answers = await give(found, joined, 2)
    assert time.monotonic() - began < 80  # well before the timeout
    lost = answers.pop(place)
    assert isinstance(lost, WeightsFailed) and lost.cause == "unreachable"
    assert [a.version for a in answers] == [2, 2] and found.groups == 3
    found.close()


async def test_one_that_hangs_is_left_behind_when_the_fleet_says_so() -> None:
    """A frozen process: no connection breaks, and only the fleet's looks find it."""
    there = [There("hangs"), There(), There()]
    found, joined = broadcast(there, timeout=4.0)
    update = Update(version=1, digests=digests(TENSORS), tensors=TENSORS)
    found.expect(dict.fromkeys(joined, 7), update)
    loads = [asyncio.create_task(one.load(update)) for one in joined]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in loads)
    loads[0].cancel()
    assert [a.version for a in await asyncio.gather(*loads[1:])] == [1, 1]
    found.close()


async def test_nobody_waits_longer_than_the_timeout() -> None:
    found, joined = broadcast([There()], timeout=0.5)
    await give(found, joined)
    invited = replace(await found._invitation(2, found.source), rank=1)
    member, began = joined[0].alone.membership, time.monotonic()  # type: ignore[attr-defined]
    with pytest.raises(WeightsFailed, match=r"rank 1 of 2: .*(0.5 s|500ms)") as caught:
        await member.receive(member.group.name)  # and rank 0 sends nothing
    assert caught.value.cause == "unreachable" and member.group.closed.is_set()
    with pytest.raises(WeightsFailed, match="rank 1 of 3"):
        await member.join(invited)  # and nobody else does
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WeightsFailed, match="rank 1 of 3"):
            await member.join(replace(invited, store=nobody))
    assert time.monotonic() - began < 60
    found.close()


async def test_a_refusal_is_told_and_the_others_are_not_kept() -> None:
    other = {**shapes_of(TENSORS), "a.bias": ((6,), torch.float32)}
    there = [There("refuses"), There(), There(shapes=other)]
    found, joined = broadcast(there)
    answers = await give(found, joined)
    assert [getattr(a, "cause", "") for a in answers] == ["stale", "", "mismatch"] and answers[1].version == 1
    assert "a.bias is float32 [5] and should be float32 [6]" in str(answers[2])
    found.close()


async def test_a_member_of_another_group_takes_nothing() -> None:
    there = There()
    with pytest.raises(WeightsFailed, match="not in the group 'g'"):
        await there.membership.receive("g")
    found, joined = broadcast([there])
    await give(found, joined)
    there.membership.leave()  # the learner does not know
    assert (await give(found, joined, 2))[0].version == 2 and found.groups == 2
    there.membership.leave()
    there.ails = "hangs"
    task = asyncio.create_task(there.membership.join(replace(there.groups[-1], group="x", size=3)))
    await asyncio.sleep(0.1)
    there.membership.leave()
    with pytest.raises(WeightsFailed, match="it was left"):
        await task
    found.close()


async def test_a_sharded_learner_gathers_one_bucket_at_a_time(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """Rank 0 of ranks that have parts of the weights sends each bucket as it is gathered, on the compute thread."""
    learner = Learner(load_model(tiny), dtype=torch.bfloat16)
    tensors, asked = published(learner.model), []

    def gather(names: Sequence[str]) -> list[torch.Tensor]:
        asked.append((threading.current_thread(), sum(tensors[n].nbytes for n in names)))
        return [tensors[n] for n in names]

    gathered = Gathered(learner.model, torch.bfloat16, gather)
    there = There(shapes=shapes_of(tensors))
    found, joined = broadcast([there], bucket_mb=0.05)
    sender = Sender(
        **{"learner": learner, "fleet": None, "remotes": list, "method": "nccl", "root": Path("/nowhere")},
        **{"beside": tiny, "compute": compute, "canary": Canary(learner, PROMPTS, 1e-3), "timeout": 30.0},
        **{"broadcast": found, "gathered": gathered},
    )  # type: ignore[arg-type]
    update = await asyncio.get_running_loop().run_in_executor(compute, sender.update)
    assert not update.folder and update.digests == digests(tensors)
    asked.clear()
    found.expect({joined[0]: 1}, update)
    await joined[0].load(update)
    assert digests(there.had) == update.digests
    names = {thread.name for thread, _ in asked}
    largest = max(t.nbytes for t in tensors.values())
    assert names == {compute.submit(threading.current_thread).result().name} and len(asked) > 3
    assert max(size for _, size in asked) <= max(0.05 * 2**20, largest)
    found.close()


def test_an_engine_that_comes_back_gets_what_was_sent_or_waits(tiny: Path, compute: ThreadPoolExecutor) -> None:
    """It is never given weights that the learner has changed since."""
    learner = Learner(load_model(tiny), dtype=torch.bfloat16)
    tensors = published(learner.model)
    sent = digests(tensors)

    def live(**options) -> Live:
        return Live(learner, compute, shapes_of(tensors), lambda names: [tensors[n] for n in names], **options)

    alone, with_copies = live(), live(kept={name: t.clone() for name, t in tensors.items()})
    assert digests(alone) == digests(with_copies) == sent
    train(learner, 1)
    assert digests(published(learner.model)) != sent
    with pytest.raises(WeightsFailed, match="trained on to version 1 since it sent 0") as caught:
        dict(alone)
    assert caught.value.cause == "stale" and digests(with_copies) == sent


def test_buckets_are_the_same_whatever_the_order() -> None:
    shapes = shapes_of(TENSORS)
    found = pieces(shapes, 1.0)
    assert found == pieces(dict(reversed(shapes.items())), 1.0)
    assert sorted(name for names in found for name in names) == sorted(shapes)
    assert found == [["b.weight"], ["a.bias"], ["a.weight"], ["scale"], ["steps"]]  # a.weight alone is larger
    assert pieces(shapes, 64.0) == [["b.weight"], ["a.bias", "a.weight", "scale"], ["steps"]]


def test_an_invitation_that_cannot_be_meant_is_refused() -> None:
    invited = Invitation(
        store="127.0.0.1:9",
        group="g",
        rank=1,
        size=2,
        backend="gloo",
        timeout=1.0,
        bucket_mb=1,
        tensors=(("a", (2,), "float32"), ("b", (), "float32")),
    )
    good = json.loads(json.dumps(asdict(invited)))
    assert invitation_from(good) == invited
    wrong = {
        "rank 0 of 2": {"rank": 0},
        "rank 2 of 2": {"rank": 2},
        "size 1": {"size": 1},
        "backend": {"backend": "mpi"},
        "sorted": {"tensors": good["tensors"][::-1]},
        "list of": {"tensors": [["a"]]},
        "timeout": {"timeout": 0},
        "is not of type int": {"rank": "1"},
        "no such key": {"rnk": 1},
    }
    for said, change in wrong.items():
        with pytest.raises(ValueError, match=said.replace("size 1", "rank 1 of 1")):
            invitation_from({**good, "tensors": list(good["tensors"]), **change})
    with pytest.raises(ValueError, match="store is missing"):
        invitation_from({k: v for k, v in good.items() if k != "store"})
    for store in ("nowhere", ":1", "host:", "host:0", "host:99999", "host:x"):
        with pytest.raises(ValueError):
            store_address(store)
    assert store_address("[::1]:80") == ("::1", 80)


def test_gpus_are_told_apart(monkeypatch) -> None:
    invited = Invitation(
        store="h:1", group="g", rank=1, size=2, backend="nccl", timeout=1, bucket_mb=1, tensors=(), gpu="GPU-1"
    )
    with pytest.raises(Refused, match="weights are on cpu"):
        Membership(shapes={}, device=CPU).check(invited)
    monkeypatch.setattr("birl.server.staging.backend", lambda device: "nccl")
    monkeypatch.setattr("birl.server.staging.gpu", lambda device: "GPU-1")
    with pytest.raises(Refused, match="on one GPU"):
        Membership(shapes={}, device=CPU).check(invited)


def test_an_error_of_nccl_is_no_broadcast() -> None:
    """It completes the work of PyTorch, whose `wait` then raises nothing: the buffer would be taken for weights."""
    given = Invitation(store="h:1", group="g", rank=1, size=2, backend="nccl", timeout=1, bucket_mb=1, tensors=())
    told: list[str] = []
    lost = SimpleNamespace(done=lambda: True, value=lambda: int(WorkResult.COMM_ERROR))
    work = SimpleNamespace(is_completed=lambda: True, get_future_result=lambda: lost, wait=lambda: told.append("taken"))
    group = collective.BroadcastGroup(given, CPU)
    group._group = SimpleNamespace(broadcast=lambda flat, root: work, abort=lambda: told.append("aborted"))
    with pytest.raises(RuntimeError, match="NCCL has lost another rank"):
        group._broadcast(torch.zeros(1, dtype=torch.uint8))
    assert told == ["aborted"]
    lost.value = lambda: int(WorkResult.SUCCESS)
    group._broadcast(torch.zeros(1, dtype=torch.uint8))
    assert told == ["aborted", "taken"] and hasattr(dist.Work, "get_future_result")
    group.close()


async def test_nccls_own_words_are_told() -> None:
    """Here PyTorch's error of two environments with different versions: its first line says "invalid usage"."""
    words = (
        "NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Mismatched NCCL version detected : rank 1 version 22809 rank 0 version 22907\nException raised from create"
    )

    def fail() -> None:
        raise RuntimeError(words)

    given = Invitation(store="h:1", group="g", rank=0, size=2, backend="nccl", timeout=5, bucket_mb=1, tensors=())
    group = collective.BroadcastGroup(given, CPU)
    group._open = fail
    with pytest.raises(WeightsFailed, match=r"invalid usage .*: Mismatched NCCL version detected : .* 22907$"):
        await group.open()
    group.close()


async def test_it_listens_on_loopback_only() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1" and own_address("::1") == "::1"
    there = There()
    found, joined = broadcast([there])
    before = listening()
    await give(found, joined)
    new = listening() - before
    assert len(new) >= 3 and all(address.startswith("0100007F:") for address in new), new  # store, and each rank
    found.close()
    there.membership.leave()


def listening() -> set[str]:
    """Addresses at which something of this machine listens, as the kernel writes them."""
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    if not files[0].exists():
        pytest.skip("no /proc/net/tcp here")
    own = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if os.path.lexists(f)}
    rows = [line.split() for file in files for line in file.read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_the_server_says_what_is_wrong(tiny: Path) -> None:
    with running(tiny) as server:
        shapes = shapes_of({n: p.data for n, p in load_model(tiny).bfloat16().named_parameters()})
        tensors = [[n, list(s), str(d).removeprefix("torch.")] for n, (s, d) in sorted(shapes.items())]
        good = {"store": "127.0.0.1:9", "group": "g", "rank": 1, "size": 2, "backend": "gloo", "timeout": 0.3}
        good |= {"bucket_mb": 1, "tensors": tensors}
        cases = {
            "rank 2 of 2": good | {"rank": 2},
            "sorted by name": good | {"tensors": tensors[::-1]},
            "is missing": good | {"tensors": tensors[1:]},
            "should be": good | {"tensors": [[*tensors[0][:2], "float32"], *tensors[1:]]},
            "host:port": good | {"store": "9"},
            "rank 1 of 2": good,  # nobody is there
        }
        for said, given in cases.items():
            reply = server.http.post("/join", json=given)
            assert 400 <= reply.status_code < 500 and said in reply.json()["error"]["message"], reply.text
        reply = server.http.post("/load", json={"version": 1, "digests": {}, "group": "g"})
        assert reply.json()["error"]["cause"] == "unreachable" and "POST /join first" in reply.text
        assert server.http.post("/leave", json={}).json() == {}
        assert server.http.get("/info").json()["version"] == 0 and server.generate([5, 6], max_tokens=3)["tokens"]
