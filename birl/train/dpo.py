"""Preference optimisation: pairs of answers -> log-ratios to a reference -> a loss of `algorithms/preference.py`.

preference.loss chooses the loss. KTO takes every answer alone; the others compare the two of a pair.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birl.algorithms.preference import preferred
from birl.data.examples import Example
from birl.data.pack import Batch
from birl.errors import BirlError
from birl.learner.learner import Loss, Stats
from birl.learner.reference import Reference, answers, mismatched, samples_of
from birl.parallel.ranks import Packer, Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Each row is a pair, or (KTO) one or two answers that are judged alone. `name`, `alone`, `mean`: of the row of
    `PREFERENCE`; `compare`: its loss with its options; `precompute`: how many rows at a time get their sums under the
    first weights before training, 0 where that is not wanted; `limit`: tokens of a sequence."""

    pack: Packer
    name: str
    alone: bool
    mean: bool
    compare: Callable[..., Tensor]
    beta: float
    nll_coef: float
    reference: Reference
    precompute: int
    limit: int

    def prepare(self, run: Path | None, examples: Sequence[Example]) -> None:
        if not self.alone and any(len(e.sequences) == 1 for e in examples):
            raise BirlError(
                f"preference.loss={self.name} compares two answers, but the rows have one and a `label`: set "
                "preference.loss=kto, or give rows with `chosen` and `rejected`."
            )
        if self.precompute:
            self.reference.precompute(examples, self.precompute, run)

    def micro_batches(self, examples: Sequence[Example]) -> tuple[Shared[Batch], Shared[Any]]:
        samples = samples_of(examples)
        weight = 1 / len(samples) if self.alone else 1 / len(examples)
        batches = self.pack(samples, [weight] * len(samples))
        sums = self.reference.of(batches, examples)
        if not self.alone:
            return batches, Shared(sums)
        good, divergence = self._good(examples), self._divergence(examples)
        mine = [good[batch.sample.unique_consecutive()] for batch in batches]
        return batches, Shared((m, divergence, r) for m, r in zip(mine, sums, strict=True))

    def loss_for(self, known: Any) -> Loss:
        return partial(self._kto, *known) if self.alone else partial(self._paired, known)

    def _paired(self, reference: Tensor, logp: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Answers 2i and 2i + 1 are the chosen and the rejected one of a row."""
        a = answers(logp, batch)
        gained = (a.mean if self.mean else a.total) - reference.to(logp.device)
        chosen, rejected = gained[0::2], gained[1::2]
        each = self.compare(chosen, rejected)
        nll = -a.mean[0::2]
        if self.nll_coef:
            each = each + self.nll_coef * nll
        figures = {"loss": each, "nll": nll, "accuracy": preferred(chosen, rejected)}
        figures |= {"chosen": self.beta * chosen, "rejected": self.beta * rejected}
        return (each * a.weight[0::2]).sum(), {n: v.detach() for n, v in figures.items()}

    def _good(self, examples: Sequence[Example]) -> Tensor:
        """[answers of the step]: a pair has a good and a bad one."""
        pairs = [(True, False) if len(e.sequences) == 2 else (e.good,) for e in examples]
        return torch.tensor([good for pair in pairs for good in pair], dtype=torch.bool)

    def _divergence(self, examples: Sequence[Example]) -> float:
        """KTO's reference point max(0, mean log pi(y_{i+1} | x_i) / pi_ref(y_{i+1} | x_i)) (arXiv:2402.01306 section
        4.1): prompts with the answers of the next row, the last with those of the first; cut at `limit`. 0 for a single
        row, as the last piece of a validation may be."""
        if len(examples) == 1:
            return 0.0
        return max(self.reference.gains(mismatched(examples, self.limit)).mean().item(), 0.0)

    def _kto(
        self, good: Tensor, divergence: float, reference: Tensor, logp: Tensor, _: Tensor, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        a = answers(logp, batch)
        gained, mine = a.total - reference.to(logp.device), good.to(logp.device)
        each = self.compare(gained, mine, torch.tensor(divergence, dtype=torch.float32))
        reward = self.beta * gained.detach()
        right = torch.where(mine, gained > divergence, gained < divergence).float()
        figures = {"loss": each.detach(), "accuracy": right, "kl": torch.full_like(reward, divergence)}
        figures |= {"nll": -a.mean.detach(), "good": mine.float()}
        figures |= {"chosen": reward * mine, "rejected": reward * ~mine}
        return (each * a.weight).sum(), figures

    def figures(self, stats: Stats) -> dict[str, float]:
        """`reward/...`: beta times the gain in log-prob over the reference, of the chosen and of the rejected answers;
        `accuracy`: how often the chosen one has the higher (KTO: a good one gains, a bad one loses)."""
        result = {n: stats.mean(n) for n in ("loss", "accuracy", "nll", "kl") if n in stats.sums}
        chosen, rejected = stats.mean("chosen"), stats.mean("rejected")
        if "good" in stats.sums:
            share = stats.mean("good")
            chosen = chosen / share if share else 0.0
            rejected = rejected / (1 - share) if share < 1 else 0.0
        return result | {"reward/chosen": chosen, "reward/rejected": rejected, "reward/margin": chosen - rejected}

    def score(self, figures: Mapping[str, float]) -> float:
        return figures["accuracy"]
