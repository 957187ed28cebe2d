"""Rank 0 is the controller and runs the ordinary program. The other ranks wait for its calls.

    rank 0          crew.call(worker, Worker.update, rows)     broadcasts (Worker.update, rows), then calls it
    the others      crew.follow(worker, compute)               call it with their own worker, and so on until `close`

Every rank has a worker made from the same configuration, so a verb (a function of the worker) does the same everywhere:
it computes this rank's share, and its collectives (`ranks.py`, FSDP) do the rest. Data that only rank 0 has are passed
as arguments: each rank is sent only its share of a `Shared` list (`shared.py`), and all of anything else.

If a rank fails, the others may be waiting for it in a collective. So a rank that fails writes its error to the store of
the rendezvous, and ends; rank 0 watches, and stops with that rank's traceback, not with the follow-up errors of other
ranks.
"""

import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from birl.errors import BirlError
from birl.parallel.ranks import Ranks, Shared
from birl.parallel.shared import Number, hand_out, handed
from birl.spans import done
from birl.waits import waiting

LONG = timedelta(days=365)  # the others may be idle as long as rank 0 samples
GRACE = 5.0  # seconds in which rank 0's own wait may end after a rank failed
WORD = "birl/failed"
W = TypeVar("W")
T = TypeVar("T")
P = ParamSpec("P")
# names of rank 0's spans for these verbs
NAMES = {"gradients": "train", "update": "train", "write": "checkpoint", "measure": "validate"}


