"""The service: sessions, runs, samplers and futures of all tenants, over one base."""

import asyncio
import json
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from birl.errors import BirlError
from birl.learner.low_rank_run import LowRankConfig
from birl.server.limits import Refused
from birl.server.tinker import requests
from birl.server.tinker.checkpoints import Checkpoints, Sampler
from birl.server.tinker.futures import PROTO, Answer, Promise, Promises
from birl.server.tinker.runs import Run, Runs
from birl.server.tinker.sampling import Sampling
from birl.server.tinker.store import Record, Store, refusal
from birl.server.tinker.tenants import Quota, Session, Sessions, Tenant, Tenants, make_room
from birl.server.tinker.work import Work

Owned = TypeVar("Owned", Session, Run, Sampler)
QUIET = 120.0  # seconds without a heartbeat (clients send one every ten) after which pending samples are cancelled
CLONES = 1_000_000_000  # request numbers of a sampling session's copy start at a multiple of it


@dataclass(slots=True, kw_only=True)
class TinkerService:
    """State of the service. `names`: accepted names of the model, its own first. `most_bytes` of a request."""

    names: tuple[str, ...]
    tenants: Tenants
    quota: Quota
    store: Store
    sessions: Sessions
    promises: Promises
    runs: Runs
    work: Work
    checkpoints: Checkpoints
    sampling: Sampling
    most_rank: int
    most_bytes: int
    idle: float
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))  # signs download links,
    clock: Callable[[], float] = time.monotonic  # whose expiry uses a monotonic clock: setting it back revives none
    ending: bool = False

    def restore(self) -> int:
        """Restore the state on disk; returns the number of requests left, whose execution starts now."""
        self.sessions.restore()
        self.checkpoints.restore()
        left = self.runs.restore()
        for run in left:
            self.work.start(run)
        return sum(len(r.waiting) for r in left)

    def open_session(self, tenant: Tenant, data: Mapping[str, Any]) -> str:
        id = secrets.token_hex(16)
        given = data.get("tags") or []
        if not isinstance(given, list):
            raise BirlError("tags: must be a list of texts.")
        tags = [t[:200] for t in given if isinstance(t, str)][:100]
        about = requests.metadata(data) | ({"tags": ",".join(tags)} if tags else {})
        session = Session(owner=tenant.name, metadata=about, name=requests.words(data, "display_name"))
        self.sessions.add(id, session, self.quota.sessions)
        self.store.note(tenant.name, "create_session", session=id)
        return id

    def session(self, id: str, tenant: Tenant) -> Session:
        """A session. Raises `Refused` (404) if the tenant has none of this id, also if another has."""
        result = owned(self.sessions.by_id.get(id), tenant, f"There is no session {id[:80]!r}.")
        result.heard = time.monotonic()
        return result

    def opened(self, id: str, tenant: Tenant) -> None:
        """Raise `Refused` if a session is missing or finished, so that no run or sampler can be made in it."""
        if self.session(id, tenant).finished:
            raise Refused(400, f"The session {id[:80]!r} is finished: begin a new one.", "user")

    def run(self, id: str, tenant: Tenant) -> Run:
        return owned(self.runs.by_id.get(id), tenant, f"There is no training run {id[:80]!r}.")

    def sampler(self, id: str, tenant: Tenant) -> Sampler:
        why = f"There is no sampling session {id[:80]!r}, or no longer."
        return owned(self.checkpoints.samplers.get(id), tenant, why)

    async def create(self, tenant: Tenant, data: Mapping[str, Any]) -> Promise:
        """Create a run with a new adapter. An error is the future's answer."""
        id = self._run_id(tenant, data)
        async with tenant.reading:
            return await self._create(id, tenant, data)

    async def _create(self, id: str, tenant: Tenant, data: Mapping[str, Any]) -> Promise:
        if id in self.runs.by_id:
            return self.runs.promise(self.runs.by_id[id], 0)
        try:
            self.known(requests.words(data, "base_model"))
            lora, seed = data.get("lora_config"), secrets.randbits(31)
            if lora is None:
                raise BirlError("lora_config is missing: full fine-tuning is not offered by this server, only LoRA is.")
            if not isinstance(lora, Mapping):
                raise BirlError("lora_config: must be an object with a rank.")
            _optimizer(data)
            config = LowRankConfig(
                rank=requests.whole(lora, "rank", 32, 1, self.most_rank),
                seed=requests.whole(lora, "seed", seed, 0, 2**63 - 1),
                attention=requests.flag(lora, "train_attn", True),
                mlp=requests.flag(lora, "train_mlp", True),
                unembed=requests.flag(lora, "train_unembed", True),
            )
            self._room_for_run(tenant)
            base, about = requests.words(data, "base_model"), requests.metadata(data)
            adapter = await asyncio.to_thread(self.runs.adapter, id, config)  # other requests are handled meanwhile
            self.runs.create(id, tenant.name, base, config, about, adapter)
        except BirlError as error:
            return self.promises.failed(f"{id}#0", tenant.name, error)
        self.store.note(tenant.name, "create_model", run=id, rank=config.rank)
        return self.runs.by_id[id].promises[0]

    def _run_id(self, tenant: Tenant, data: Mapping[str, Any]) -> str:
        session = requests.words(data, "session_id")
        self.opened(session, tenant)
        return f"{session}:train:{requests.whole(data, 'model_seq_id', 0, 0, 999_999)}"

    def _room_for_run(self, tenant: Tenant) -> None:
        """Remove unloaded runs, and those of ended sessions, except their checkpoints. Raises `BirlError`."""
        own = sorted(self.runs.of(tenant.name), key=lambda r: r.used)
        if len(own) < self.quota.runs:
            return
        for run in own:
            if run.deleted and run.working is None:
                self.runs.forget(run.id)
        advice = "close a session that you no longer need (ServiceClient.close)"
        live = [r.id for r in own if not r.deleted]
        make_room("training runs", live, self.quota.runs, self._over, self.runs.forget, advice)

    def _over(self, run: str) -> bool:
        return self.sessions.ended(run) and self.runs.by_id[run].working is None

    def known(self, name: str) -> None:
        if name not in self.names:
            raise BirlError(f"base_model={name}: this server has {', '.join(self.names)}.")

    def submit(self, tenant: Tenant, run: Run, record: Record, tokens: int = 0) -> Promise:
        """Accept a request of a run: it is on disk when this returns, and executed in its turn."""
        if self.ending:
            raise Refused(503, "The server is shutting down; retry after its restart.", "overloaded", 1)
        if record.seq in run.promises:
            return run.promises[record.seq]
        tokens = max(tokens, len(record.body) // requests.BYTES)  # bodies wait in memory
        if tokens > self.quota.tokens:  # rejected in its turn: a missing number would block the run
            reason = (
                f"The request has {tokens} tokens, counting its {len(record.body)} bytes as one for {requests.BYTES} "
                f"at least, and a tenant may have {self.quota.tokens} at once."
            )
            record, tokens = refusal(record.seq, reason), 0
        with ExitStack() as room:
            room.enter_context(tenant.holding(self.quota, tokens))
            promise = self.runs.accept(run, record)
            task = asyncio.get_running_loop().create_task(self._answered(promise, room.pop_all()))
        TASKS.add(task)
        task.add_done_callback(TASKS.discard)
        self.work.start(run)
        return promise

    async def _answered(self, promise: Promise, room: ExitStack) -> None:
        with room:
            await promise.done.wait()

    def load(self, tenant: Tenant, data: Mapping[str, Any]) -> tuple[Run, Promise]:
        """Load a checkpoint into an existing run, or into a new one."""
        stranger = bool(data.get("weights_access_token"))  # the key of another tenant: not journaled
        body = json.dumps({key: value for key, value in data.items() if key != "weights_access_token"}).encode()
        if data.get("session_id") is None:
            run = self.run(requests.words(data, "model_id"), tenant)
            seq = requests.whole(data, "seq_id", run.newest + 1, 1, 2**31)
            if stranger:
                return run, self.submit(tenant, run, refusal(seq, NO_TOKENS))
            return run, self.submit(tenant, run, Record(seq, "load_weights", body))
        id = self._run_id(tenant, data)
        if id not in self.runs.by_id:
            try:
                if stranger:
                    raise BirlError(NO_TOKENS)
                _optimizer(data)
                result = self.checkpoints.readable(requests.words(data, "path"), tenant.name)
                self.known(requests.words(data, "base_model") or str(result.info["base"]))
                self._room_for_run(tenant)
            except BirlError as error:
                return Run(id=id, owner=tenant.name, base=""), self.promises.failed(f"{id}#0", tenant.name, error)
            base = requests.words(data, "base_model") or str(result.info["base"])
            self.runs.create(id, tenant.name, base, None, requests.metadata(data))
            self.store.note(tenant.name, "load_weights", run=id, path=result.path)
        run = self.runs.by_id[id]
        return run, self.submit(tenant, run, Record(0, "load_weights", body))

    async def sample(
        self, tenant: Tenant, sampler: Sampler, seq: int, data: Mapping[str, Any]
    ) -> tuple[Promise, list[str]]:
        """The future of an answer, and ids of its sequences."""
        id = f"{sampler.id}#{seq}"
        count = data.get("num_samples", 1)
        ids = [f"{id}.{i}" for i in range(count if type(count) is int and 0 < count <= requests.MOST_SAMPLES else 0)]
        if (promise := self.promises.find(id, tenant.name)) is not None:
            return promise, ids
        if self.ending:
            raise Refused(503, "The server is shutting down; retry after its restart.", "overloaded", 1)
        try:
            async with tenant.reading:
                if (promise := self.promises.find(id, tenant.name)) is not None:  # sent again meanwhile
                    return promise, ids
                asked = await asyncio.to_thread(requests.sample, data, self.work.reader)
            with tenant.holding(self.quota, asked.tokens):
                pass
        except BirlError as error:
            return self.promises.failed(id, tenant.name, error), ids
        promise = self.promises.make(id, tenant.name, brief=True)
        promise.task = asyncio.create_task(self._sample(tenant, sampler, promise, asked, seq))
        return promise, ids

    async def _sample(
        self, tenant: Tenant, sampler: Sampler, promise: Promise, asked: requests.Sample, seq: int
    ) -> None:
        try:
            with tenant.holding(self.quota, asked.tokens):
                here = sampler.path is None or sampler.path in self.checkpoints.kept
                read = self.checkpoints.weights
                weights = read(sampler) if here else await asyncio.to_thread(read, sampler)
                number = zlib.crc32(promise.id.encode()) << 20 | seq % 2**20  # the same if it is sent again
                body = await self.sampling.answer(tenant, asked, weights, number)
                promise.settle(Answer(body, PROTO))
        except asyncio.CancelledError:
            promise.settle(Answer.failure("The request was cancelled."))
        except (BirlError, Refused) as error:
            promise.settle(Answer.failure(str(error)))
        except Exception as error:
            promise.settle(Answer.failure(f"{type(error).__name__}: {error}", "server"))

    async def tidy(self) -> None:
        """Periodically unload idle runs, and end requests that no client waits for, until cancelled."""
        while True:
            await asyncio.sleep(min(self.idle, 30.0))
            for run in list(self.runs.by_id.values()):
                if run.adapter is not None and run.working is None and time.time() - run.used > self.idle:
                    with suppress(OSError):  # the disk is full: it stays in memory
                        await asyncio.to_thread(self.runs.unload, run)
            self.abandon()
            self.work.skip_missing()
            self.promises.sweep()

    def abandon(self) -> None:
        """Cancel the samples of clients that are gone."""
        for id, session in self.sessions.by_id.items():
            if time.monotonic() > session.heard + QUIET:
                self.promises.abandon(id, session.heard + QUIET)

    async def close(self, grace: float) -> None:
        """Accept nothing more, finish running requests within `grace` seconds, and write snapshots. Unfinished ones are
        executed again at the next start."""
        self.ending = self.work.ending = True
        for promise in list(self.promises.by_id.values()):
            if promise.task is not None:
                promise.task.cancel()
        working = [run.working for run in self.runs.by_id.values() if run.working is not None]
        if working:
            await asyncio.wait(working, timeout=grace)
        for run in self.runs.by_id.values():
            if run.working is None and not run.deleted:
                await asyncio.to_thread(self.runs.try_to_save, run)
        await self.sampling.engine.close()


TASKS: set["asyncio.Task[None]"] = set()  # keeps references, as asyncio does not


NO_TOKENS = "weights_access_token is not offered by this server: let the other tenant publish the checkpoint."


def owned(result: Owned | None, tenant: Tenant, why: str) -> Owned:
    """Return the tenant's item. Raises `Refused` (404) if there is none, or it is another tenant's."""
    if result is None or result.owner != tenant.name:
        raise Refused(404, why, "user")
    return result


def _optimizer(data: Mapping[str, Any]) -> None:
    optimizer = data.get("optimizer_config") or {}
    if not isinstance(optimizer, Mapping) or optimizer.get("type", "adamw") != "adamw":
        raise BirlError("Only the optimizer adamw is offered.")
