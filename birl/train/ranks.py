"""The processes of a run that trains on several ranks.

`birl rl parallel.fsdp=4` is rank 0 and starts three more processes on this machine, which end with it. Where a launcher
has started all of them (torchrun, srun, ...: RANK and WORLD_SIZE are set), each finds its place by itself.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from birl.allocator import keep_memory
from birl.config import schema
from birl.config.load import load, to_yaml
from birl.errors import BirlError
from birl.learner.export import resolved
from birl.models.device import choose
from birl.models.load import skeleton
from birl.parallel.crew import Crew, stop_at_once
from birl.parallel.grid import grid_of, leads, rank_threads
from birl.parallel.machine import compute_thread
from birl.parallel.ranks import STORE, Ranks, join
from birl.parallel.tensor import check
from birl.process import free_port
from birl.process_group import Group

SHOWN = 4000  # characters of a rank's log that an error shows


def check_split(config: schema.RL | schema.Stage, folder: Path) -> None:
    """Can the model of a folder be split over that many ranks? Before its weights are loaded. Raises `BirlError`."""
    if config.parallel.tp > 1:
        check(skeleton(folder), config.parallel.tp)


@contextmanager
def crew(config: schema.RL | schema.Stage, folder: Path) -> Iterator[Crew]:
    """Rank 0's; the others are started unless a launcher did. What they print goes to rank-N.log in `folder`. When the
    body raises, the others, which may wait for rank 0 anywhere, are not waited for."""
    grid = grid_of(config)
    if grid.size > 1 and leads():  # where it is a run, it is exported once, before the others look for it
        source = resolved(config.model.path)
        if grid.tp > 1:
            check_split(config, source)
    if grid.size == 1:
        yield Crew(Ranks())
        return
    with ExitStack() as stack:
        children: list[Child] = []
        if "WORLD_SIZE" not in os.environ:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(grid.size)}
            place |= within_this_machine(stack.enter_context(tempfile.TemporaryDirectory(prefix="birl-ranks-")))
            for name, value in {**place, "RANK": "0", "LOCAL_RANK": "0"}.items():
                os.environ[name] = value
                stack.callback(os.environ.pop, name, None)
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(1, grid.size):
                children.append(Child(config, rank, place, folder / f"rank-{rank}.log"))
                stack.callback(children[-1].end)
        stack.callback(leave)
        made = Crew(join(grid, choose(config.model.device), config.parallel.timeout), config.parallel.timeout)
        made.ended = lambda: next((word for c in children if (word := c.word())), "")
        made.watch(stop_at_once)
        try:
            yield made
        except BaseException:
            made.abandon()
            for child in children:
                child.kill()
            raise
        made.close()


def within_this_machine(folder: str) -> dict[str, str]:
    """Ranks meet in a file, and gloo's connections stay on the loopback: PyTorch's store over TCP listens on every
    address of the machine, and what ranks send each other are pickles, without any authentication."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {STORE: f"{folder}/store"} | loopback


def leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Child:
    """One more rank on this machine. It ends when this process ends, however that ends."""

    def __init__(self, config: schema.RL | schema.Stage, rank: int, place: dict[str, str], log: Path) -> None:
        self.rank, self.log = rank, log
        threads = str(rank_threads(config))
        env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": threads}
        command = next(name for name, kind in schema.TRAINING.items() if isinstance(config, kind))
        words = [sys.executable, "-m", "birl.train.ranks", command]
        self.process = Group(words, log=log, env=env, text=to_yaml(config))
        self.kill = self.process.kill

    def word(self) -> str:
        """What it said last, if it has ended and should not have."""
        if self.process.code in (None, 0):
            return ""
        with self.log.open("rb") as file:
            file.seek(self.process.said_from)
            said = file.read().decode(errors="replace").strip()[-SHOWN:]
        return f"rank {self.rank} {self.process.how()}. The end of {self.log}:\n{said or '(empty)'}"

    def end(self, patience: float = 10.0) -> None:
        self.process.wait(patience)
        self.kill()


def follow(config: schema.RL | schema.Stage, make: Callable[[Crew, Executor], Any]) -> None:
    """The life of a rank other than 0: `make` its worker, then do what rank 0 calls.

    Launchers send SIGTERM to every rank. Rank 0 saves then, which needs the others, and ends them."""
    keep_memory()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    timeout = config.parallel.timeout
    made = Crew(join(grid_of(config), choose(config.model.device), timeout), timeout)
    try:
        with compute_thread(rank_threads(config)) as compute:
            made.follow(compute.submit(make, made, compute).result(), compute)
    except BaseException as error:
        made.report(error)
        if not isinstance(error, BirlError):
            raise
        print(f"birl: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    leave()


def main() -> None:
    """python -m birl.train.ranks COMMAND < the configuration"""
    command, text = sys.argv[1], sys.stdin.read()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        config: Any = load(schema.TRAINING[command], [file.name])
    import_module(f"birl.train.{command}").follow(config)


if __name__ == "__main__":
    main()
