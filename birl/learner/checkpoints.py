"""Checkpointing of a run on every rank: writes to the run folder, copies to an object store, deletes old ones.

They are written in the background: the step waits only while the tensors are copied to CPU memory.

    tensors -> copies in CPU memory -> a thread writes them -> complete, or an error at the next step

At most one is being written: the next one waits for it, and so does the end of the run. Every rank has a writer thread,
and these use a separate process group, so that their collectives cannot mix with those of training.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from birl.config import schema
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.parallel.layout import local
from birl.parallel.ranks import Ranks
from birl.waits import alive, event

if TYPE_CHECKING:
    from birl.learner.store import Store


LONG = timedelta(days=1)  # a rank may wait long for another one that writes; the death of a rank ends the wait

#: (tensors to write, process group to plan it over)
Write = Callable[[dict[str, Tensor], "dist.ProcessGroup | None"], None]


class Writer:
    """Writes checkpoints in a thread, one at a time. `staged`: bytes of this rank's last one in CPU memory."""

    def __init__(self) -> None:
        self.staged = 0
        self._thread: threading.Thread | None = None
        self._group: Any = None
        self._error: BaseException | None = None

    def begin(self, tensors: dict[str, Tensor], write: Write, ranks: Ranks) -> None:
        """Copy the tensors, and `write` the copies in the background. All ranks must call it. Raises the error of the
        previous checkpoint."""
        self.wait()
        if self._group is None and not ranks.alone:
            self._group = dist.new_group(backend="gloo", timeout=LONG)
        copies = {name: staged(tensor) for name, tensor in tensors.items()}
        self.staged = sum(local(copy).nbytes for copy in copies.values())
        self._thread = threading.Thread(target=self._run, args=(copies, write), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a failed checkpoint, without waiting for one that is being written."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of a failed checkpoint, once."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)
                alive()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """`wait` at the end of a run that has failed already: an error is printed, not raised."""
        try:
            self.wait()
        except BirlError as error:
            print(f"birl: {error}", file=sys.stderr, flush=True)

    def _run(self, copies: dict[str, Tensor], write: Write) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread, and of those that begin: a second OpenMP pool would slow the first
        try:
            write(copies, self._group)
            event("a checkpoint was written")
        except BaseException as error:
            self._error = error
        finally:
            copies.clear()
            torch.set_num_threads(threads)


def staged(tensor: Tensor) -> Tensor:
    """Copy to CPU memory; of a DTensor this rank's shard, as a DTensor of the same layout."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return DTensor(tensor.to_local().to("cpu", copy=True), tensor._spec, requires_grad=False)
    return tensor.to("cpu", copy=True)


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of `run`. `warnings`: of the writer thread, until rank 0 shows them."""

    run: Path
    keys: schema.Checkpoint
    ranks: Ranks
    writer: Writer = field(default_factory=Writer)
    store: "Store | None" = None
    warnings: list[str] = field(default_factory=list[str])

    @property
    def folder(self) -> Path:
        return self.run / "checkpoints"

    def write(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], kept: set[int]) -> None:
        """Write a checkpoint, then delete old ones except the newest and the steps in `kept`."""
        ranks, keys, root = self.ranks, self.keys, self.folder

        def work(tensors: dict[str, torch.Tensor], group: Any) -> None:
            checkpoint.save(root, step, tensors, state, ranks, group)
            if keys.store:
                self.copy(root / f"step-{step:06d}", step, kept, group)
            if ranks.rank == 0:
                try:
                    step_folders.prune(root, keys.keep_last, kept)
                except OSError as error:
                    self.warnings.append(f"WARNING: an old checkpoint cannot be deleted. {error}")

        if keys.asynchronous:
            self.writer.begin(tensors, work, ranks)
        else:
            work(tensors, None)

    def copy(self, path: Path, step: int, kept: set[int], group: Any) -> None:
        """Copy a complete checkpoint to the object store. A failure is only a warning: the run folder has it, and the
        next copy may succeed."""
        from birl.learner.store import Store, location

        ranks, keys = self.ranks, self.keys
        try:
            store = self.store or Store(location(keys.store, self.run))
            if self.store is None:
                checkpoint.agreed(lambda: store.about(self.run) if ranks.rank == 0 else None, ranks, group)
            self.store = store  # it knows the run by now
            store.put(path, step, ranks, group)
            if ranks.rank == 0:
                store.prune(keys.keep_last, kept | {step})  # later ones may be of another run of this name
        except (BirlError, OSError) as error:  # other ranks' come as OSError
            self.warnings.append(f"WARNING: step {step} is not on the store. {error}")

    def damage(self, path: Path, wanted: Sequence[str]) -> list[str]:
        """Problems of a checkpoint's files; its state.json must have the `wanted` keys."""
        damage = checkpoint.verify(path, self.ranks)
        if not damage:
            state = step_folders.read_state(path)
            damage = [f"state.json has no {name}" for name in wanted if name not in state]
        return damage
