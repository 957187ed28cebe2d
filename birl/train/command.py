"""A training run from its configuration to its end, for `birl rl`, `sft`, `rm`, `dpo` and the trainers of `birl`.

`train` is rank 0: it holds the run folder, starts the other ranks unless a launcher did, and lets `build.py` (rl) or
`build_rows.py` (the others) make the objects of the loop. `follow` is every other rank.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from birl import foreign
from birl.allocator import keep_memory
from birl.config import schema
from birl.config.file import to_yaml
from birl.config.load import load, run_folder
from birl.errors import innermost
from birl.learner.export import resolved
from birl.learner.open import check_split
from birl.learner.policy import load_policy
from birl.models.device import choose
from birl.named import Given
from birl.parallel.crew import RankGroup
from birl.parallel.grid import grid_of, leads, learner_threads, rank_threads
from birl.parallel.machine import compute_thread
from birl.parallel.ranks import Ranks
from birl.signals import Stop, saving_signals
from birl.track.folder_lock import held
from birl.train.setup import Setup


def train(
    config: schema.RL | schema.Stage,
    choices: dict[str, str] | None = None,
    dry_run: bool = False,
    given: Given | None = None,
    card: str = "",
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary that is also in the run folder. `card`:
    the kind of GPU that a `dry_run` is for. Raises `BirlError` for anything the user can mend."""
    keep_memory()
    try:
        with foreign.undone():
            return asyncio.run(_main(config, choices or {}, dry_run, given or Given(), card))
    except BaseExceptionGroup as group:
        raise innermost(group) from None


async def _main(
    config: schema.RL | schema.Stage, choices: dict[str, str], dry_run: bool, given: Given, card: str
) -> dict[str, Any]:
    stop = Stop()
    folder = Path(run_folder(config, choices)).absolute()
    threads = learner_threads(config) if isinstance(config, schema.RL) else rank_threads(config)
    with (
        nullcontext() if dry_run else saving_signals(stop),
        nullcontext() if dry_run else held(folder),
        crew(config, folder) as group,
        compute_thread(threads, choose(config.model.device)) as compute,
    ):
        setup = Setup(
            config=config, folder=folder, given=given, dry_run=dry_run, card=card,
            compute=compute, crew=group, stop=stop,
        )  # fmt: skip
        try:
            return await _builder(config).run(setup)
        finally:
            await foreign.stop(*(asyncio.all_tasks() - {asyncio.current_task()}))


def _builder(config: schema.RL | schema.Stage) -> ModuleType:
    """What makes the objects of a run: `run` on rank 0, with `worker_of`, which is for all ranks."""
    if isinstance(config, schema.RL):
        from birl.train import build

        return build
    from birl.train import build_rows

    return build_rows


@contextmanager
def crew(config: schema.RL | schema.Stage, folder: Path) -> Iterator[RankGroup]:
    """Rank 0's; the others are started unless a launcher did. What they print goes to rank-N.log in `folder`."""
    grid = grid_of(config)
    if grid.size == 1:
        yield RankGroup(Ranks())
        return
    from birl.parallel import processes

    if leads():  # where model.path is a run, it is exported once, before the others look for it
        check_split(config, resolved(config.model.path))
    command = next(name for name, kind in schema.TRAINING.items() if isinstance(config, kind))
    words = [sys.executable, "-m", "birl.train.command", command]
    timeout, device = config.parallel.timeout, choose(config.model.device)
    with processes.rank_processes(grid, device, timeout, words, to_yaml(config), rank_threads(config), folder) as ranks:
        yield ranks


def follow(config: schema.RL | schema.Stage) -> None:
    """A rank other than 0: it makes its worker, without the data, and does what rank 0 calls until the run ends."""
    from birl.parallel import processes

    def make(crew: RankGroup, compute: Any) -> Any:
        policy = load_policy(config.model, compute, crew.ranks, config.lora.quantize)
        policy.keep_pictures(Path(config.run))
        return _builder(config).worker_of(config, policy, crew, Path(config.run))

    device = choose(config.model.device)
    processes.follow(grid_of(config), device, config.parallel.timeout, rank_threads(config), make)


def main() -> None:
    """python -m birl.train.command COMMAND < the configuration"""
    command, text = sys.argv[1], sys.stdin.read()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        config: Any = load(schema.TRAINING[command], [file.name])
    follow(config)


if __name__ == "__main__":
    main()
