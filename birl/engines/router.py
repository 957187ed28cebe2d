"""Router over several engines: every request is answered once, by an engine with proven weights, if there is one.

    generate -> pick -> attempt -> joined with the partial answer -> answer
                  ^        | failed, lost, or cut short: retry elsewhere
    a watch per engine: poll every `interval`, update its weights, restart it

A session stays with its engine. Otherwise a request goes to an engine that has its prompt's prefix in the cache, if
that is about as loaded as the least loaded one, else to the latter. Load is the number of requests: a step costs about
the same for each running request. The remaining length of answers is unknown, as most do not reach `max_tokens`.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from birl.engines.fleet import Fleet
from birl.engines.member import Asked, Loads, Member, Row, State, check_versions
from birl.engines.prefixes import Prefixes, Sessions
from birl.engines.wire import Remote
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.spans import answered, engine_name
from birl.types import Completion, Held, SamplingParams, Stop, Update

UNEVEN = 0.25  # an engine with a cached prefix may have this share more requests, and one, than the least loaded engine


class Router:
    """Implements `birl.types.Engine`, and the learner's calls `load`, `pause`, `resume`, `abort`.

    The engines should have `version` at the start, or `update`, which is sent to those that do not have it. A request
    may take `timeout` [s] in all and `attempt_timeout` on one engine, and is retried `retries` times. An engine is
    polled every `interval` and has `poll_timeout` to answer, `load_timeout` for new weights.

    `prove(remote)` raises `WeightsFailed` if an engine that reports no digest computes other log-probs than it should.
    `restart(remote)` is called for an engine that does not answer, and returns its new remote: the same one if its
    process still lives. `on_event(name, **fields)` is called for every change: engine_ready, engine_stale, engine_down,
    engine_draining (address, was, version, error), retry (address, session, error).

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
        self.timeout, self.attempt_timeout, self.poll_timeout = timeout, attempt_timeout, poll_timeout
        self.retries = retries
        self.fleet = Fleet(
            remotes,
            version=version,
            update=update,
            interval=interval,
            poll_timeout=poll_timeout,
            load_timeout=load_timeout,
            restart_timeout=restart_timeout,
            prove=prove,
            restart=restart,
            on_event=on_event,
        )
        self._loads = Loads()
        self.fleet.on_ready = self._loads.put
        self._open: set[Asked] = set()
        self._sessions = Sessions[Member]()
        self._prefixes = Prefixes[Member]()

    @property
    def version(self) -> int:
        return self.fleet.version

    @property
    def refused(self) -> list[WeightsFailed]:
        """Why engines that answer did not take the last update, although others did. A lost engine comes back and is
        updated; one that answers and has other weights may point to a mistake."""
        return self.fleet.refused

    def table(self) -> list[Row]:
        return [member.line() for member in self.fleet.members]

    def describe(self) -> str:
        """State of every engine, since when, and why."""
        return self.fleet.describe()

    async def start(self, timeout: float = 60.0) -> None:
        """Start watching; returns when every engine is ready. Raises `EngineDown` with their states after the
        timeout."""
        self.fleet.watch()
        if not await self.fleet.wait(lambda: all(m.state is State.READY for m in self.fleet.members), timeout):
            raise EngineDown(f"Not every engine was ready within {timeout:g} s: {self.fleet.describe()}")

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        """Sample an answer on one engine, or on several in sequence. Raises `EngineDown` with the engines' states after
        the timeout or the last retry, and `BirlError` if the request itself is wrong."""
        self.fleet.watch()
        if params.seed is None:  # the same for every attempt: new seeds would favour short answers
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
        """Send new weights to every engine that answers; those that do not take them become stale. Returns the longest
        time and the total bytes. Raises the first `WeightsFailed` if none takes them; the version is then the old one.
        Open requests continue."""
        self.fleet.watch()
        self._prefixes.forget()
        return await self.fleet.load(update)

    async def settle(self, timeout: float) -> None:
        """Poll every engine now; returns when all proven engines that answer are ready, at least one. Raises
        `EngineDown` after the timeout."""
        for member in self.fleet.members:
            member.poke.set()

        def done() -> bool:
            there = [m for m in self.fleet.members if m.state is not State.DOWN and not m.leaving]
            proven = [m for m in there if m.proven and m.version == self.version]
            return bool(proven) and all(m.state is State.READY for m in proven)

        if not await self.fleet.wait(done, timeout):
            raise EngineDown(f"No engine was ready within {timeout:g} s: {self.fleet.describe()}")

    async def pause(self, abort: bool = False) -> None:
        """Pause generation: open requests are kept and continue after `resume`, or end with the tokens they have
        (`abort`); new ones wait here. Their timeouts continue."""
        self.fleet.paused = True
        if abort:
            await self.abort()

        async def pause(member: Member) -> None:
            member.held = True
            await member.remote.pause(abort)

        await self.fleet.command("pause", pause, self._counting())

    async def resume(self) -> None:
        """Resume the engines. One that is not reached is resumed when it is back."""

        async def resume(member: Member) -> None:
            await member.remote.resume()
            member.held = False

        await self.fleet.command("resume", resume, [m for m in self._counting() if m.held])
        self.fleet.paused = False
        self.fleet.notify()

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        """End the requests of these sessions, or all, with the tokens they have; returns their number."""
        chosen = [a for a in self._open if sessions is None or a.session in sessions]
        for asked in chosen:
            asked.aborted = True
        self.fleet.notify()
        if chosen:
            busy = [m for m in self._counting() if m.in_flight]
            await self.fleet.command("abort", lambda m: m.remote.abort(sessions), busy)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.poll_timeout):
                    for asked in chosen:
                        await asked.over.wait()
        for asked in chosen:  # a request that reached the engine after the abort
            if not asked.cut.done():
                asked.cut.set_result(None)
        return len(chosen)

    async def close(self) -> None:
        """Close the connections: waiting callers get `EngineDown`. The engines keep running."""
        await self.fleet.close()

    def _counting(self) -> list[Member]:
        return [m for m in self.fleet.members if m.state in (State.READY, State.DRAINING)]

    def _obituary(self, asked: Asked, what: str) -> str:
        tried = f" Failed: {'; '.join(asked.failures[-3:])}." if asked.failures else ""
        whose = f" of session {asked.session!r}" if asked.session else ""
        return f"A request{whose} {what}.{tried} {self.fleet.describe()}"

    async def _answer(self, asked: Asked) -> Completion:
        while True:
            member = await self._pick(asked)
            if member is None:
                return asked.part
            before = len(asked.part.tokens)
            try:
                asked.part = await self._attempt(member, asked)
            except EngineDown as error:
                self._failed(member, asked, error)
                continue
            if asked.part.stop is not Stop.ABORT or asked.aborted:
                return asked.part
            member.suspect = True  # paused or aborted by another client: poll it before the next request
            member.poke.set()
            if len(asked.part.tokens) <= before:
                error = EngineDown("it aborted the request on its own")
                member.failed(error)
                self._failed(member, asked, error)

    def _failed(self, member: Member, asked: Asked, error: EngineDown) -> None:
        """Record a failed attempt. Raises `EngineDown` after the last retry."""
        if self.fleet.closed:
            raise EngineDown("the router was closed") from error
        if error.retry_after:
            return
        asked.avoid.add(member)
        asked.failures.append(f"{member.remote.address}: {error}")
        if len(asked.failures) > self.retries:
            raise EngineDown(self._obituary(asked, f"failed {len(asked.failures)} times")) from error
        self.fleet.on_event("retry", address=member.remote.address, session=asked.session, error=str(error))

    async def _pick(self, asked: Asked) -> Member | None:
        """Wait for an engine. None if the request is aborted."""
        while not asked.aborted:
            if self.fleet.closed:
                raise EngineDown("the router was closed")
            if not self.fleet.paused and (member := self._choose(asked)):
                return member
            now = asyncio.get_running_loop().time()
            resting = [m.rest_until - now for m in self.fleet.members if m.state is State.READY and m.rest_until > now]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(min(resting), 0.001) if resting else None):
                    await self.fleet.changed.wait()
        return None

    def _choose(self, asked: Asked) -> Member | None:
        now = asyncio.get_running_loop().time()
        known = self._sessions.get(asked.session)
        if known is None or not known.free(now) or known in asked.avoid:
            known = self._loads.least(now, asked.avoid)
            if known is not None and known not in asked.avoid:
                known = self._with_beginning(asked, now, known.in_flight * (1 + UNEVEN) + 1) or known
        if known is not None:
            self._sessions.keep(asked.session, known)
        return known

    def _with_beginning(self, asked: Asked, now: float, most: float) -> Member | None:
        """An engine with a cached prefix of at least half of the prompt, and at most `most` requests in flight."""

        def cost(member: Member) -> int | None:
            free = member.free(now) and member.in_flight <= most and member not in asked.avoid
            return member.in_flight if free else None

        return self._prefixes.best(asked.prompt, cost)

    def _computes(self, ids: tuple[int, ...], member: Member) -> None:
        if len(self.fleet.members) > 1:  # not needed for a single engine
            self._prefixes.add(ids, member)

    async def _attempt(self, member: Member, asked: Asked) -> Completion:
        """One attempt on an engine: the partial answer, extended by its answer."""
        prompt, params = asked.rest(member.engine)
        lowest, gone, engine = member.version, member.gone, member.engine
        assert gone is not None
        member.in_flight += 1
        member.sent += 1
        self._loads.put(member)
        self._computes(prompt, member)
        began = time.perf_counter()
        task = asyncio.ensure_future(member.remote.generate(prompt, params, asked.session))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # retrieves the exception, if nobody waits
        try:
            ends = {task, gone, asked.cut}
            await asyncio.wait(ends, timeout=self.attempt_timeout, return_when=asyncio.FIRST_COMPLETED)
            if asked.cut.done() and not task.done():
                return asked.part
            if gone.done():
                raise EngineDown(member.error)
            if not task.done():
                raise EngineDown(f"session {asked.session!r} had no answer within {self.attempt_timeout:g} s")
            answered(task.result(), began, asked.session, engine_name(member.remote.address))
            result = asked.join(engine, task.result())
            self._computes((*asked.prompt, *result.ids), member)
            await self._admit(member, gone, task.result(), lowest)
            member.served += 1
            member.row = 0
            return result
        except EngineDown as error:
            member.failed(error, counts=not gone.done())
            raise
        finally:
            member.in_flight -= 1
            self._loads.put(member)
            task.cancel()

    async def _admit(self, member: Member, gone: "asyncio.Future[None]", completion: Completion, lowest: int) -> None:
        """Check that all tokens are of sent and proven weights; during a load, waits for its end."""
        try:
            check_versions(completion, lowest, max(self.fleet.arriving, member.version))
        except EngineDown as error:
            member.proven = False
            self.fleet.become(member, State.STALE, str(error))
            member.poke.set()
            raise
        if completion.versions.max(initial=-1) > member.version:
            async with member.lock:
                pass
        if gone.done() or completion.versions.max(initial=-1) > member.version:
            raise EngineDown(f"its weights were not verified after its answer: {member.error}")
