"""An engine as a member of a router: its state, its weights, and its load; and a request, which continues on another
engine if its answer was cut short."""

import asyncio
import heapq
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count

import numpy as np

from birl.engines.wire import Info, Remote
from birl.errors import EngineDown, WeightsFailed
from birl.models.digests import whole
from birl.samples import Support
from birl.types import Completion, Held, SamplingParams, Stop, Update


class State(StrEnum):
    READY = "ready"  # has the router's weights, proven
    STALE = "stale"  # answers, but has other or unknown weights: gets no request
    DOWN = "down"  # does not answer
    DRAINING = "draining"  # answers, but takes no new request: paused, or asleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of `Router.table` for one engine. `in_flight`, `served` and `failures` count requests, `since` is the time
    of the last change of state [s, Unix], `error` the last failure, also of an engine that has recovered.

    Example: Row(address="http://127.0.0.1:8000", state="ready", version=12, in_flight=31, served=4096, failures=0,
                 error="", since=1760000000.0)
    """

    address: str
    state: str
    version: int
    in_flight: int
    served: int
    failures: int
    error: str
    since: float


@dataclass(slots=True, eq=False)
class Member:
    """An engine of a router. `version` and `digest`: last proven weights; only valid if `proven`."""

    remote: Remote
    state: State = State.DOWN
    error: str = ""
    since: float = field(default_factory=time.time)
    version: int = -1
    digest: str = ""
    proven: bool = False
    pid: int = 0  # 0: never answered
    engine: str = ""  # Info.engine
    in_flight: int = 0
    sent: int = 0
    served: int = 0
    failures: int = 0
    strikes: int = 0  # failed polls in a row
    row: int = 0  # failed requests in a row
    suspect: bool = False  # a request failed or was cut short, and the engine has not been polled since
    rest_until: float = 0.0  # no request before this time (event loop's clock),
    load_after: float = 0.0  # nor another attempt to update it
    loads_failed: int = 0  # in a row
    held: bool = False  # paused by the router
    leaving: bool = False  # finishes its open requests, then is removed
    gone: "asyncio.Future[None] | None" = None  # done when its answers stop being valid
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load at a time
    load: "asyncio.Task[Held] | None" = None
    loads: int = 0  # number of loads begun and ended
    poke: asyncio.Event = field(default_factory=asyncio.Event)  # poll now

    def line(self) -> Row:
        return Row(
            address=self.remote.address,
            state=str(self.state),
            version=self.version if self.proven else self.remote.version,
            in_flight=self.in_flight,
            served=self.served,
            failures=self.failures,
            error=self.error,
            since=self.since,
        )

    def free(self, now: float) -> bool:
        return self.state is State.READY and not self.suspect and now >= self.rest_until

    def become(self, state: State, error: str = "") -> bool:
        """Set the state; returns whether it changed. Callers of an engine that becomes down or stale stop waiting: an
        answer from doubtful weights is not used."""
        counts = state in (State.READY, State.DRAINING)
        if counts and (self.gone is None or self.gone.done()):
            self.gone = asyncio.get_running_loop().create_future()
        elif not counts and self.gone is not None and not self.gone.done():
            self.gone.set_result(None)
        if state is State.DOWN and self.load is not None:
            self.load.cancel()
        self.error = error or self.error
        if state is self.state:
            return False
        self.state, self.since = state, time.time()
        return True

    def failed(self, error: EngineDown, counts: bool = True) -> None:
        """Record a failed request: no other one before a poll, with exponential back-off. Not `counts`: the state
        already has the reason."""
        now = asyncio.get_running_loop().time()
        if error.retry_after:
            self.rest_until = max(self.rest_until, now + error.retry_after)
            return
        self.failures += 1
        if not counts or now < self.rest_until:  # many fail together: counted once
            return
        self.row, self.suspect, self.error = self.row + 1, True, str(error)
        self.rest_until = max(self.rest_until, now + min(0.05 * 2 ** min(self.row, 10), 30.0))
        self.poke.set()

    def seen(self, info: Info) -> str:
        """Take in the info of a poll. Returns why the proven weights are no longer valid, or an empty text."""
        why = ""
        if self.pid and info.pid != self.pid:
            why = f"it was started again (process {info.pid}, before {self.pid})"
        elif self.proven and info.version != self.version:
            why = f"it has version {info.version} of the weights, but was given {self.version}"
        elif self.proven and self.digest and info.digest and info.digest != self.digest:
            why = f"its version {info.version} has changed: the digest is now {info.digest}"
        elif self.proven and info.asleep:
            why = "it is asleep and has freed its weights"
        self.digest = "" if why else self.digest
        self.pid, self.engine, self.suspect = info.pid, info.engine, False
        self.proven = self.proven and not why
        return why

    def holds(self, version: int, digest: str) -> None:
        self.proven, self.version, self.digest = True, version, digest
        self.loads_failed, self.load_after = 0, 0.0
        self.row, self.rest_until = 0, 0.0


NOTHING = Completion.of((), (), (), Stop.ABORT)


@dataclass(slots=True, eq=False)
class Asked:
    """One open request. `part`: partial answer of engines that cut it short."""

    prompt: tuple[int, ...]
    params: SamplingParams
    session: str
    cut: "asyncio.Future[None]"  # done: return the partial answer now
    part: Completion = NOTHING
    aborted: bool = False  # aborted through the router
    failures: list[str] = field(default_factory=list)
    avoid: set[Member] = field(default_factory=set)  # engines on which it failed
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def rest(self, engine: str) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and parameters for the rest of the answer. birl's engines get the part as `forced`, so that each later
        position keeps its random number; others get it as prompt, with another seed: the same would repeat the numbers.
        They miss a stop string that begins in a prompt: a request with stop strings starts over with its seed."""
        if engine != "birl" and self.params.stop:
            self.part = NOTHING
        done = self.part.ids
        if not done:
            return self.prompt, self.params
        if engine == "birl":
            return self.prompt, replace(self.params, forced=done + self.params.forced[len(done) :])
        left, forced = self.params.max_tokens - len(done), self.params.forced[len(done) :]
        seed = ((self.params.seed or 0) * 0x9E3779B1 + len(done)) % 2**31
        return self.prompt + done, replace(self.params, max_tokens=left, forced=forced, seed=seed)

    def join(self, engine: str, completion: Completion) -> Completion:
        """The part with its own log-probs and versions, then the new tokens. Raises `EngineDown` if the engine did not
        continue from the part."""
        n = len(self.part.tokens)
        skip = n if engine == "birl" else 0
        if skip and not np.array_equal(completion.tokens[:n], self.part.tokens[: len(completion.tokens)]):
            raise EngineDown("it did not begin with the given tokens")
        new = completion.support and completion.support.part(slice(skip, None))
        full = n + len(completion.tokens[skip:]) >= self.params.max_tokens
        return Completion(
            tokens=np.append(self.part.tokens, completion.tokens[skip:]),
            logprobs=np.append(self.part.logprobs, completion.logprobs[skip:]),
            versions=np.append(self.part.versions, completion.versions[skip:]),
            stop=Stop.LENGTH if full and completion.stop is Stop.ABORT else completion.stop,
            support=Support.joined([(self.part.support, n), (new, len(completion.tokens) - skip)]),
            cached=self.part.cached if n else completion.cached,
        )


