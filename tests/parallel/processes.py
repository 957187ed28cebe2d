"""A function on several ranks, each a process, with a hard deadline. They are forked from a server that has loaded
PyTorch once."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch

from birl.parallel.ranks import Grid, join
from birl.process import free_port

#: one server for all tests of a process: what they all need
PRELOADED = [
    *("datasets", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "birl.learner.learner"),
    *("birl.server.serve", "birl.train.command", "birl.train.build", "birl.track.report", "tests.tiny"),
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)


def on_ranks(grid: Grid, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """`function(ranks, *arguments)` on every rank of the grid; what each gives. The function belongs to a module, and
    what it takes and gives can be pickled. Raises the first error, or `TimeoutError`; no process is left."""
    results, port = SERVER.Queue(), free_port()
    children = [
        SERVER.Process(
            target=_run, args=(results, grid, rank, port, dict(os.environ), function, arguments), daemon=True
        )
        for rank in range(grid.size)
    ]
    for child in children:
        child.start()
    found: dict[int, Any] = {}
    until = time.monotonic() + timeout
    try:
        while len(found) < grid.size:
            try:
                rank, good, value = pickle.loads(results.get(timeout=max(until - time.monotonic(), 0.01)))
            except Empty:
                missing = sorted(set(range(grid.size)) - set(found))
                raise TimeoutError(f"ranks {missing} of {grid} gave nothing in {timeout:g} s") from None
            if not good:
                raise AssertionError(f"rank {rank} of {grid}:\n{value}")
            found[rank] = value
    finally:
        for child in children:
            child.join(0.5 if len(found) == grid.size else 0)
            child.kill()
    return [found[rank] for rank in range(grid.size)]


def _run(
    results: Any, grid: Grid, rank: int, port: int, env: dict[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    os.environ.clear()  # the fork server has that of its start
    os.environ.update(env)
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": grid.size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    try:
        found = function(join(grid, torch.device("cpu"), 30.0), *arguments)
        results.put(pickle.dumps((rank, True, found)))  # tensors by value, not as files of a process that ends
    except BaseException:
        results.put(pickle.dumps((rank, False, traceback.format_exc())))
