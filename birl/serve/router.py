"""Many engines as one: every request is answered once, by an engine whose weights are proven, as long as there is one.

    generate -> pick (least loaded; a session stays) -> attempt -> joined with what was there -> answer
                  ^                                       | failed, gone, or cut short: again, elsewhere
    a watch per engine: look every `interval`, bring it up to date, start it again

Load is counted in requests. A step of an engine costs about the same for each of its running requests, so that is what
they compete for; how long one still takes nobody knows, as `max_tokens` is a bound that most answers do not reach.
"""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.digests import whole
from birl.serve.member import Member, Row, State, check_held, check_versions
from birl.serve.remote import Remote
from birl.serve.wire import Info
from birl.types import Completion, Held, SamplingParams, Stop, Update

SESSIONS = 65_536  # that are remembered
STRIKES = 2  # looks in a row that fail before an engine is down


@dataclass(slots=True, eq=False)
class Asked:
    """One request on its way. `part` is what engines that cut it short have answered so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    session: str
    cut: "asyncio.Future[None]"  # done: give back what there is, now
    part: Completion = field(default=Completion(tokens=(), logprobs=(), versions=(), stop=Stop.ABORT))
    aborted: bool = False  # the router was asked to
    failures: list[str] = field(default_factory=list)
    avoid: set[Member] = field(default_factory=set)  # where it failed
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def rest(self, engine: str) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and parameters for what is missing. birl's engines take the part as `forced`, so that each later place
        keeps its random number; others get it as prompt, and another seed: the same would draw the same numbers."""
        done = self.part.tokens
        if not done:
            return self.prompt, self.params
        if engine == "birl":
            return self.prompt, replace(self.params, forced=done + self.params.forced[len(done) :])
        left, forced = self.params.max_tokens - len(done), self.params.forced[len(done) :]
        seed = ((self.params.seed or 0) * 0x9E3779B1 + len(done)) % 2**31
        return self.prompt + done, replace(self.params, max_tokens=left, forced=forced, seed=seed)

    def join(self, engine: str, found: Completion) -> Completion:
        """The part with its own log-probs and versions, then what is new. Raises `EngineDown` where the engine did not go
        on from the part."""
        n = len(self.part.tokens)
        skip = n if engine == "birl" else 0
        if skip and found.tokens[:n] != self.part.tokens[: len(found.tokens)]:
            raise EngineDown("it did not begin with the tokens that were given")
        return Completion(
            tokens=self.part.tokens + found.tokens[skip:],
            logprobs=self.part.logprobs + found.logprobs[skip:],
            versions=self.part.versions + found.versions[skip:],
            stop=found.stop,
        )


