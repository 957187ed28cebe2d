"""Weights on their way from the learner to engines in other processes.

    tensors in the engines' type -> digests -> folder or copies -> every engine loads and proves -> canary

What differs between the methods is how an engine comes to the tensors:

    reload, shared   it gets a folder (on a disk, or in shared memory) and reads it in place
    volume           it looks into a folder by itself; we wait until it says that it has them
    direct           it is sent the tensors over HTTP, in buckets
    nccl             it is sent them together with all others, by a broadcast from the learner's device (`broadcast.py`)
    ipc              it reads them from the learner's memory, in buckets (`lending.py`)
    checkpoint       its process is started anew from the folder
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from birl.engines.peer import size
from birl.engines.remote import Remote
from birl.engines.router import Router
from birl.errors import EngineDown, WeightsFailed
from birl.learner.learner import Learner
from birl.models.digests import digests, whole
from birl.models.released import shapes_of
from birl.parallel.machine import check_returned, free_memory, give_back
from birl.types import Held, Update
from birl.waits import event, waiting
from birl.weights import folder
from birl.weights.canary import Canary
from birl.weights.gathered import Gathered, Stored
from birl.weights.live import Live
from birl.weights.publisher import Sent, published

if TYPE_CHECKING:
    from birl.weights.broadcast import Broadcast

SHARING = (
    "vLLM does so when started with --enable-sleep-mode, SGLang with --enable-memory-saver, which birl adds to servers "
    "of its own; engine.sleep is for servers on the learner's GPU: leave it false where they have others."
)
LIVE = ("nccl", "ipc")  # methods that send the learner's own tensors
LOOK = 0.2  # seconds between two looks at whether an engine is still there


@dataclass(slots=True, kw_only=True)
class Sender:
    """Sends the learner's weights to a fleet. `root` holds the folders of the methods that write some, `beside` the
    files of the model folder that go with them. `sleeping`: engines that give their memory back meanwhile."""

    learner: Learner
    fleet: Router
    remotes: Callable[[], Sequence[Remote]]  # those that are ready
    method: str
    root: Path
    beside: Path
    compute: Executor
    canary: Canary
    timeout: float
    sleeping: Collection[Remote] = ()
    tensors: Callable[[nn.Module], dict[str, Tensor]] = published  # by the names that the engines know
    broadcast: "Broadcast | None" = None  # method=nccl
    keeps: bool = False  # copies of what was sent: the learner trains on without sending, and an engine may come back
    recreate: Callable[[str], Awaitable[None]] | None = None  # start every engine anew from this folder
    gathered: Gathered | None = None  # where each rank has parts of the weights
    digest: str = ""  # of what was sent last
    version: int = -1  # that was sent last
    proof: asyncio.Task[list[float]] | None = None  # of that version, still to come
    gap: float = nan  # of the last proof
    lost: str = ""  # why an engine's canary had no answer
    resting: bool = False  # those of `sleeping` have no weights
    owed: int = 0  # bytes of the learner's GPU that those of `sleeping` give back together, at least

    @property
    def sent_digest(self) -> str:
        return self.digest if self.gathered is not None else ""

    async def publish(self, wait: bool = True) -> Sent:
        """Raises `WeightsFailed` with its cause: the run stops rather than go on with unproven weights."""
        await self.proved()
        if self.version == self.learner.version and not self.resting:
            return Sent(version=self.version)
        began, version = time.perf_counter(), self.learner.version
        with self.arriving(version):
            async with asyncio.timeout(self.timeout):
                update = await asyncio.get_running_loop().run_in_executor(self.compute, self.update)
                await self.each(lambda remote: remote.wake())
                if self.recreate is not None:
                    await self.recreate(update.folder)
                held = await self.fleet.load(update)
                if self.fleet.refused:
                    raise self.fleet.refused[0]
                await self.each(lambda remote: remote.resume())
        self.resting = False
        self.version, self.digest = version, whole(update.digests)
        self.proof = asyncio.create_task(self.proofs())
        if wait:
            await self.proved()
        if update.folder or self.gathered is not None:
            await asyncio.to_thread(folder.prune, self.root, version)
        event(f"version {version} of the weights sent")
        return Sent(
            version=version,
            digest=self.digest,
            seconds=time.perf_counter() - began,
            paused=held.seconds,
            bytes=held.bytes,
            gap=self.gap,
        )

    async def proved(self) -> float:
        """Raises `WeightsFailed` where an engine computes something else, or none answers in time."""
        if self.proof is not None:
            with self.arriving(self.version):
                async with asyncio.timeout(self.timeout):
                    gaps = await self.proof
            self.proof = None
            self.gap = max(gaps, default=nan) if self.canary.prompts else nan
        return self.gap

    @contextmanager
    def arriving(self, version: int) -> Iterator[None]:
        """Errors meanwhile, as `WeightsFailed`."""
        try:
            with waiting("learner", f"version {version} of the weights to arrive", "engines", self.timeout):
                yield
        except TimeoutError as error:
            raise WeightsFailed(
                "unreachable",
                f"Version {version} of the weights did not arrive within weights.timeout={self.timeout:g} s: raise it, "
                "where that is too short for the size of the model."
                f"{f' {self.lost}' if self.lost else ''} {self.fleet.describe()}",
            ) from error
        except EngineDown as error:
            raise WeightsFailed("unreachable", f"Version {version} of the weights: {error}") from error

    def update(self) -> Update:
        """A snapshot of the weights as they are now (compute thread)."""
        version, place, live = self.learner.version, "", self.method in LIVE
        sent: Mapping[str, Tensor] = {}
        if self.gathered is not None:  # no rank has all of them
            if live and not self.keeps:
                self.gathered.measure()
            else:
                path = folder.write(self.root, version, self.gathered, self.beside).resolve()
                if live or self.method == "direct":
                    sent = Stored(path / "model.safetensors")
                else:
                    place = str(path)
            result, shapes, take = dict(self.gathered.digests), self.gathered.shapes, self.gathered.take
        else:
            tensors = self.tensors(self.learner.model)
            result, shapes = digests(tensors), shapes_of(tensors)
            if self.method == "direct" or (live and self.keeps):
                sent = {name: t.to("cpu", copy=True) for name, t in tensors.items()}
            elif not live:
                place = str(folder.write(self.root, version, tensors, self.beside).resolve())

            def take(names: Sequence[str], /) -> list[Tensor]:
                return [tensors[name] for name in names]

        if live:
            sent = Live(self.learner, self.compute, shapes, take, sent or None)
            if self.broadcast is not None:
                self.broadcast.source = sent
        self.canary.compute()
        if self.sleeping:
            give_back(self.learner.device)  # what the step left is room for who wakes up
        update = Update(version=version, digests=result, folder=place, tensors=sent, anew=self.version < 0)
        if self.method == "volume":
            folder.announce(self.root, update)
        return update

    async def proofs(self) -> list[float]:
        """The canaries of all engines that are ready, of one at least. An engine that is lost meanwhile stops nothing:
        it gets weights, and proves them, when it is back. Raises `WeightsFailed` where one computes something else."""
        self.lost = ""
        while True:
            await self.fleet.settle(self.timeout)
            result = await asyncio.gather(*(self.unless_lost(remote) for remote in self.remotes()))
            if gaps := [gap for gap in result if gap is not None]:
                return gaps
            await asyncio.sleep(LOOK)

    async def unless_lost(self, remote: Remote) -> float | None:
        """The canary of one engine; None where it does not answer, or others have noticed that it does not."""
        work = asyncio.create_task(self.prove(remote))
        try:
            while not work.done() and remote in self.remotes():
                await asyncio.wait({work}, timeout=LOOK)
            return work.result() if work.done() else None
        except EngineDown as error:
            self.lost = str(error)
            return None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def prove(self, remote: Remote) -> float:
        """The canary of one engine. Raises `WeightsFailed`."""
        return await self.canary.check(remote, remote.address)

    async def rest(self) -> None:
        """Raises `BirlError` where the learner's GPU has not the memory that it was to get."""
        self.resting, device = bool(self.sleeping), self.learner.device
        before = free_memory(device) if self.owed else 0
        everyone = await self.each(lambda remote: remote.sleep())
        if self.owed and everyone:
            owed, self.owed = self.owed, 0  # once: later, other processes may come and go
            check_returned(
                free_memory(device) - before, owed, device, "Servers that sleep (engine.sleep=true)", SHARING
            )

    async def each(self, call: Callable[[Remote], Awaitable[None]]) -> bool:
        """Of `sleeping`; did all answer? One that does not stops nothing: it is brought up to date when it is back."""
        answered = 0
        for remote in list(self.sleeping):
            with suppress(EngineDown):
                await call(remote)
                answered += 1
        return answered == len(self.sleeping)

    async def close(self) -> None:
        """What is in shared memory goes; folders on a disk stay where they are."""
        if self.proof is not None:
            self.proof.cancel()
            await asyncio.gather(self.proof, return_exceptions=True)
        if self.method == "shared":
            folder.remove(self.root)
        if self.broadcast is not None:
            self.broadcast.close()


