"""Distillation: compares the learner's next-token distributions with a teacher's. The teacher is a frozen model, or the
learner itself, with its current weights or a slow average (`Average`), with a hint in its prompt (`rollout/hints.py`).

teacher     micro-batch -> the teacher's hidden states, or its most likely tokens
learner     its forward pass turns them into one divergence for each trained token (`models/divergence.py`)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from birl.algorithms.divergence import Divergence
from birl.data.pack import Batch
from birl.errors import BirlError
from birl.learner.learner import Learner
from birl.learner.outputs import Compared
from birl.learner.token_figures import by_sample
from birl.models.divergence import Full, Head, TopK, token_divergence, top_k
from birl.models.heads import after_head, head
from birl.models.vision import pictures_of
from birl.parallel.crew import RankGroup
from birl.parallel.layout import drop_gathered
from birl.parallel.ranks import Shared
from birl.text.pictures import FIRST
from birl.types import Sample

#: micro-batches and their samples -> for each sample the teacher's log-probs of its trained tokens
TeacherLogprobs = Callable[[Sequence[Batch], Sequence[Sample]], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """`function`: a divergence of `DIVERGENCES`. `top_k`: over the teacher's k most likely tokens and one bucket of all
    others; 0: over all tokens. Both distributions are at `temperature`. `student`: the trained model. `teachers`: by
    the name in a batch; if empty, the batch has the most likely tokens of a served teacher."""

    teachers: Mapping[str, Learner]
    student: nn.Module
    function: Callable[[Tensor, Tensor], Divergence]
    top_k: int
    temperature: float

    def __call__(self, batch: Batch) -> Compared:
        """(every rank) Raises `BirlError` for a picture if the teacher is served, as it then reads text only."""
        if not self.teachers:
            if pictures_of(self.student) is not None and bool((batch.tokens >= FIRST).any()):
                raise BirlError("A row has a picture, and a served teacher reads text alone: train on rows without.")
            assert batch.likely is not None and batch.likely_logprobs is not None
            return partial(self.compared, TopK(batch.likely, batch.likely_logprobs))
        teacher = self.teachers[batch.teacher]
        with torch.no_grad():
            hidden, weight, bias = teacher.outputs.states(batch.hinted or batch)
            target = Full(hidden, Head(weight, bias, after_head(teacher.model), self.temperature))
            size = min(len(weight), head(self.student).weight.shape[0])
            if 0 < self.top_k < size:  # else no token is left for the bucket of all others
                target = top_k(target, self.top_k, size)
        return partial(self.compared, target)

    def compared(self, target: Full | TopK, hidden: Tensor, layer: nn.Linear) -> Tensor:
        """Divergence from the teacher's predictions [U]."""
        own = Head(layer.weight, layer.bias, after_head(self.student), self.temperature)
        return token_divergence(hidden, own, target, self.function)


def taught_by(models: Mapping[str, Learner], served: TeacherLogprobs | None, crew: RankGroup) -> TeacherLogprobs:
    """(rank 0) Log-probs of teachers: frozen local models by name, and `served` ones for all other names."""
    ask: Callable[[Sequence[Batch]], list[Tensor]] = crew.each(lambda batch: models[batch.teacher].forward(batch))

    def teacher(batches: Sequence[Batch], samples: Sequence[Sample]) -> list[Tensor]:
        own = batches if served is None else Shared(b for b in batches if b.teacher in models)
        result = by_sample(own, ask(own) if own else [], len(samples))
        there = [n for n, s in enumerate(samples) if s.teacher not in models]
        if served is not None and there:
            for n, values in zip(there, served([], [samples[n] for n in there]), strict=True):
                result[n] = values
        return result

    return teacher


@dataclass(frozen=True, slots=True)
class Average:
    """(every rank) An exponential moving average of the trained weights: phi <- phi + rate (theta - phi) after every
    optimizer step (SDFT arXiv:2601.19897 algorithm 1, SDPO arXiv:2601.20802). With LoRA the matrices are averaged.
    `teacher`: a learner that takes no step; its float32 masters are the average."""

    teacher: Learner
    rate: float

    @torch.no_grad()
    def follow(self, learner: Learner) -> None:
        drop_gathered(self.teacher.outputs)
        own, trained = self.teacher.masters, learner.masters.tensors
        torch._foreach_lerp_(list(own.tensors.values()), [trained[name].data for name in own.tensors], self.rate)
        own.publish()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to checkpoint by name, as the live tensors."""
        own = self.teacher.masters
        return {f"average.{name}": own.whole(name, master.data) for name, master in own.tensors.items()}