class Router:
    """Implements `birl.types.Engine`, and what a learner needs besides: `load`, `pause`, `resume`, `abort`.

    The engines are taken to hold `version` at the start, or `update`, which those that do not hold it are given. A
    request may take `timeout` [s] in all and `attempt_timeout` on one engine, and fail `retries` times before it is given
    up. An engine is looked at every `interval` and has `poll_timeout` to answer, `load_timeout` for new weights.

    `prove(remote)` raises `WeightsFailed` where an engine that cannot tell a digest computes something else than it
    should. `restart(remote)` is called for an engine that does not answer, and gives the one to speak to from now on:
    the same one where its process still lives. `on_event(name, **fields)` hears of every change: engine_ready,
    engine_stale, engine_down, engine_draining (address, was, version, error), retry (address, session, error).

    Example: router = Router([Client("http://127.0.0.1:8000"), Client("http://127.0.0.1:8001")])
             await router.start()
             await router.generate((1, 9, 4), SamplingParams(max_tokens=64), session="episode-7")
    """

    def __init__(
        self,
        remotes: Sequence[Remote],
        *,
        version: int = 0,
        update: Update | None = None,
        timeout: float = 3600.0,
        attempt_timeout: float = 1200.0,
        retries: int = 5,
        interval: float = 2.0,
        poll_timeout: float = 5.0,
        load_timeout: float = 300.0,
        restart_timeout: float = 600.0,
        prove: Callable[[Remote], Awaitable[None]] | None = None,
        restart: Callable[[Remote], Awaitable[Remote]] | None = None,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        if not remotes:
            raise BirlError("A router needs at least one engine.")
        self.members = [Member(remote=remote) for remote in remotes]
        self.update, self.timeout, self.attempt_timeout, self.retries = update, timeout, attempt_timeout, retries
        self.interval, self.poll_timeout, self.load_timeout = interval, poll_timeout, load_timeout
        self.restart_timeout, self.prove, self.restart = restart_timeout, prove, restart
        self.on_event: Callable[..., None] = on_event or (lambda name, **fields: None)
        self.paused = self.closed = False
        self._version = self._arriving = update.version if update else version
        self._digest = whole(update.digests) if update and update.digests else ""  # empty: what the first one says
        self._open: set[Asked] = set()
        self._sessions: OrderedDict[str, Member] = OrderedDict()
        self._changed = asyncio.Event()
        self._commands = 0  # pauses and resumes so far: a look that one of them overtook says nothing
        self._loading = asyncio.Lock()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def version(self) -> int:
        return self._version

    def table(self) -> list[Row]:
        return [member.line() for member in self.members]

    async def start(self, timeout: float = 60.0) -> None:
        """Returns when every engine is ready. Raises `EngineDown` that lists them where one is not in time."""
        self._watch_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while any(m.state is not State.READY for m in self.members):
                    await self._changed.wait()
        if any(m.state is not State.READY for m in self.members):
            raise EngineDown(f"Not every engine was ready within {timeout:g} s: {self.describe()}")

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """Answered by one engine, or by several one after the other. Raises `EngineDown` that lists the engines when its
        time or its retries are over, and `BirlError` where the request itself is wrong."""
        self._watch_all()
        if params.seed is None:  # the same for every attempt: a new draw would favour answers that are soon over
            params = replace(params, seed=secrets.randbits(31))
        asked = Asked(prompt_ids, params, session, asyncio.get_running_loop().create_future())
        self._open.add(asked)
        try:
            async with asyncio.timeout(self.timeout):
                return await self._answer(asked)
        except TimeoutError as error:
            raise EngineDown(self._obituary(asked, f"was not answered within {self.timeout:g} s")) from error
        finally:
            self._open.discard(asked)
            asked.over.set()

    async def load(self, update: Update) -> Held:
        """Give new weights to every engine that answers; those that do not take them are stale from then on. The longest
        of their times, and the sum of what they read. Raises the first `WeightsFailed` where none takes them; then
        everything is as before. What is being answered goes on."""
        self._watch_all()
        async with self._loading:
            if update.version < self._version:
                raise WeightsFailed("stale", f"The engines have version {self._version}, and were given an older one.")
            chosen = await self._answering()
            if not chosen:
                message = f"Version {update.version} of the weights: no engine answers. {self.describe()}"
                raise WeightsFailed("unreachable", message)
            self._arriving = update.version
            try:
                found = await asyncio.gather(*(self._give(m, update) for m in chosen), return_exceptions=True)
            finally:
                self._settle(update)
            held = [x for x in found if isinstance(x, Held)]
            if strange := [x for x in found if isinstance(x, BaseException) and not isinstance(x, WeightsFailed)]:
                raise strange[0]
            if not held:
                raise next(x for x in found if isinstance(x, WeightsFailed))
            seconds, digest = max(h.seconds for h in held), next((h.digest for h in held if h.digest), "")
            return Held(version=update.version, digest=digest, seconds=seconds, bytes=sum(h.bytes for h in held))

    async def pause(self, abort: bool = False) -> None:
        """What is being answered is kept and goes on at `resume`, or ends with what it has; what is asked from now on
        waits here. Deadlines go on."""
        self.paused = True
        if abort:
            await self.abort()
        await self._everywhere("pause", lambda m: m.remote.pause(abort), held=True)

    async def resume(self) -> None:
        await self._everywhere("resume", lambda m: m.remote.resume(), held=False)
        self.paused = False
        self._notify()

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        """End the requests of these sessions, or all, with what they have; says how many."""
        chosen = [a for a in self._open if sessions is None or a.session in sessions]
        for asked in chosen:
            asked.aborted = True
        self._notify()
        busy = [m for m in self.members if m.in_flight]
        if chosen and busy:
            await self._everywhere("abort", lambda m: m.remote.abort(sessions), among=busy)
        for asked in chosen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.poll_timeout):
                    await asked.over.wait()
            if not asked.cut.done():
                asked.cut.set_result(None)
        return len(chosen)

    async def close(self) -> None:
        """Whoever waits gets `EngineDown`. The engines go on; their connections are closed."""
        self.closed = True
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for member in self.members:
            self._become(member, State.DOWN, "the router was closed")
        self._notify()
        await asyncio.gather(*(m.remote.close() for m in self.members))

    def describe(self) -> str:
        """Every engine in a line, for messages."""
        return "; ".join(
            f"{m.remote.address} is {m.state} since {time.strftime('%H:%M:%S', time.localtime(m.since))}"
            f"{f' ({m.error})' if m.error else ''}"
            for m in self.members
        )

    def _obituary(self, asked: Asked, what: str) -> str:
        tried = f" Failed: {'; '.join(asked.failures[-3:])}." if asked.failures else ""
        return f"A request{f' of session {asked.session!r}' if asked.session else ''} {what}.{tried} {self.describe()}"

    async def _answer(self, asked: Asked) -> Completion:
        while True:
            member = await self._pick(asked)
            if member is None:
                return asked.part
            before = len(asked.part.tokens)
            try:
                asked.part = await self._attempt(member, asked)
                if asked.part.stop is not Stop.ABORT or asked.aborted:
                    return asked.part
                member.poke.set()  # somebody else has paused it, or aborted this
                if len(asked.part.tokens) > before:
                    continue
                raise EngineDown("it aborted the request, which nobody had asked for")
            except EngineDown as error:
                self._failed(member, asked, error)

    def _failed(self, member: Member, asked: Asked, error: EngineDown) -> None:
        """Whether it is tried again."""
        member.failed(error)
        if error.retry_after:
            return
        asked.avoid.add(member)
        asked.failures.append(f"{member.remote.address}: {error}")
        if len(asked.failures) > self.retries:
            raise EngineDown(self._obituary(asked, f"failed {len(asked.failures)} times")) from error
        self.on_event("retry", address=member.remote.address, session=asked.session, error=str(error))

    async def _pick(self, asked: Asked) -> Member | None:
        """Wait for an engine. None: the request is to end."""
        while not asked.aborted:
            if self.closed:
                raise EngineDown("the router was closed")
            if not self.paused and (member := self._choose(asked)):
                return member
            now = asyncio.get_running_loop().time()
            resting = [m.rest_until - now for m in self.members if m.state is State.READY and m.rest_until > now]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(min(resting), 0.001) if resting else None):
                    await self._changed.wait()
        return None

    def _choose(self, asked: Asked) -> Member | None:
        now = asyncio.get_running_loop().time()
        free = [m for m in self.members if m.free(now)]
        if not free:
            return None
        known = self._sessions.get(asked.session)
        if known is None or known not in free or known in asked.avoid:
            known = min(free, key=lambda m: (m in asked.avoid, m.in_flight, m.sent))
        if asked.session:
            self._sessions[asked.session] = known
            self._sessions.move_to_end(asked.session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return known

    async def _attempt(self, member: Member, asked: Asked) -> Completion:
        """The answer so far, with what this engine adds to it."""
        prompt, params = asked.rest(member.engine)
        lowest, gone, engine = member.version, member.gone, member.engine
        assert gone is not None
        member.in_flight += 1
        member.sent += 1
        task = asyncio.ensure_future(member.remote.generate(prompt, params, asked.session))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # looked at, even where nobody waits any more
        try:
            ends = {task, gone, asked.cut}
            await asyncio.wait(ends, timeout=self.attempt_timeout, return_when=asyncio.FIRST_COMPLETED)
            if asked.cut.done() and not task.done():
                return asked.part
            if gone.done() or not task.done():
                late = f"session {asked.session!r} had no answer within {self.attempt_timeout:g} s"
                raise EngineDown(member.error if gone.done() else late)
            found = asked.join(engine, task.result())
            await self._admit(member, gone, task.result(), lowest)
            member.served += 1
            member.row = 0
            return found
        finally:
            member.in_flight -= 1
            task.cancel()

    async def _admit(self, member: Member, gone: "asyncio.Future[None]", found: Completion, lowest: int) -> None:
        """Only tokens of weights that were given and are proven. Where a load is not over yet, its end is waited for."""
        try:
            check_versions(found, lowest, max(self._arriving, member.version))
        except EngineDown as error:
            member.proven = False
            self._become(member, State.STALE, str(error))
            member.poke.set()
            raise
        if max(found.versions, default=-1) > member.version:
            async with member.lock:
                pass
        if gone.done() or max(found.versions, default=-1) > member.version:
            raise EngineDown(f"its weights were in doubt when it had answered: {member.error}")

    async def _answering(self) -> list[Member]:
        """Those that are not down; where all are, wait for one, as long as a load may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.load_timeout):
                while all(m.state is State.DOWN for m in self.members):
                    await self._changed.wait()
        return [m for m in self.members if m.state is not State.DOWN]

    async def _give(self, member: Member, update: Update) -> Held:
        """Load and prove. Raises `WeightsFailed`; the engine gets no request then until it has the newest."""
        try:
            async with asyncio.timeout(self.load_timeout), member.lock:
                return await self._load(member, update)
        except (EngineDown, TimeoutError) as error:
            why = str(error) or f"it was not loaded within {self.load_timeout:g} s"
            failed = WeightsFailed("unreachable", f"Version {update.version} of the weights: {why}")
        except WeightsFailed as error:
            failed = error
        self._unloaded(member, failed)
        raise failed

    async def _load(self, member: Member, update: Update) -> Held:
        held = await member.remote.load(update)
        if not check_held(held, update):
            if self.prove is None:
                raise WeightsFailed(
                    "mismatch", f"{member.remote.address} can not tell a digest, and there is no `prove` for it."
                )
            await self.prove(member.remote)
        member.holds(update.version, held.digest)
        return held

    def _unloaded(self, member: Member, error: WeightsFailed) -> None:
        member.loads_failed += 1
        member.load_after = asyncio.get_running_loop().time() + min(self.interval * 2**member.loads_failed, 60.0)
        member.error = str(error)
        if error.cause == "unreachable":
            member.proven = False
            self._become(member, State.DOWN, str(error))
        member.poke.set()

    def _settle(self, update: Update) -> None:
        """After a load: the new version counts as soon as one engine has it."""
        if any(m.proven and m.version == update.version for m in self.members):
            self._version, self.update = update.version, update
            self._digest = whole(update.digests) if update.digests else ""
            for member in self.members:
                if not (member.proven and member.version == self._version) and member.state is not State.DOWN:
                    self._become(member, State.STALE, member.error or "it did not get the new weights")
                member.poke.set()
        self._arriving = self._version

    def _watch_all(self) -> None:
        if self.closed:
            raise EngineDown("the router was closed")
        if not self._watches:
            self._watches = [asyncio.create_task(self._watch(m)) for m in self.members]

    async def _watch(self, member: Member) -> None:
        """Look, again and again. What goes wrong in here is told as the engine's error, and the watch goes on."""
        while True:
            member.poke.clear()
            try:
                again = await self._look(member)
            except Exception as error:
                self._become(member, State.DOWN, f"{type(error).__name__}: {error}")
                again = False
            if not again:
                wait = min(self.interval, 0.1) if 0 < member.strikes < STRIKES else self.interval
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await member.poke.wait()

    async def _look(self, member: Member) -> bool:
        """One look, and what follows from it. Says whether to look again at once."""
        commands = self._commands
        async with member.lock:
            try:
                async with asyncio.timeout(self.poll_timeout):
                    info = await member.remote.info()
            except (EngineDown, TimeoutError) as error:
                member.strikes += 1
                if member.strikes >= STRIKES:
                    why = str(error) or f"it did not say how it is within {self.poll_timeout:g} s"
                    self._become(member, State.DOWN, why)
                info = None
            if info is not None:
                if commands != self._commands:
                    return True
                self._judge(member, info)
        if member.state is State.DOWN and self.restart is not None and member.strikes >= STRIKES:
            return await self._restarted(member)
        return info is not None and await self._mend(member)

    def _judge(self, member: Member, info: Info) -> None:
        fresh, why = member.pid == 0, member.seen(info)
        if not member.proven and self._as_it_is(info, fresh):
            member.holds(info.version, info.digest)
            self._digest = self._digest or info.digest
        if info.asleep:
            self._become(member, State.DRAINING, "it sleeps")
        elif not member.proven or member.version not in (self._version, self._arriving):
            told = member.error if member.state is State.STALE else f"it has version {info.version} of the weights"
            self._become(member, State.STALE, why or told)
        elif info.paused and not self.paused:
            self._become(member, State.DRAINING, "it is paused")
        else:
            self._become(member, State.READY)

    def _as_it_is(self, info: Info, fresh: bool) -> bool:
        """Whether it can be taken without a load: at the start, with the weights that the others have."""
        if info.asleep or info.version != self._version:
            return False
        if self.update is None:
            return info.digest in ("", self._digest or info.digest)
        return fresh and bool(self._digest) and info.digest == self._digest

    async def _mend(self, member: Member) -> bool:
        if member.state is State.DRAINING and member.held and not self.paused:
            await member.remote.resume()  # it did not hear the first one
            member.held = False
            return True
        late = asyncio.get_running_loop().time() >= member.load_after
        if member.state is State.STALE and self.update is not None and late and not self._loading.locked():
            with contextlib.suppress(WeightsFailed):  # told by its state, and tried again later
                await self._give(member, self.update)
                return True
        return False

    async def _restarted(self, member: Member) -> bool:
        assert self.restart is not None
        try:
            async with asyncio.timeout(self.restart_timeout):
                remote = await self.restart(member.remote)
        except (BirlError, EngineDown, TimeoutError) as error:
            self._become(member, State.DOWN, f"it could not be started again: {error or type(error).__name__}")
            return False
        old, member.remote = member.remote, remote
        if old is not remote:
            await old.close()
        return old is not remote

    async def _everywhere(
        self,
        what: str,
        call: Callable[[Member], Awaitable[Any]],
        *,
        held: bool | None = None,
        among: list[Member] | None = None,
    ) -> None:
        """On every engine whose answers count; one that does not do it in time is down."""

        async def one(member: Member) -> None:
            try:
                async with asyncio.timeout(self.poll_timeout):
                    await call(member)
                member.held = member.held if held is None else held
            except (EngineDown, TimeoutError) as error:
                why = str(error) or f"no answer within {self.poll_timeout:g} s"
                self._become(member, State.DOWN, f"{what}: {why}")
            member.poke.set()

        self._commands += 1
        counts = [m for m in among or self.members if m.state in (State.READY, State.DRAINING)]
        await asyncio.gather(*(one(m) for m in counts))
        self._commands += 1

    def _become(self, member: Member, state: State, error: str = "") -> None:
        was = member.state
        if member.become(state, error):
            self.on_event(
                f"engine_{state}",
                address=member.remote.address,
                was=str(was),
                version=member.version,
                error=member.error if state is not State.READY else "",
            )
        self._notify()

    def _notify(self) -> None:
        told, self._changed = self._changed, asyncio.Event()
        told.set()
