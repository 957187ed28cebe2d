"""The grid of a run's ranks, and the CPU threads of each."""

import ctypes
import os
import signal
import sys

import torch

from birl.allocator import cores
from birl.config import schema
from birl.parallel.ranks import Grid


def grid_of(config: schema.RL | schema.Stage | schema.Tinker) -> Grid:
    keys = config.parallel
    names = ("ddp", "fsdp", "cp", "tp", "ep", "sequence", "context")
    return Grid(**{name: getattr(keys, name) for name in names})


def leads() -> bool:
    """Whether this process is rank 0, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def started() -> int:
    """Number of ranks that a launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here(config: schema.RL | schema.Stage | schema.Tinker) -> int:
    """Number of the learner's ranks on this machine, from the launcher; all ranks if it is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", grid_of(config).size))


def rank_threads(config: schema.RL | schema.Stage | schema.Tinker) -> int:
    """CPU threads of each rank, its share of this machine's cores; 0: PyTorch's default."""
    return config.threads or (max(1, cores() // ranks_here(config)) if grid_of(config).size > 1 else 0)


def learner_threads(config: schema.RL) -> int:
    """The key `threads`; if it is 0, half of the cores when servers on this machine use the others."""
    if grid_of(config).size > 1:
        return rank_threads(config)
    shares = config.engine.kind != "embedded" and not config.engine.attach
    if config.threads or not shares or config.model.device.startswith("cuda") or torch.cuda.is_available():
        return config.threads
    return max(cores() // 2, 1)


def end_with_torchrun() -> None:
    """End this rank when torchrun dies: killed, it would leave ranks that continue and lock the run folder."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        death_signal = 1
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL, 0, 0, 0)
