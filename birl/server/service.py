"""State of a served engine: which requests it accepts, and their results."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import unquote

from birl.engine.engine import EmbeddedEngine
from birl.engine.request import Place, Request, TopLogprobs
from birl.engines.wire import HEADER
from birl.errors import BirlError, WeightsFailed
from birl.models.digests import whole
from birl.seeds import derive_seed
from birl.server.agent_session import Kept
from birl.server.limits import Gate, Refused, long
from birl.server.metrics import Metrics
from birl.server.request_policy import Terms
from birl.server.staging import Adapters, Membership, Staging
from birl.text.chat import Chat
from birl.text.grammar import Guide
from birl.text.parts import Finder
from birl.types import Completion, Held, SamplingParams, Update

T = TypeVar("T")
CONFLICT = "conflict"
ANSWERS, ANSWER_BYTES = 1000, 64 << 20  # limits of stored answers
#: log-probs, and the top log-probs with the token's own
Scored = tuple[list[float], TopLogprobs]  # of all prompt tokens but the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to sample. `best`: filled with top log-probs, if requested."""

    prompt: tuple[int, ...]
    params: SamplingParams
    session: str = ""
    best: TopLogprobs | None = None

    def places(self, of: slice) -> list[Place]:
        return self.best.places[of] if self.best is not None else []


LIFE = 30.0  # seconds; a router polls its engines every two
GUARDED = (
    *("/generate", "/load", "/stage/{version:int}", "/adapters/{name}", "/join", "/leave"),
    *("/pause", "/resume", "/abort", "/sleep", "/wake"),
)
SHARED = ("/generate",)  # also without a run: they change nothing


