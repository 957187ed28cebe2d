"""Supervised fine-tuning: rows -> tokens -> negative log-likelihood of the trained ones, or divergence from a
teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

from torch import Tensor

from birl.algorithms.reduce import DENOMINATORS
from birl.data.examples import Example
from birl.data.pack import Batch
from birl.learner.learner import Loss, Stats
from birl.parallel.ranks import Packer, Shared


def negative_log_likelihood(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum_t weight_t log p_t. Figures [N]: nll and entropy of each learned token."""
    return -(logp * batch.weights).sum(), {"nll": -logp.detach(), "entropy": entropy.detach()}


def imitation(logp: Tensor, entropy: Tensor, batch: Batch, *, nll_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t weight_t (D_t - nll_coef log p_t), D_t the divergence from a teacher: two more figures [N]."""
    nll, figures = negative_log_likelihood(logp, entropy, batch)
    assert batch.divergence is not None
    loss = (batch.divergence * batch.weights).sum() + (nll_coef * nll if nll_coef else 0.0)
    return loss, figures | {"divergence": (d := batch.divergence.detach()), "each": d + nll_coef * figures["nll"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Each row is one sequence. `denominator`: row of `DENOMINATORS`; `loss`: of a micro-batch."""

    pack: Packer
    denominator: str
    loss: Loss

    def prepare(self, run: Path | None, examples: Sequence[Example]) -> None:
        pass

    def micro_batches(self, examples: Sequence[Example]) -> tuple[Shared[Batch], Shared[None]]:
        samples = [e.sequences[0].sample(group=i) for i, e in enumerate(examples)]
        lengths = [sum(s.mask) for s in samples]
        weights = DENOMINATORS[self.denominator](lengths, [*range(len(samples))], 0)
        batches = self.pack(samples, weights)
        return batches, Shared([None] * len(batches))

    def loss_for(self, known: None) -> Loss:
        return self.loss

    def figures(self, stats: Stats) -> dict[str, float]:
        """`nll` and a loss by token are means over tokens, also of a validation; `perplexity` is exp(nll)."""
        nll = stats.mean("nll")
        own = {n: stats.mean(n) for n in ("entropy", "divergence") if n in stats.sums}
        loss = stats.mean("each" if "each" in stats.sums else "nll") if self.denominator == "token" else stats.loss
        return {"loss": loss, "nll": nll, "perplexity": exp(min(nll, 700.0))} | own

    def score(self, figures: dict[str, float]) -> float:
        return -figures.get("divergence", figures["nll"])
