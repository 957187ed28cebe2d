"""One version of the weights in the learner's own tensors, without a copy of the whole model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from birl.errors import WeightsFailed
from birl.learner.learner import Learner
from birl.models.released import Shapes


class Live(Mapping[str, Tensor]):
    """Mapping of names to the learner's current weights. `take(names)` returns them on `device`; it is called on the
    compute thread `compute`, so that no optimizer step runs meanwhile. `kept`: copies for later requests.

    A returned tensor or bucket is a copy. Raises `WeightsFailed` "stale" if the learner has trained on and there is no
    copy: an engine that comes back then waits for the next version.
    """

    def __init__(
        self,
        learner: Learner,
        compute: Executor,
        shapes: Shapes,
        take: Callable[[Sequence[str]], Sequence[Tensor]],
        kept: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.learner, self.version, self.device = learner, learner.version, learner.device
        self.compute, self.shapes, self.take, self.kept = compute, shapes, take, kept

    def flat(self, names: Sequence[str]) -> Tensor:
        """Tensors of one type, concatenated as 1-D. Not to be called on the compute thread."""
        return self.compute.submit(self._flat, names).result()

    def _flat(self, names: Sequence[str]) -> Tensor:
        self.check()
        if self.learner.version == self.version:
            tensors = self.take(names)
        else:
            assert self.kept is not None
            tensors = [self.kept[name] for name in names]
        # `kept` copies and quantised weights are in CPU memory
        return torch.cat([t.detach().reshape(-1).to(self.device) for t in tensors])

    def check(self) -> None:
        """Raise `WeightsFailed` if this version is no longer available."""
        if self.learner.version != self.version and self.kept is None:
            raise WeightsFailed(
                "stale",
                f"The learner has trained on to version {self.learner.version} since it sent {self.version}, of which "
                "no copy is kept; the next one comes to every engine.",
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.flat([name]).view(self.shapes[name][0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