class Volume:
    """A `Remote` whose engine looks for new weights by itself: `load` waits until it says that it has them."""

    def __init__(self, remote: Remote, timeout: float, interval: float = 0.03) -> None:
        self._remote, self.timeout, self.interval = remote, timeout, interval

    def __getattr__(self, name: str):
        return getattr(self._remote, name)

    async def load(self, update: Update) -> Held:
        began, info = time.perf_counter(), None
        while time.perf_counter() - began < self.timeout:
            try:
                info = await self._remote.info()
            except EngineDown as error:
                raise WeightsFailed("unreachable", str(error)) from error
            if info.version == update.version and info.digest == whole(update.digests):
                return Held(version=info.version, digest=info.digest, bytes=size(update.folder))
            await asyncio.sleep(self.interval)
        has = "nothing is known of it" if info is None else f"it has version {info.version}, digest {info.digest[:8]}"
        raise WeightsFailed(
            "stale",
            f"{self._remote.address} did not pick up version {update.version} from {update.folder} within "
            f"{self.timeout:g} s; {has}. Does it see that folder, and was it started with volume={update.folder}/..?",
        )


def shared_memory() -> Path:
    """A place in shared memory for this process; those of processes that are gone are swept away."""
    root = Path("/dev/shm")
    for old in root.glob("birl-weights-*"):
        pid = old.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            folder.remove(old)
    return root / f"birl-weights-{os.getpid()}"
