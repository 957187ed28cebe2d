"""Runs: adapters in training, each with its requests in order, on disk and in memory.

A run is its snapshot and the requests after it. A request is journaled when it is accepted and executed in the order of
its number, once: one that is sent again has the same number. After a kill the requests after the snapshot are executed
again, from the same state to the same bits.
"""

import asyncio
import logging
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from birl.errors import BirlError
from birl.learner.low_rank_run import LowRankConfig, LowRankRun, SharedBase, parts_bytes
from birl.regular import read_json
from birl.server.tinker.futures import Answer, Promise, Promises
from birl.server.tinker.store import KILLED, Record, Store, left_out

MOST_AHEAD = 1000  # maximum lead of a request's number over the next one to execute
ANSWERS_KEPT = 64  # number of a run's newest answers that are kept for a restart
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """A training run. `done`: number of the last executed request. `made`: new, not from a checkpoint. `broken`: why
    the gradient is incomplete. `killed`: requests in whose pass a rank was killed."""

    id: str
    owner: str
    base: str
    config: LowRankConfig | None = None  # None until loaded from a checkpoint
    metadata: dict[str, str] = field(default_factory=dict)
    made: bool = True
    adapter: LowRankRun | None = None
    done: int = -1
    snapshot: int = -1  # last request in the snapshot
    snapshot_time: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.time)
    broken: str = ""
    waiting: dict[int, Record] = field(default_factory=dict)  # accepted requests, each with its promise
    promises: dict[int, Promise] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    working: "asyncio.Task[None] | None" = None
    deleted: bool = False
    saving: threading.Lock = field(default_factory=threading.Lock)  # lock of snapshots, which a thread writes

    @property
    def next(self) -> Record | None:
        return self.waiting.get(self.done + 1)

    @property
    def newest(self) -> int:
        """Number of the last request accepted."""
        return max(self.promises, default=0)

    def about(self) -> dict[str, Any]:
        """Contents of `run.json`."""
        result = {"owner": self.owner, "base": self.base, "metadata": self.metadata}
        return result | {"config": self.config and asdict(self.config), "made": self.made, "deleted": self.deleted}