class RankGroup:
    """All ranks of a learner; `RankGroup(Ranks())` is a single process, for which `call` is a plain call."""

    def __init__(self, ranks: Ranks, timeout: float = 600.0) -> None:
        """`timeout`: of the barrier at the end of a call [s]."""
        self.ranks, self.timeout = ranks, timedelta(seconds=timeout)
        self.leads = ranks.rank == 0
        self._control: Any = None if ranks.alone else dist.new_group(backend="gloo", timeout=LONG)
        self._store = None if ranks.alone else dist.distributed_c10d._get_default_store()
        self._closed = ranks.alone
        self.ended: Callable[[], str] = lambda: ""  # error of ranks whose processes have ended
        self.killed: Callable[[], str] = lambda: ""  # of one that SIGKILL ended: others raise errors, too
        # called before rank 0 ends, with the error, and whether a rank raised it; else a rank was killed
        self.failed: Callable[[str, bool], None] = lambda word, raised: None
        self._watch = threading.Event()
        self._verbs: list[Callable[[Any], list[Tensor]]] = []  # of `everywhere`
        self._held: dict[int, list[Any]] = {}  # this rank's share of each `Shared` list that rank 0 keeps
        self._sent, self._gone = 0, list[int]()  # number of lists so far, and those that rank 0 has dropped

    def call(self, worker: W, verb: Callable[Concatenate[W, P], T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run `verb(worker, *arguments)` on every rank, each with its own worker; returns rank 0's result. Raises rank
        0's error, or `BirlError` with the traceback of the rank that failed first."""
        if self.ranks.alone:
            return verb(worker, *arguments, **options)
        try:
            self._say((verb, arguments, options))
            result = verb(worker, *arguments, **options)
            self._check()
            return result
        except BaseException as error:
            self._closed = True  # the others are somewhere in the middle; they end with the connection
            if isinstance(error, Exception) and not isinstance(error, BirlError) and (word := self.failure(GRACE)):
                raise BirlError(word + self._flight()) from error
            raise

    def everywhere(self, verb: Callable[[Sequence[T]], list[Tensor]]) -> Callable[[Sequence[T]], list[Tensor]]:
        """(every rank, in the same order) Register a verb. Returns a function for rank 0 that runs it on every rank,
        each with its share of a `Shared` list, and returns rank 0's result."""
        if self.ranks.alone:
            return verb
        self._verbs.append(verb)
        number = len(self._verbs) - 1
        return lambda work: self.call(self, RankGroup.forward, number, work)

    def each(self, compute: Callable[[T], Tensor]) -> Callable[[Sequence[T]], list[Tensor]]:
        """`everywhere` for a function of one item."""
        return self.everywhere(lambda work: self.ranks.collect(work, compute))

    def forward(self, number: int, work: Sequence[Any]) -> list[Tensor]:
        """(every rank) Run its registered verb of that number."""
        return self._verbs[number](work)

    def follow(self, worker: Any, compute: Executor) -> None:
        """Execute rank 0's calls on the compute thread, until it closes the group."""
        me = f"learner rank {self.ranks.rank}"
        while True:
            with waiting(me, "its next call", "rank 0"):
                verb, arguments, options = self._hear()
            if verb is None:
                return
            began = time.perf_counter()
            compute.submit(verb, self if verb is RankGroup.forward else worker, *arguments, **options).result()
            done(NAMES.get(verb.__name__) or verb.__name__, began, process=me, lane="calls")
            with waiting(me, f"the end of {verb.__name__}", "other ranks"):
                self._check()

    def gather(self, value: Any) -> list[Any]:
        """(every rank) Return the values of all ranks, in order."""
        if self.ranks.alone:
            return [value]
        result: list[Any] = [None] * self.ranks.grid.size
        dist.all_gather_object(result, value)
        return result

    def close(self) -> None:
        """(rank 0) End the other ranks' `follow`."""
        if not self._closed:
            self._say((None, (), {}))
        self.abandon()

    def abandon(self) -> None:
        """(rank 0) Close without a message to the others, which may not be listening; they end with its connection."""
        self._closed = True
        self._watch.set()

    def report(self, error: BaseException) -> None:
        """Store the error that ended this rank, for rank 0 to report."""
        if self._store is not None:
            text = str(error) if isinstance(error, BirlError) else "".join(traceback.format_exception(error))
            if self._store.add(WORD, 1) == 1:
                self._store.set(
                    f"{WORD}/text", f"rank {self.ranks.rank} of {self.ranks.grid.size}: {text}{self._flight()}"
                )

    def _flight(self) -> str:
        result = last_collectives()
        return f"\nThe last collectives of rank {self.ranks.rank}, the newest first:\n{result}" if result else ""

    def told(self) -> bool:
        """Whether a rank has stored an error, and not because another was killed."""
        return self._store is not None and not self.killed() and self._store.check([f"{WORD}/text"])

    def failure(self, wait: float = 0.0) -> str:
        """Error of the rank that failed first, else a message about one whose process ended; empty if there is neither
        after `wait` seconds."""
        assert self._store is not None
        until = time.monotonic() + wait
        while True:
            if word := self.killed():
                return word
            if self.told():
                return self._store.get(f"{WORD}/text").decode()
            if time.monotonic() >= until:
                return self.ended()
            time.sleep(0.05)

    def watch(self, act: Callable[[str], None], interval: float = 0.5) -> None:
        """(rank 0) Watch for failed ranks, and call `act` if rank 0 has not noticed one after a while: it is then in a
        collective that will never end."""

        def look() -> None:
            while not self._watch.wait(interval):
                if self.failure():
                    word = self.failure(GRACE)
                    if not self._watch.wait(2 * GRACE):
                        self.failed(word, self.told())
                        act(word + self._flight())
                    return

        threading.Thread(target=look, name="crew", daemon=True).start()

    def _say(self, words: tuple[Any, Sequence[Any], Any]) -> None:
        verb, arguments, options = words
        new: list[Shared[Any]] = []
        for each in arguments:
            if isinstance(each, Shared) and not each.number:
                self._sent = each.number = self._sent + 1
                weakref.finalize(each, self._gone.append, each.number)
                new.append(each)
        told = tuple(Number(a.number) if isinstance(a, Shared) else a for a in arguments)
        gone = [self._gone.pop() for _ in range(len(self._gone))]
        counts = {each.number: len(each) for each in new}
        dist.broadcast_object_list([(verb, told, options, counts, gone)], src=0, group=self._control)
        for each in new:
            hand_out(each, self.ranks, self._control)

    def _hear(self) -> tuple[Any, Sequence[Any], Any]:
        words: list[Any] = [None]
        dist.broadcast_object_list(words, src=0, group=self._control)
        verb, told, options, counts, gone = words[0]
        for number in gone:
            del self._held[number]
        for number, count in counts.items():
            self._held[number] = handed(count, self.ranks, self._control)
        return verb, [self._held[a.value] if isinstance(a, Number) else a for a in told], options

    def _check(self) -> None:
        """Barrier after a call, with a timeout for ranks that failed."""
        dist.monitored_barrier(group=self._control, timeout=self.timeout)


def last_collectives(count: int = 4) -> str:
    """From PyTorch's flight recorder, a line for each of the newest collectives, the newest first; empty if nothing was
    recorded. `torchfrtrace` shows the same of the dumps that PyTorch itself writes for NCCL.

    Example: #812 gloo:all_reduce of [4096] float, not finished (default_pg)
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # NCCL has its own recorder; private, may disappear
        with suppress(AttributeError, RuntimeError):  # after an error of the device, its events raise it again
            entries += json.loads(getattr(c10d, name)()).get("entries", [])
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return "\n".join(f"    {_line(entry)}" for entry in reversed(entries[-count:]))


def _line(entry: dict[str, Any]) -> str:
    sizes = " and ".join(str(size) for size in entry.get("input_sizes", [])[:3]) or "nothing"
    kinds = ", ".join(sorted({str(kind).lower() for kind in entry.get("input_dtypes", [])}))
    done = "" if entry.get("retired") or entry.get("state") == "completed" else ", not finished"
    group = " ".join(str(word) for word in entry.get("process_group", [])[1:])
    name = entry.get("profiling_name", "collective")
    return f"#{entry.get('collective_seq_id', '?')} {name} of {sizes} {kinds}{done} ({group})"


def stop_at_once(report: str) -> None:
    """End the process at once, without saving: other ranks hold parts of the state."""
    print(f"birl: {report}", file=sys.stderr, flush=True)
    os._exit(2)
