"""The processes of the ranks: those that rank 0 starts on this machine, which end with it, or those of a launcher
(torchrun, srun, ...: RANK and WORLD_SIZE are set), each of which finds its place by itself.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from birl.allocator import keep_memory
from birl.errors import BirlError
from birl.models.device import visible
from birl.parallel.crew import RankGroup, stop_at_once
from birl.parallel.machine import compute_thread
from birl.parallel.ranks import STORE, Grid, join
from birl.process import ProcessGroup, free_port

SHOWN = 4000  # bytes of a rank's log that an error shows


@contextmanager
def rank_processes(
    grid: Grid, device: torch.device, timeout: float, words: Sequence[str], text: str, threads: int, folder: Path
) -> Iterator[RankGroup]:
    """Context with rank 0's group of all ranks. Unless a launcher started the others, each is a process `words` that
    reads `text` from standard input, computes on `threads` threads and prints to rank-N.log in `folder`. If the body
    raises, the others, which may wait for rank 0 anywhere, are not waited for. `timeout` [s]: of each exchange."""
    with ExitStack() as stack:
        children: list[Child] = []
        if "WORLD_SIZE" not in os.environ:
            if device.type == "cuda" and (count := torch.cuda.device_count()) < grid.size:
                raise BirlError(
                    f"parallel: {grid} makes {grid.size} ranks, each on a GPU of its own, and this machine shows "
                    f"{count}{visible()}. Take fewer ranks, more machines (birl launch), or model.device=cpu."
                )
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(grid.size)}
            place |= within_this_machine(stack.enter_context(tempfile.TemporaryDirectory(prefix="birl-ranks-")))
            for name, value in {**place, "RANK": "0", "LOCAL_RANK": "0"}.items():
                os.environ[name] = value
                stack.callback(os.environ.pop, name, None)
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(leave_nothing_empty, folder)
            for rank in range(1, grid.size):
                env = place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": str(threads)}
                children.append(Child(rank, words, text, env, folder / f"rank-{rank}.log"))
                stack.callback(children[-1].end)
        stack.callback(leave)
        crew = RankGroup(join(grid, device, timeout), timeout)
        crew.ended = lambda: next((word for c in children if (word := c.word())), "")
        crew.killed = lambda: next((c.word() for c in children if c.process.code == -signal.SIGKILL), "")
        crew.watch(stop_at_once)
        try:
            yield crew
        except BaseException:
            crew.abandon()
            for child in children:
                child.kill()
            leave(failed=True)
            raise
        crew.close()


def within_this_machine(folder: str) -> dict[str, str]:
    """Environment for a rendezvous in a file and gloo on the loopback: PyTorch's TCP store listens on every address of
    the machine, and ranks exchange pickles without any authentication."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {STORE: f"{folder}/store"} | loopback


def leave_nothing_empty(folder: Path) -> None:
    """Delete empty logs of ranks, and the folder if nothing else is in it, as after --dry-run."""
    for log in folder.glob("rank-*.log"):
        if not log.stat().st_size:
            log.unlink()
    with suppress(OSError):
        folder.rmdir()


def leave(failed: bool = False) -> None:
    """Leave the process groups; after a failure without waiting for NCCL's kernels, which may wait for lost ranks."""
    if torch.distributed.is_initialized():
        c10d = torch.distributed.distributed_c10d
        (c10d._abort_process_group if failed else c10d.destroy_process_group)()


class Child:
    """A child process with another rank on this machine. It ends with this process, even if that is killed."""

    def __init__(self, rank: int, words: Sequence[str], text: str, env: dict[str, str], log: Path) -> None:
        self.rank, self.log = rank, log
        self.process = ProcessGroup([*words], log=log, env=os.environ | env, text=text)
        self.kill = self.process.kill

    def word(self) -> str:
        """Error message with the end of its log, if it has failed; else empty."""
        if self.process.code in (None, 0):
            return ""
        tail = self.process.tail(SHOWN).strip()
        return f"rank {self.rank} {self.process.how()}. The end of {self.log}:\n{tail or '(empty)'}"

    def end(self, patience: float = 10.0) -> None:
        self.process.wait(patience)
        self.kill()


def follow(
    grid: Grid, device: torch.device, timeout: float, threads: int, make: Callable[[RankGroup, Executor], Any]
) -> None:
    """Main loop of a rank other than 0: `make` its worker, then execute rank 0's calls.

    Launchers send SIGTERM to every rank. Rank 0 saves then, which needs the others, and ends them."""
    keep_memory()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    crew = RankGroup(join(grid, device, timeout), timeout)
    try:
        with compute_thread(threads, device) as compute:
            crew.follow(compute.submit(make, crew, compute).result(), compute)
    except BaseException as error:
        crew.report(error)
        if not isinstance(error, BirlError):
            raise
        print(f"birl: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    leave()