def check_held(held: Held, update: Update) -> bool:
    """Whether the digest proves that the engine has the update; False if there is none to compare. Raises
    `WeightsFailed`."""
    if held.version != update.version:
        raise WeightsFailed("stale", f"Version {update.version} was sent, but it reports version {held.version}.")
    if not held.digest or not update.digests:
        return False
    if held.digest != whole(update.digests):
        raise WeightsFailed("mismatch", f"Version {update.version} was loaded, but its weights differ from those sent.")
    return True


def check_versions(completion: Completion, lowest: int, highest: int) -> None:
    """Raise `EngineDown` if tokens come from weights that the router has not sent."""
    versions = completion.versions
    wrong = versions[(versions < lowest) | (versions > highest)]
    if len(wrong):
        raise EngineDown(f"it answered with version {wrong.min()} of the weights, but has {lowest}")


SLACK = 1024  # outdated heap entries that may stay, beside three for each engine


class Loads:
    """A heap of engines by (requests in flight, requests sent): call `put` after each change of these, and when an
    engine becomes ready. Outdated entries stay until they reach the top, or until there are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Member]] = []
        self._number = count()
        self._members: set[Member] = set()

    def put(self, member: Member) -> None:
        self._members.add(member)
        heapq.heappush(self._heap, (member.in_flight, member.sent, next(self._number), member))
        if len(self._heap) > 3 * len(self._members) + SLACK:
            self._members = {m for m in self._members if m.state is State.READY}  # others return when they are ready
            self._heap = [(m.in_flight, m.sent, next(self._number), m) for m in self._members]
            heapq.heapify(self._heap)

    def least(self, now: float, avoid: Collection[Member] = ()) -> Member | None:
        """The least loaded free engine, if possible none of `avoid`; None if none is free."""
        aside: list[tuple[int, int, int, Member]] = []
        result: Member | None = None
        while self._heap and (result is None or result in avoid):
            entry = heapq.heappop(self._heap)
            in_flight, sent, _, member = entry
            if (in_flight, sent) != (member.in_flight, member.sent) or member.state is not State.READY:
                continue
            aside.append(entry)
            if member.free(now) and (result is None or member not in avoid):
                result = member
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return result
