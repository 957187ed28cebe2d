"""Supervised fine-tuning: rows -> tokens -> -log p of those that are to be learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

from torch import Tensor

from birl.algorithms.reduce import DENOMINATORS
from birl.data.examples import Example
from birl.data.pack import Batch, pack
from birl.learner.learner import Loss, Stats


def negative_log_likelihood(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum_t weight_t log p_t. Figures [N]: nll and entropy of each learned token."""
    return -(logp * batch.weights).sum(), {"nll": -logp.detach(), "entropy": entropy.detach()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Each row is one sequence. `denominator`: row of `DENOMINATORS`; `capacity`: tokens of a micro-batch; `shares`:
    data-parallel ranks; `pair_cost`: of `pack`."""

    denominator: str
    capacity: int
    shares: int
    pair_cost: float

    def before(self, run: Path | None, examples: Sequence[Example]) -> None:
        pass

    def work(self, examples: Sequence[Example]) -> list[tuple[Batch, Loss]]:
        samples = [e.sequences[0].sample(group=i) for i, e in enumerate(examples)]
        lengths = [sum(s.mask) for s in samples]
        weights = DENOMINATORS[self.denominator](lengths, [*range(len(samples))], 0)
        batches = pack(samples, weights, self.capacity, self.shares, self.pair_cost)
        return [(batch, negative_log_likelihood) for batch in batches]

    def figures(self, stats: Stats) -> dict[str, float]:
        """`nll`: mean over tokens, whatever the loss's denominator is; `perplexity` is its exponential."""
        nll = stats.mean("nll")
        return {"loss": stats.loss, "nll": nll, "perplexity": exp(min(nll, 700.0)), "entropy": stats.mean("entropy")}

    def score(self, figures: dict[str, float]) -> float:
        return -figures["nll"]
