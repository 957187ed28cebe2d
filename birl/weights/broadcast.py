"""weights.method=nccl: the learner is rank 0 of a group and sends every tensor once, to all engines together.

    Fleet.load -> expect: the engines of the update         round: join, if the group has changed; then
               -> Joined.load of each, and they wait        rank 0 sends | every engine takes, swaps and proves

If an engine is lost during the transfer, the others drop what they have received: the group is closed, and a new one
without that engine starts over. An engine that comes back later gets the same update alone, over HTTP; one of vLLM or
SGLang in a group of its own (`engines/transfer.py`).
"""

import asyncio
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit

from birl.engines.client import Client
from birl.engines.collective import BroadcastGroup, backend
from birl.engines.transfer import Transfer
from birl.engines.wire import Invitation
from birl.errors import BirlError, EngineDown, WeightsFailed, first_line
from birl.hosts import own_address
from birl.models.device import gpu
from birl.types import Held, Update
from birl.weights.live import Live

BLAMELESS = 2  # attempts in a row that fail although every engine is there


class Joined:
    """A `Remote` whose engine receives new weights together with the others. `part`: its end of the group."""

    def __init__(self, remote: Client, broadcast: "Broadcast") -> None:
        self.alone, self._broadcast = remote, broadcast
        self.part: Client | Transfer = getattr(remote, "transfer", remote)

    def __getattr__(self, name: str):
        return getattr(self.alone, name)

    async def load(self, update: Update) -> Held:
        return await self._broadcast.load(self, update)


@dataclass(slots=True, eq=False)
class Round:
    """One update of all engines. `answers`: results that the fleet waits for; a cancelled one means a lost engine."""

    update: Update
    pids: Mapping[Any, int]  # process ids, by Joined
    answers: dict[Any, "asyncio.Future[Held]"]
    absent: set[Any]  # engines for which load has not been called yet
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    source: Live | None = None  # None: the newest weights

    def open(self) -> list[Joined]:
        return [remote for remote, answer in self.answers.items() if not answer.done()]

    def fail(self, remote: Joined, error: Exception) -> None:
        if not self.answers[remote].done():
            self.answers[remote].set_exception(error)

    def here(self, remote: Joined) -> None:
        self.absent.discard(remote)
        if not self.absent:
            self.all_here.set()


