"""The engines of a router and their weights: a watch task for each polls it, updates it, and restarts it. An engine
without proven weights is never ready."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from birl.engines.member import Member, State, check_held
from birl.engines.wire import Info, Remote
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.digests import whole
from birl.spans import done, engine_name
from birl.types import Held, Update

STRIKES = 2  # failed polls in a row before an engine counts as down
DRAIN = 0.1  # interval of checks whether a leaving engine has answered everything [s]


class Fleet:
    """Members of a router (see there for parameters). `version`: what they should have; `arriving`: being loaded."""

    def __init__(
        self,
        remotes: Sequence[Remote],
        *,
        version: int,
        update: Update | None,
        interval: float,
        poll_timeout: float,
        load_timeout: float,
        restart_timeout: float,
        prove: Callable[[Remote], Awaitable[None]] | None,
        restart: Callable[[Remote], Awaitable[Remote]] | None,
        on_event: Callable[..., None] | None,
    ) -> None:
        self.members = [Member(remote=remote) for remote in remotes]
        self.update, self.interval, self.poll_timeout = update, interval, poll_timeout
        self.load_timeout, self.restart_timeout = load_timeout, restart_timeout
        self.prove, self.restart = prove, restart
        self.on_event: Callable[..., None] = on_event or (lambda name, **fields: None)
        self.on_ready: Callable[[Member], None] = lambda member: None
        self.expect: Callable[[Mapping[Remote, int], Update], None] | None = (
            None  # called with the engines of a load (and their pids)
        )
        self.paused = self.closed = False
        self.version = self.arriving = update.version if update else version
        self.changed = asyncio.Event()  # replaced after each change
        self._digest = whole(update.digests) if update and update.digests else ""  # empty: the first one reported
        self.refused: list[WeightsFailed] = []  # refusals of the last load, by engines that answer
        self._commands = 0  # number of pauses and resumes so far: a poll that one of them overtook is ignored
        self._loading = asyncio.Lock()
        self._watches: dict[Member, asyncio.Task[None]] = {}

    def watch(self) -> None:
        """Start the watch tasks, once."""
        if self.closed:
            raise EngineDown("the router was closed")
        if not self._watches:
            self._watches = {m: asyncio.create_task(self._watch(m)) for m in self.members}

    def add(self, remote: Remote) -> Member:
        """Add an engine. It gets requests as soon as it has the current weights and has proven them."""
        member = Member(remote=remote)
        self.members.append(member)
        if self._watches and not self.closed:
            self._watches[member] = asyncio.create_task(self._watch(member))
        return member

    async def remove(self, member: Member, why: str) -> None:
        """Remove an engine: it gets no more requests; returns when it has answered its open ones, or is down."""
        member.leaving = True
        if member.state is State.READY:
            self.become(member, State.DRAINING, why)
        while member.in_flight and member.state is not State.DOWN and not self.closed:
            await asyncio.sleep(min(self.interval, DRAIN))
        if self.closed:
            return
        self.members.remove(member)
        watch = self._watches.pop(member, None)
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        member.become(State.DOWN, why)  # no event: this is no failure
        self.notify()
        await member.remote.close()

    async def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until `done()`, evaluated after every change. Returns False after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not done():
                    await self.changed.wait()
        return done()

    async def close(self) -> None:
        self.closed = True
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        for member in self.members:
            member.become(State.DOWN, "the router was closed")  # no event: this is no failure
        self.notify()
        await asyncio.gather(*(m.remote.close() for m in self.members))

    def describe(self) -> str:
        """State of every engine, for messages."""
        lines: list[str] = []
        for m in self.members:
            why = m.error or ("" if m.state is State.READY else "it has not answered yet")
            why = f" ({'last failure: ' * (m.state is State.READY)}{why})" * bool(why)
            since = time.strftime("%H:%M:%S", time.localtime(m.since))
            lines.append(f"{m.remote.address} is {m.state} since {since}{why}")
        return "; ".join(lines)

    def become(self, member: Member, state: State, error: str = "") -> None:
        was = member.state
        if member.become(state, error):
            told = "" if state is State.READY else member.error
            fields = {"address": member.remote.address, "was": str(was), "version": member.version, "error": told}
            self.on_event(f"engine_{state}", **fields)
            if state is State.READY:
                self.on_ready(member)
        self.notify()

    def notify(self) -> None:
        told, self.changed = self.changed, asyncio.Event()
        told.set()

    async def command(self, what: str, call: Callable[[Member], Awaitable[Any]], among: Iterable[Member]) -> None:
        """Call each of these engines; one that does not answer in time counts as down."""

        async def one(member: Member) -> None:
            try:
                async with asyncio.timeout(self.poll_timeout):
                    await call(member)
            except (EngineDown, TimeoutError) as error:
                why = str(error) or f"no answer within {self.poll_timeout:g} s"
                self.become(member, State.DOWN, f"{what}: {why}")
            except BirlError as error:  # it answers, but rejects: the next poll shows its state
                member.error = f"{what}: {error}"
            member.poke.set()

        self._commands += 1
        await asyncio.gather(*(one(m) for m in among))
        self._commands += 1

    async def load(self, update: Update) -> Held:
        """See `Router.load`."""
        async with self._loading:
            if update.version < self.version and not update.anew:
                raise WeightsFailed(
                    "stale", f"The engines have version {self.version}, but were given {update.version}."
                )
            now = asyncio.get_running_loop().time
            deadline, result = now() + self.load_timeout, await self._give_all(update, self.load_timeout)
            while all(gone(x) for x in result) and (left := deadline - now()) > 0:  # a lost engine may come back
                result = await self._give_all(update, left)
        held = [x for x in result if isinstance(x, Held)]
        if strange := [x for x in result if isinstance(x, BaseException) and not isinstance(x, WeightsFailed)]:
            raise strange[0]
        failed = [x for x in result if isinstance(x, WeightsFailed)]
        self.refused = [x for x in failed if x.cause != "unreachable"]
        if not held:
            raise failed[0]
        digest = next((h.digest for h in held if h.digest), "")
        seconds, size = max(h.seconds for h in held), sum(h.bytes for h in held)
        return Held(version=update.version, digest=digest, seconds=seconds, bytes=size)

    async def _give_all(self, update: Update, timeout: float) -> list[Held | BaseException]:
        """Send an update to every engine that answers, as soon as one does."""
        await self.wait(lambda: any(m.state is not State.DOWN for m in self.members), timeout)
        chosen = [m for m in self.members if m.state is not State.DOWN]
        if not chosen:
            message = f"Version {update.version} of the weights: no engine answers. {self.describe()}"
            return [WeightsFailed("unreachable", message)]
        self.arriving = update.version
        if self.expect is not None:  # except those that a lock may delay
            self.expect({m.remote: m.pid for m in chosen if not m.lock.locked()}, update)
        gifts = [asyncio.create_task(self._give(m, update)) for m in chosen]
        try:
            return await asyncio.gather(*gifts, return_exceptions=True)
        finally:
            taken = any(g.done() and not g.cancelled() and g.exception() is None for g in gifts)
            self._settle(update, taken)

    def _settle(self, update: Update, taken: bool) -> None:
        """After a load: the new version is current if one engine took it, even if that engine is lost already."""
        if taken:
            self.version, self.update = update.version, update
            self._digest = whole(update.digests) if update.digests else ""
            for member in self.members:
                if member.state is not State.DOWN and not (member.proven and member.version == self.version):
                    self.become(member, State.STALE, member.error or "it did not get the new weights")
                member.poke.set()
        self.arriving = self.version
        self.notify()

    async def _give(self, member: Member, update: Update) -> Held:
        """Load and prove. Raises `WeightsFailed`; then the engine's weights are unknown until they are checked."""
        try:
            async with asyncio.timeout(self.load_timeout), member.lock:
                member.loads += 1
                member.load = asyncio.create_task(self._load(member, update))
                try:
                    return await member.load
                except asyncio.CancelledError:
                    me = asyncio.current_task()
                    if me is not None and me.cancelling():
                        raise
                    raise EngineDown(member.error) from None  # it went down meanwhile
                finally:
                    member.load = None
                    member.loads += 1
        except (EngineDown, TimeoutError) as error:
            why = str(error) or f"{member.remote.address} had not loaded them within {self.load_timeout:g} s"
            failed = WeightsFailed("unreachable", f"Version {update.version} of the weights: {why}")
        except WeightsFailed as error:
            failed = error
        member.proven = False
        member.loads_failed += 1
        member.load_after = asyncio.get_running_loop().time() + min(self.interval * 2**member.loads_failed, 60.0)
        self.become(member, State.DOWN if failed.cause == "unreachable" else State.STALE, str(failed))
        member.poke.set()
        raise failed

    async def _load(self, member: Member, update: Update) -> Held:
        began = time.perf_counter()
        held = await member.remote.load(update)
        name = engine_name(member.remote.address)
        done("load", began, process=name, lane="weights", version=update.version, paused=held.seconds)
        if not check_held(held, update):
            if self.prove is None:
                raise WeightsFailed("mismatch", f"{member.remote.address} reports no digest, and `prove` is not set.")
            await self.prove(member.remote)
        member.holds(update.version, held.digest)
        return held

    async def _watch(self, member: Member) -> None:
        """Poll an engine forever. An exception in here is reported as the engine's error, and the watch continues."""
        while True:
            member.poke.clear()
            try:
                again = await self._look(member)
            except Exception as error:
                self.become(member, State.DOWN, f"{type(error).__name__}: {error}")
                again = False
            if not again:
                wait = min(self.interval, 0.1) if 0 < member.strikes < STRIKES else self.interval
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await member.poke.wait()

    async def _look(self, member: Member) -> bool:
        """Poll once and act on the result. Returns whether to poll again immediately."""
        commands, loads = self._commands, member.loads
        try:
            async with asyncio.timeout(self.poll_timeout):
                info = await member.remote.info()
        except (EngineDown, TimeoutError) as error:
            member.strikes += 1
            if member.strikes >= STRIKES:
                why = str(error) or f"it did not answer a check within {self.poll_timeout:g} s"
                self.become(member, State.DOWN, why)
            return member.state is State.DOWN and await self._restarted(member)
        member.strikes = 0
        if member.load is not None:  # the answer may be out of date when it arrives
            return False
        if commands != self._commands or loads != member.loads:
            return True
        self._judge(member, info)
        return await self._mend(member, info)

    def _judge(self, member: Member, info: Info) -> None:
        fresh, why = member.pid == 0, member.seen(info)
        if not member.proven and self._as_it_is(member, info, fresh):
            member.holds(info.version, info.digest)
            self._digest = self._digest or info.digest
        if info.asleep:
            self.become(member, State.DRAINING, "it sleeps")
        elif not member.proven or member.version not in (self.version, self.arriving):
            told = member.error if member.state is State.STALE else f"it has version {info.version} of the weights"
            self.become(member, State.STALE, why or told)
        elif member.leaving:
            self.become(member, State.DRAINING)
        elif info.paused and not self.paused:
            self.become(member, State.DRAINING, "it is paused")
        else:
            self.become(member, State.READY)

    def _as_it_is(self, member: Member, info: Info, fresh: bool) -> bool:
        """Whether an engine can be used without a load: at the start if it has the expected weights, and after a failed
        load if its digest shows that it still has the previous ones."""
        if info.asleep or info.version != self.version:
            return False
        if self.update is None and info.digest in ("", self._digest or info.digest):
            return True
        return bool(info.digest) and info.digest == (self._digest if fresh else member.digest)

    async def _mend(self, member: Member, info: Info) -> bool:
        if info.paused and not info.asleep and member.held and not self.paused:
            await member.remote.resume()  # it missed the first one
            member.held = False
            return True
        due = asyncio.get_running_loop().time() >= member.load_after
        update = None if member.leaving or self._loading.locked() else self.update
        if member.state is State.STALE and update is not None and due:
            with contextlib.suppress(WeightsFailed):  # shown in its state, and retried later
                await self._give(member, replace(update, anew=True))  # whatever version it has
                return True
        return False

    async def _restarted(self, member: Member) -> bool:
        """Restart an engine; returns whether it was restarted."""
        if self.restart is None:
            return False
        try:
            async with asyncio.timeout(self.restart_timeout):
                remote = await self.restart(member.remote)
        except (BirlError, EngineDown, TimeoutError) as error:
            why = str(error) or f"it took longer than {self.restart_timeout:g} s"
            self.become(member, State.DOWN, f"it could not be started again: {why}")
            return False
        old, member.remote = member.remote, remote
        if old is not remote:
            await old.close()
        return old is not remote


def gone(error: object) -> bool:
    """Whether the error is that of an engine that does not answer."""
    return isinstance(error, WeightsFailed) and error.cause == "unreachable"