@dataclass(slots=True, kw_only=True)
class Owner:
    """The run that owns a server's weights. Two training runs on one server would overwrite each other's, so it belongs
    to the first one, as long as that sends requests. `name` is empty if the server is free."""

    name: str = ""
    left: str = ""  # last run that released it: its earlier requests may arrive later
    heard: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def now(self) -> str:
        """The current owner; it expires after `LIFE` seconds without a request."""
        if self.name and self.clock() - self.heard > LIFE:
            self.name = ""
        return self.name

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Check and record a request. Raises `Refused` if another run owns the server. A free server is given to a run
        that claims it, or sends a request reserved for owners; a run that released it has to claim it again."""
        run, owner = unquote(headers.get(HEADER, "")), self.now()
        if run and run == owner:
            self.heard = self.clock()
        elif (path in GUARDED and (run or path not in SHARED)) or path == "/claim":
            if owner:
                raise Refused(
                    409, f"This server holds the weights of the run {owner}, heard {self.clock() - self.heard:.0f} s "
                    "ago: two runs on one server would train on each other's answers. Start another server, or wait "
                    f"until that run ends (or {LIFE:g} s after it was killed).", "owned",
                )  # fmt: skip
            if run and (path == "/claim" or run != self.left):
                self.name, self.left, self.heard = run, "", self.clock()

    def release(self, headers: Mapping[str, str]) -> None:
        if unquote(headers.get(HEADER, "")) == self.name:
            self.name, self.left = "", self.name


@dataclass(slots=True, kw_only=True)
class Service:
    """The served engine with its settings. `name`: of the model; `vocabulary`: number of valid token ids; `timeout` of
    a request [s], `most_bytes`: its maximum size; `stuck_after`: seconds without progress until it counts as stuck.
    With `seed` above 0, requests without a seed get one derived from it and their number. `vocabulary_digest`: of
    tokens and end tokens; `volume`: folder polled for new weights."""

    engine: EmbeddedEngine
    chat: Chat
    name: str
    vocabulary: int
    dtype: str
    gate: Gate
    metrics: Metrics
    staging: Staging
    adapters: Adapters
    membership: Membership
    timeout: float
    most_bytes: int
    token: str = ""
    seed: int = 0
    stuck_after: float = 60.0
    vocabulary_digest: str = ""
    kept: Kept = field(default_factory=lambda: Kept(most=ANSWERS, most_bytes=ANSWER_BYTES))
    growing: dict[str, tuple[Any, asyncio.Event]] = field(default_factory=dict)  # streamed responses by id, their ends
    volume: str = ""
    owner: Owner = field(default_factory=Owner)
    digest: str = ""
    hollow: bool = False  # awake, but without weights
    asked: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    terms: Terms = field(init=False)
    _reader: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "requests"))
    _long: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "long requests"))
    _control: asyncio.Lock = field(default_factory=asyncio.Lock)
    _progress: tuple[float, ...] = ()
    _moved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.terms = Terms(chat=self.chat, sampling="client", vocabulary=self.vocabulary, context=self.engine.context)

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def finder(self) -> Finder:
        """Loader of requests' images, with the allowed hosts."""
        return Finder(hosts=self.chat.pictures.bounds.hosts if self.chat.pictures else ())

    @property
    def end_ids(self) -> frozenset[int]:
        return self.engine.end_ids

    def seeded(self, params: SamplingParams, n: int = 1) -> list[SamplingParams]:
        """Parameters of n answers to one prompt: the first has the seed itself, the others derived ones."""
        self.asked += 1
        seed = params.seed
        if seed is None and self.seed:
            seed = derive_seed(self.seed, self.asked)
        if seed is None:
            return [params] * n
        return [replace(params, seed=derive_seed(seed, i) if i else seed) for i in range(n)]

    async def read(self, parse: Callable[[], T], headers: Mapping[str, str] | None = None) -> T:
        """Parse and render a request outside of the event loop. With the `headers` of a long one it only delays other
        long ones."""
        reader = self._long if headers is not None and long(headers) else self._reader
        return await asyncio.get_running_loop().run_in_executor(reader, parse)

    async def generate(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        session: str = "",
        watch: Callable[[Request], None] | None = None,
        *,
        best: TopLogprobs | None = None,
        grammar: str = "",
    ) -> Completion:
        """Sample an answer, whose form the grammar forces if there is one."""
        guide = await self.read(lambda: Guide(self.chat, grammar)) if grammar else None
        adapter = self.adapters.named(params)
        return await self.engine.generate(prompt, params, session, watch, guide=guide, best=best, adapter=adapter)

    async def score(self, ids: tuple[int, ...], count: int = 1) -> Scored:
        """Log-prob of each token but the first, given those before it, and the top log-probs."""
        best = TopLogprobs(count)
        params = SamplingParams(max_tokens=max(len(ids) - 1, 1), ignore_eos=True, forced=ids[1:])
        logprobs: list[float] = []
        if len(ids) > 1:
            logprobs = (await self.engine.generate(ids[:1], params, best=best)).logprobs.tolist()
        return logprobs, best

    async def all(self, asked: Sequence[Job], grammar: str = "") -> list[Completion]:
        """All answers; if one fails, or the caller is cancelled, the others are aborted."""
        each = [self.generate(job.prompt, job.params, best=job.best, grammar=grammar) for job in asked]
        return await self.together(each)

    async def together(self, asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        tasks = [asyncio.ensure_future(one) for one in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def control(self) -> AsyncIterator[None]:
        """Exclusive lock for changes of the engine's state, within `timeout`."""
        try:
            async with asyncio.timeout(self.timeout), self._control:
                yield
        except TimeoutError as error:
            raise Refused(504, f"It took longer than {self.timeout:g} s (request_timeout).", "timeout") from error

    async def load(self, update: Update) -> Held:
        """Load an update; without folder or tensors the staged ones. Raises `WeightsFailed` and `Refused`; the old
        weights are then kept."""
        if self.engine.asleep:
            raise Refused(409, "The engine sleeps and has no room for weights: POST /wake first.", CONFLICT)
        try:
            if not update.folder and not update.tensors:
                update = replace(update, tensors=self.staging.take(update.version))
            held = await self.engine.load(update)
        except WeightsFailed as error:
            self.metrics.load_failures.labels(error.cause).inc()
            raise
        finally:
            if self.staging.version is not None and self.staging.version <= update.version:
                self.staging.drop()
        self.metrics.loads.inc()
        self.digest, self.hollow = held.digest, False
        return held

    async def received(self, update: Update, group: str) -> Update:
        """The update with tensors received from rank 0 of this group; generation continues. Raises `WeightsFailed`."""
        try:
            return replace(update, tensors=await self.membership.receive(group))
        except WeightsFailed as error:
            self.metrics.load_failures.labels(error.cause).inc()
            raise

    async def digests(self) -> dict[str, str]:
        if self.engine.asleep or self.hollow:
            raise Refused(409, f"There are no weights: {self.unready()}.", CONFLICT)
        return await self.engine.digests()

    async def sleep(self) -> None:
        await self.engine.sleep()
        self.staging.drop()
        self.digest, self.hollow = "", True

    async def resume(self) -> None:
        if self.engine.asleep or self.hollow:
            raise Refused(409, f"The engine cannot continue: {self.unready()}.", CONFLICT)
        await self.engine.resume()

    async def start(self) -> None:
        """Compute the digest of the weights before the first request."""
        self.digest = whole(await self.engine.digests())

    def unready(self) -> str:
        """Why no request would be answered now; empty if it would."""
        if self.gate.draining:
            return "the server is shutting down"
        if self.engine.asleep:
            return "it sleeps; POST /wake, then /load, then /resume"
        if self.hollow:
            return "it has no weights since it woke up; POST /load, then /resume"
        if self.engine.paused:
            return "it is paused; POST /resume"
        return ""

    def stuck(self) -> str:
        """Why the engine seems stuck; empty if it makes progress, or is idle."""
        now, counters = time.monotonic(), self.engine.counters
        progress = (counters.tokens, counters.scored, counters.prefilled, counters.finished, counters.seconds)
        idle = self.engine.paused or self._control.locked() or not self.engine.scheduler.busy
        if idle or progress != self._progress:
            self._progress, self._moved = progress, now
        if now - self._moved <= self.stuck_after:
            return ""
        running = len(self.engine.scheduler.running)
        return f"{running} sequences are running and nothing was computed for {now - self._moved:.0f} s"

    async def watch(self) -> None:
        """Record the progress until cancelled, for `stuck`."""
        while True:
            self.stuck()
            self.staging.sweep()
            await asyncio.sleep(min(1.0, self.stuck_after / 4))

    def check_prompt(self, ids: tuple[int, ...], mute: bool = False) -> None:
        """Raise `BirlError` if a prompt leaves no room for an answer; `mute`: no answer is sampled."""
        if not ids:
            raise BirlError("The prompt is empty: there is nothing to predict the first token from.")
        if len(ids) >= self.engine.context + mute:
            raise BirlError(
                f"The prompt has {len(ids)} tokens and leaves no room for an answer: the context has "
                f"{self.engine.context}."
            )
