"""Sends weights from the learner to engines in other processes.

    tensors in the engines' type -> digests -> folder or copies -> every engine loads and proves -> canary

The methods differ in how an engine gets the tensors:

    reload, shared   it gets a folder (on a disk, or in shared memory) and reads it in place
    volume           it polls a folder by itself; birl waits until it reports the version
    direct           it is sent the tensors over HTTP, in buckets
    nccl             it is sent them together with all others, by a broadcast from the learner's device (`broadcast.py`)
    ipc              it reads them from the learner's memory, in buckets (`lending.py`)
    checkpoint       its process is restarted from the folder
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
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from birl.engines.peer import size
from birl.engines.router import Router
from birl.engines.wire import Remote
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
LOOK = 0.2  # interval of checks whether an engine is still alive [s]


@dataclass(slots=True, kw_only=True)
class Sender:
    """Sends the learner's weights to a fleet. `root`: folder of the methods that write files; `beside`: the model
    folder, whose other files go with them. `sleeping`: engines that free their memory while the learner trains."""

    learner: Learner
    fleet: Router
    remotes: Callable[[], Sequence[Remote]]  # engines that are ready
    method: str
    root: Path
    beside: Path
    compute: Executor
    canary: Canary
    timeout: float
    sleeping: Collection[Remote] = ()
    tensors: Callable[[nn.Module], dict[str, Tensor]] = published  # by the names that engines use
    broadcast: "Broadcast | None" = None  # method=nccl
    keeps: bool = False  # keep copies of sent weights: the learner may train on before an engine comes back
    recreate: Callable[[str], Awaitable[None]] | None = None  # restart every engine from this folder
    gathered: Gathered | None = None  # set if the weights are sharded over ranks
    clear: Callable[[], None] | None = None  # `cleared` on every rank
    digest: str = ""  # of the version sent last
    version: int = -1  # of the weights sent last
    proof: asyncio.Task[list[float]] | None = None  # pending canary check of that version
    gap: float = nan  # of the last canary check
    lost: str = ""  # why an engine did not answer its canary
    resting: bool = False  # engines of `sleeping` have no weights
    owed: int = 0  # minimum bytes of the learner's GPU that the engines of `sleeping` free together

    @property
    def sent_digest(self) -> str:
        return self.digest if self.gathered is not None else ""

    async def publish(self, wait: bool = True) -> Sent:
        """Send the current weights. Raises `WeightsFailed` with its cause: the run stops if weights are unproven."""
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
        """Wait for the canary. Raises `WeightsFailed` if an engine computes other log-probs, or none answers."""
        if self.proof is not None:
            with self.arriving(self.version):
                async with asyncio.timeout(self.timeout):
                    gaps = await self.proof
            self.proof = None
            self.gap = max(gaps, default=nan) if self.canary.prompts else nan
        return self.gap

    @contextmanager
    def arriving(self, version: int) -> Iterator[None]:
        """Convert errors of a transfer to `WeightsFailed`."""
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
        """Snapshot of the current weights (compute thread)."""
        version, place, live = self.learner.version, "", self.method in LIVE
        sent: Mapping[str, Tensor] = {}
        if self.gathered is not None:  # sharded over ranks
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
        if self.sleeping:  # frees the step's memory for engines that wake up
            cleared(self) if self.clear is None else self.clear()
        update = Update(version=version, digests=result, folder=place, tensors=sent, anew=self.version < 0)
        if self.method == "volume":
            folder.announce(self.root, update)
        return update

    async def proofs(self) -> list[float]:
        """Canary gaps of all engines that are ready, at least one. A lost engine does not stop the run: it gets
        weights, and is checked, when it is back. Raises `WeightsFailed` if an engine computes other log-probs."""
        self.lost = ""
        while True:
            await self.fleet.settle(self.timeout)
            result = await asyncio.gather(*(self.unless_lost(remote) for remote in self.remotes()))
            if gaps := [gap for gap in result if gap is not None]:
                return gaps
            await asyncio.sleep(LOOK)

    async def unless_lost(self, remote: Remote) -> float | None:
        """Canary gap of one engine; None if it does not answer, or the fleet has noticed that it is lost."""
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
        """Canary gap of one engine. Raises `WeightsFailed`."""
        return await self.canary.check(remote, remote.address)

    async def rest(self) -> None:
        """Let engines sleep. Raises `BirlError` if the learner's GPU does not get the expected memory back."""
        self.resting, device = bool(self.sleeping), self.learner.device
        before = free_memory(device) if self.owed else 0
        everyone = await self.each(lambda remote: remote.sleep())
        if self.owed and everyone:
            owed, self.owed = self.owed, 0  # checked once: later, other processes may come and go
            check_returned(
                free_memory(device) - before, owed, device, "Servers that sleep (engine.sleep=true)", SHARING
            )

    async def each(self, call: Callable[[Remote], Awaitable[None]]) -> bool:
        """Call each engine of `sleeping`. Returns whether all answered; the others are updated when they are back."""
        answered = 0
        for remote in list(self.sleeping):
            with suppress(EngineDown):
                await call(remote)
                answered += 1
        return answered == len(self.sleeping)

    async def close(self) -> None:
        """Remove weights from shared memory; folders on disk are kept."""
        if self.proof is not None:
            self.proof.cancel()
            await asyncio.gather(self.proof, return_exceptions=True)
        if self.method == "shared":
            folder.remove(self.root)
        if self.broadcast is not None:
            self.broadcast.close()


def cleared(worker: Any) -> None:
    """(every rank) Release the cached memory of a worker's learner, which may share its GPU with sleeping engines."""
    give_back(worker.learner.device)


class Volume:
    """A `Remote` whose engine polls for new weights by itself: `load` waits until it reports the version."""

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
    """A folder in shared memory for this process; removes those of processes that have ended."""
    root = Path("/dev/shm")
    for old in root.glob("birl-weights-*"):
        pid = old.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            folder.remove(old)
    return root / f"birl-weights-{os.getpid()}"
