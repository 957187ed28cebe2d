"""The ranks that a configuration asks for: `birl rl parallel.fsdp=4` is rank 0 and starts three more processes."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.load import load, to_yaml
from birl.learner.export import resolved
from birl.learner.open import check_split
from birl.models.device import choose
from birl.parallel.crew import RankGroup
from birl.parallel.grid import grid_of, leads, rank_threads
from birl.parallel.ranks import Ranks


@contextmanager
def crew(config: schema.RL | schema.Stage, folder: Path) -> Iterator[RankGroup]:
    """Rank 0's; the others are started unless a launcher did. What they print goes to rank-N.log in `folder`."""
    grid = grid_of(config)
    if grid.size == 1:
        yield RankGroup(Ranks())
        return
    from birl.parallel import processes

    if leads():  # where model.path is a run, it is exported once, before the others look for it
        source = resolved(config.model.path)
        check_split(config, source)
    command = next(name for name, kind in schema.TRAINING.items() if isinstance(config, kind))
    words = [sys.executable, "-m", "birl.train.ranks", command]
    timeout, device = config.parallel.timeout, choose(config.model.device)
    with processes.rank_processes(grid, device, timeout, words, to_yaml(config), rank_threads(config), folder) as ranks:
        yield ranks


def follow(config: schema.RL | schema.Stage, make: Callable[[RankGroup, Executor], Any]) -> None:
    """The life of a rank other than 0: `make` its worker, then do what rank 0 calls."""
    from birl.parallel import processes

    device = choose(config.model.device)
    processes.follow(grid_of(config), device, config.parallel.timeout, rank_threads(config), make)


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
