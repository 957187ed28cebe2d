"""The checkpoints of a run on every rank: in the run folder, copied to an object store, old ones deleted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from birl.config import schema
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.writer import Writer
from birl.parallel.ranks import Ranks

if TYPE_CHECKING:
    from birl.learner.store import Store


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """Those below `run`. `warnings`: of the thread that writes, until rank 0 shows them."""

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
        """A checkpoint; then the old ones go, but for the newest and those of the steps in `kept`."""
        ranks, keys, root = self.ranks, self.keys, self.folder

        def work(tensors: dict[str, torch.Tensor], group: Any) -> None:
            checkpoint.save(root, step, tensors, state, ranks, group)
            if keys.store:
                self.copy(root / f"step-{step:06d}", step, kept, group)
            if ranks.rank == 0:
                try:
                    checkpoint.prune(root, keys.keep_last, kept)
                except OSError as error:
                    self.warnings.append(f"WARNING: an old checkpoint cannot be deleted. {error}")

        if keys.asynchronous:
            self.writer.begin(tensors, work, ranks)
        else:
            work(tensors, None)

    def copy(self, path: Path, step: int, kept: set[int], group: Any) -> None:
        """A complete checkpoint to the object store. That it could not be is a warning: the run folder has
        it, and the next one may get through."""
        from birl.learner.store import Store, location

        ranks, keys = self.ranks, self.keys
        try:
            store = self.store or Store(location(keys.store, self.run))
            if self.store is None:
                checkpoint.agreed(lambda: store.about(self.run) if ranks.rank == 0 else None, ranks, group)
            self.store = store  # it knows the run by now
            store.put(path, step, ranks, group)
            if ranks.rank == 0:
                store.prune(keys.keep_last, kept)
        except (BirlError, OSError) as error:  # other ranks' come as OSError
            self.warnings.append(f"WARNING: step {step} is not on the store. {error}")

    def damage(self, path: Path, wanted: Sequence[str]) -> list[str]:
        """What is wrong with the files of a checkpoint, whose state.json has the `wanted` keys."""
        damage = checkpoint.verify(path, self.ranks)
        if not damage:
            state = checkpoint.read_state(path)
            damage = [f"state.json has no {name}" for name in wanted if name not in state]
        return damage
