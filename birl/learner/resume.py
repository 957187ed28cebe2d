"""Which checkpoint a run continues from: one that a folder or URL names, or the newest of a run on an object store."""

import os
from pathlib import Path

from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.store import Store


def recovered(url: str, run: Path) -> Path | None:
    """The newest intact checkpoint of a run on a store, into its empty folder; None where the store has none."""
    store = Store(url)
    steps = store.steps()
    if steps:
        store.take_about(run)
    for step in reversed(steps):
        print(f"{run} has no checkpoint: taking step {step} from {url}.", flush=True)
        try:
            return store.take(step, run / "checkpoints")
        except BirlError as error:
            print(f"WARNING: {error}", flush=True)
    if steps:
        raise BirlError(f"All {len(steps)} checkpoints at {url} are damaged. Begin anew with run=ANOTHER_FOLDER.")
    return None


def fetched(url: str, root: Path) -> Path:
    """`resume=URL`: a checkpoint on a store, or the newest one of a run there. Raises `BirlError`."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if (step := checkpoint.step_of(name)) >= 0:
        store, steps = Store(parent), [step]
        if steps[0] not in store.steps():
            raise BirlError(f"resume={url}: there is no complete checkpoint.")
    else:
        store = Store(url)
        steps = store.steps()
    if not steps:
        raise BirlError(f"resume={url}: there is no complete checkpoint of a run.")
    return store.take(steps[-1], root)


def chosen_checkpoint(chosen: Path, run: Path, newest: Path | None) -> Path:
    """`resume=FOLDER`, unless that is no checkpoint, or would mix its history with another one in `run`."""
    if not (chosen / "manifest.json").is_file():  # a run: its newest one
        inside = checkpoint.latest(chosen / "checkpoints") or checkpoint.latest(chosen)
        if inside is None:
            raise BirlError(
                f"resume={chosen}: holds no complete checkpoint. `birl checkpoints RUN` lists those of a run."
            )
        chosen = inside
    if newest is not None and os.path.realpath(newest) != os.path.realpath(chosen):
        raise BirlError(
            f"resume={chosen}: {run} has gone on to {newest.name}, and going on from another place would mix the two. "
            f"Choose run=ANOTHER_FOLDER, leave out resume=... to go on from {newest}, or delete what you do not want."
        )
    return chosen