class Broadcast:
    """Sends updates to all engines. `timeout` of an attempt [s]; buckets of `bucket_mb` [MiB]. `source`: the learner's
    tensors, unchanged until the update has arrived; each attempt reads them. `group`: class of rank 0."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout: float,
        bucket_mb: float,
        group: type[BroadcastGroup] = BroadcastGroup,
    ) -> None:
        self.timeout, self.bucket_mb, self._kind = timeout, bucket_mb, group
        self.hosts = [urlsplit(address).hostname or "" for address in addresses]
        self.source: Live | None = None
        self.groups = 0  # number of groups made so far
        self._store: Any = None
        self._group: BroadcastGroup | None = None
        self._members: list[tuple[Joined, int]] = []
        self._round: Round | None = None
        self._running: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # one round at a time

    def expect(self, pids: Mapping[Any, int], update: Update) -> None:
        """Announce an update for these engines, given with their process ids; each `load` waits for all of them."""
        if self._running is not None:
            self._running.cancel()
        loop = asyncio.get_running_loop()
        answers = {remote: loop.create_future() for remote in pids}
        self._round = Round(update, pids, answers, set(answers))
        self._running = asyncio.create_task(self._run(self._round)) if answers else None

    async def load(self, remote: Joined, update: Update) -> Held:
        round = self._round
        if round is None or update is not round.update or remote not in round.absent:
            return await (remote.alone.load(update) if remote.part is remote.alone else self._late(remote, update))
        round.here(remote)
        return await round.answers[remote]

    async def _late(self, remote: Joined, update: Update) -> Held:
        answer: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        live = cast(Live, update.tensors)
        live.check()
        round = Round(update, {remote: 0}, {remote: answer}, set(), source=live)
        round.all_here.set()
        await self._run(round)
        return await answer

    def joined(self, remote: Client) -> Joined:
        return Joined(remote, self)

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        if self._group is not None:
            self._group.close()
            self._group.join(1.0)
        self._group = self._store = None

    async def _run(self, round: Round) -> None:
        async with self._turn:
            await self._settled(round)

    async def _settled(self, round: Round) -> None:
        blameless = 0
        try:
            await round.all_here.wait()
            while remotes := round.open():
                why = await self._attempt(round, remotes)
                blameless = blameless + 1 if len(round.open()) == len(remotes) else 0
                if blameless == BLAMELESS:
                    for remote in round.open():
                        round.fail(remote, why or WeightsFailed("unreachable", "The broadcast failed."))
        except Exception as error:
            for remote in round.open():
                round.fail(remote, error)
        finally:
            for answer in round.answers.values():
                answer.cancel()

    async def _attempt(self, round: Round, remotes: list[Joined]) -> WeightsFailed | None:
        """Set the answers that are certain after one attempt. Returns what stopped the others, or None."""
        members = [(remote, round.pids[remote]) for remote in remotes]
        source = round.source or self._source()
        if self._group is None or self._group.closed.is_set() or members != self._members:
            ranks = await self._ranks(round, remotes)
            if round.open() != remotes:
                return None
            self._leave()
            invitation = await self._invitation(sum(ranks), source)
            self._group, self._members = self._kind(invitation, source.device), members
            first = [1 + sum(ranks[:i]) for i in range(len(ranks))]
            calls = {r: r.part.join(replace(invitation, rank=i)) for r, i in zip(remotes, first, strict=True)}
            why = await self._together(round, self._group.open(), calls)
            if why is not None or round.open() != remotes:
                return why
        group, update = self._group, round.update
        calls = {remote: remote.part.receive(update, group.name) for remote in remotes}
        return await self._together(round, group.send(source), calls)

    async def _ranks(self, round: Round, remotes: Sequence[Joined]) -> list[int]:
        """Number of ranks of each engine; 0 if it does not answer, which counts as lost."""
        asked = await asyncio.gather(*(remote.part.ranks() for remote in remotes), return_exceptions=True)
        for remote, result in zip(remotes, asked, strict=True):
            if isinstance(result, EngineDown):
                round.fail(remote, WeightsFailed("unreachable", f"Version {round.update.version}: {result}"))
            elif isinstance(result, Exception):
                round.fail(remote, result)
        return [result if isinstance(result, int) else 0 for result in asked]

    async def _together(
        self, round: Round, own: Coroutine[Any, Any, None], calls: Mapping[Joined, Coroutine[Any, Any, Held | None]]
    ) -> WeightsFailed | None:
        """Run rank 0's part and those of the engines concurrently. When one fails, the others leave the group."""
        tasks = {remote: asyncio.create_task(call) for remote, call in calls.items()}
        mine = asyncio.create_task(own)
        for remote, task in tasks.items():  # the fleet has noticed that this engine is lost and no longer waits for it
            round.answers[remote].add_done_callback(lambda _, task=task: task.cancel())
        pending, broken = {mine, *tasks.values()}, False
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if not broken and any(task.cancelled() or task.exception() is not None for task in done):
                    broken = True
                    self._leave()
                    await asyncio.gather(*(_let_go(r) for r, task in tasks.items() if task in pending))
        finally:
            for task in pending:
                task.cancel()
            if pending:
                self._leave()
        why = None if mine.cancelled() else mine.exception()
        for remote, task in tasks.items():
            error = None if task.cancelled() else task.exception()
            if isinstance(error, EngineDown):
                round.fail(remote, WeightsFailed("unreachable", f"Version {round.update.version}: {error}"))
            elif isinstance(error, WeightsFailed) and error.cause == "unreachable":
                why = error if why is None or getattr(why, "cause", "") == "unreachable" else why
            elif isinstance(error, Exception):
                round.fail(remote, error)
            elif why is not None and not self._kind.called_back:
                pass  # it received something that is not the weights
            elif not task.cancelled() and isinstance(held := task.result(), Held) and remote in round.open():
                round.answers[remote].set_result(held)
        if isinstance(why, Exception) and not isinstance(why, WeightsFailed):
            raise why
        return why if isinstance(why, WeightsFailed) else None

    async def _invitation(self, ranks: int, source: Live) -> Invitation:
        """Invitation for rank 0. The store listens on loopback if all engines are on this machine."""
        try:
            result = [await asyncio.to_thread(own_address, host) for host in self.hosts]
            outside = [address for address in result if address not in ("127.0.0.1", "::1")]
            address = (outside or result)[0]
            self._store, place = await asyncio.to_thread(self._kind.host, address, self.timeout)
        except (OSError, RuntimeError) as error:
            reason = first_line(error)
            raise BirlError(
                f"weights.method=nccl: engines could not reach this process: {reason}. Use weights.method=reload."
            ) from error
        self.groups += 1
        device, shapes = source.device, source.shapes
        return Invitation(
            store=place,
            group=f"{self.groups}-{secrets.token_hex(8)}",
            rank=0,
            size=ranks + 1,
            backend=backend(device),
            timeout=self.timeout,
            bucket_mb=self.bucket_mb,
            tensors=tuple((n, s, str(dtype).removeprefix("torch.")) for n, (s, dtype) in sorted(shapes.items())),
            gpu=gpu(device),
        )

    def _source(self) -> Live:
        if self.source is None:
            raise BirlError("weights.method=nccl: nothing was given to the broadcast to send.")
        return self.source

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()


async def _let_go(remote: Joined) -> None:
    """Let an engine leave the group: it would wait for missing ranks. A lost one is noticed by its other request."""
    try:
        await remote.part.leave()
    except (EngineDown, BirlError):
        return