@dataclass(slots=True)
class Runs:
    """All runs. `memory`: maximum bytes of adapters in training."""

    store: Store
    shared: SharedBase
    promises: Promises
    memory: int
    by_id: dict[str, Run] = field(default_factory=dict)

    def restore(self) -> list[Run]:
        """Restore the runs on disk, without their tensors; returns those with requests left to execute."""
        for id, file in self.store.files("runs"):
            with left_out(file.parent):
                self.by_id[id] = self._restored(id, read_json(file))
        return [run for run in self.by_id.values() if run.next is not None]

    def _restored(self, id: str, about: dict[str, Any]) -> Run:
        config = LowRankConfig(**about["config"]) if about["config"] else None
        run = Run(id=id, owner=about["owner"], base=about["base"], config=config, metadata=about["metadata"])
        run.made, run.deleted = about["made"], about["deleted"]
        done, records, answers = self.store.snapshot_of(id), self.store.journal(id), self.store.answers(id)
        run.done = run.snapshot = done
        for seq, answer in answers.items():
            self.promise(run, seq).settle(answer)
        if run.made and run.done < 0:
            run.done = 0
            self.promise(run, 0).settle(Answer.of(model_id=id, type="create_model"))
        for record in records:
            if record.kind == KILLED:
                run.killed.add(record.seq)
            elif record.seq > run.done:
                self._enqueue(run, record)
        return run

    def promise(self, run: Run, seq: int) -> Promise:
        result = self.promises.make(f"{run.id}#{seq}", run.owner)
        run.promises[seq] = result
        return result

    def adapter(self, id: str, config: LowRankConfig) -> LowRankRun:
        """A new adapter; large ones take seconds. Raises `BirlError` if there is no memory for it."""
        self.make_room(self.size_of(config), id)
        return self.shared.run(config)

    def size_of(self, config: LowRankConfig) -> int:
        """Bytes of an adapter in training."""
        return parts_bytes(config, self.shared.chosen(config), self.shared.dtype)

    def create(self, id: str, owner: str, base: str, config: LowRankConfig | None, metadata: dict[str, str],
               adapter: LowRankRun | None = None) -> Run:  # fmt: skip
        """Create a run, also on disk, or return the existing one. `adapter`: of `config`."""
        if id not in self.by_id:
            if (self.store.run(id) / "run.json").exists():
                raise BirlError(f"{id} is on this server's disk, and cannot be read: begin a new session.")
            run = Run(id=id, owner=owner, base=base, config=config, metadata=metadata, made=config is not None)
            if config is not None:
                run.adapter, run.done = adapter, 0
            self.store.make_run(id, run.about())
            self.by_id[id] = run
            if config is not None:
                self.promise(run, 0).settle(Answer.of(model_id=id, type="create_model"))
        return self.by_id[id]

    def _enqueue(self, run: Run, record: Record) -> Promise:
        run.waiting[record.seq] = record
        return self.promise(run, record.seq)

    def accept(self, run: Run, record: Record) -> Promise:
        """Journal a request. Raises `BirlError` for an invalid number."""
        if not run.done < record.seq <= run.done + MOST_AHEAD:
            raise BirlError(
                f"seq_id={record.seq}: the next request of {run.id} is {run.done + 1}; answers of earlier ones are no "
                f"longer kept, and a later one may be at most {MOST_AHEAD} ahead of it."
            )
        self.store.append(run.id, record)
        run.used = time.time()
        return self._enqueue(run, record)

    async def loaded(self, run: Run) -> LowRankRun:
        """`load` in a thread if needed, for a working run, which is not unloaded."""
        here = None if run.saving.locked() else run.adapter
        return here or await asyncio.to_thread(self.load, run)

    def load(self, run: Run) -> LowRankRun:
        """The run's adapter, read from disk if needed. Raises `BirlError` if there is no memory for it."""
        with run.saving:  # it is removed while it is being unloaded
            if run.adapter is not None:
                return run.adapter
            if run.config is None:
                raise BirlError(f"{run.id} was not made: loading its checkpoint failed.")
            adapter = self.adapter(run.id, run.config)
            if (snapshot := self.store.load_snapshot(run.id)) is not None:
                tensors, about = snapshot
                adapter.load(tensors, int(about["steps"]))
                adapter.load_gradients(tensors)
                run.broken = about.get("broken", "")
            run.adapter = adapter
            return adapter

    def make_room(self, size: int, wanted: str) -> None:
        """Unload the least recently used runs to disk. Raises `BirlError` if that is not enough."""
        idle = [r for r in list(self.by_id.values()) if r.adapter and r.working is None and r.id != wanted]
        idle.sort(key=lambda r: r.used)
        while self.held() + size > self.memory and idle:
            self.unload(idle.pop(0))
        if self.held() + size > self.memory:
            raise BirlError(
                f"An adapter of this rank takes {size / 2**20:.0f} MiB in training; {self.held() / 2**20:.0f} of the "
                f"{self.memory / 2**20:.0f} MiB for adapters are in use. Take a lower rank, or wait for other runs."
            )

    def held(self) -> int:
        return sum(self.size_of(r.config) for r in list(self.by_id.values()) if r.adapter and r.config)

    def _save(self, run: Run, last: Answer | None = None) -> None:
        """Write a snapshot of all executed requests. `last`: answer of the last one, if not settled yet."""
        if run.adapter is None or run.deleted or run.snapshot == run.done:
            return
        promises = list(run.promises.items())  # requests are accepted meanwhile
        fresh = {s: p.answer for s, p in promises if run.snapshot < s <= run.done and p.answer}
        fresh |= {} if last is None else {run.done: last}
        about = {"steps": run.adapter.steps, "broken": run.broken}
        self.store.snapshot(run.id, run.adapter.state() | run.adapter.gradients(), run.done, about, fresh)
        run.snapshot, run.snapshot_time = run.done, time.monotonic()
        known = self.promises.by_id
        old = [
            seq for seq, p in promises
            if seq <= run.done - ANSWERS_KEPT and (p.fetched is not None or p.id not in known)
        ]  # fmt: skip
        self.store.forget_answers(run.id, old)
        for seq in old:
            self.promises.by_id.pop(run.promises[seq].id, None)
            run.promises.pop(seq)

    def try_to_save(self, run: Run, last: Answer | None = None) -> None:
        """Write a snapshot. If the disk is full the journal has the requests, and the next snapshot may succeed."""
        try:
            with run.saving:
                self._save(run, last)
        except OSError as error:
            log.warning("There is no snapshot of %s: %s.", run.id, error)

    def unload(self, run: Run) -> None:
        """Move an idle run's adapter to disk. Raises `OSError` if the disk is full; the adapter is then kept."""
        if not run.saving.acquire(blocking=False):
            return
        try:
            if run.working is None:  # a request that arrives now waits in `load`
                self._save(run)
                run.adapter = None
        finally:
            run.saving.release()

    def of(self, owner: str) -> list[Run]:
        return [run for run in self.by_id.values() if run.owner == owner]

    def forget(self, id: str) -> None:
        """Remove a run's state and waiting requests; without checkpoints the whole run."""
        run = self.by_id[id]
        with run.saving:
            run.deleted, run.adapter = True, None
            for promise in run.promises.values():
                promise.settle(Answer.failure(f"{id} is forgotten: its session has ended."))
                promise.brief = True
            run.promises.clear()
            run.waiting.clear()
            if any(self.store.checkpoints(id)):
                self.store.make_run(id, run.about())
                self.store.remove_state(id)
            else:
                del self.by_id[id]
                self.store.delete(id)
