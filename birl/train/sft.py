"""Supervised fine-tuning: rows -> tokens -> -log p of those that are to be learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from torch import Tensor

from birl.algorithms.reduce import DENOMINATORS
from birl.config import schema
from birl.data.examples import Example, load_texts
from birl.data.pack import Batch, pack
from birl.learner.learner import Learner, Loss, Stats
from birl.learner.open import make_learner
from birl.learner.policy import Policy
from birl.parallel.ranks import Ranks
from birl.train import offline


def train(
    config: schema.SFT, choices: dict[str, str] | None = None, dry_run: bool = False, given: Any = None
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary. Raises `BirlError` for anything the user
    can mend."""
    return offline.train(config, choices, dry_run, given, texts, Likelihood)


def follow(config: schema.SFT) -> None:
    """Every rank but 0, until the run ends."""
    offline.follow(config, Likelihood)


def texts(policy: Policy, data: schema.Texts, which: Any, limit: int, given: Any):
    return load_texts(data, which, policy.chat, limit, given)


def negative_log_likelihood(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum_t weight_t log p_t. Figures [N]: nll and entropy of each learned token."""
    return -(logp * batch.weights).sum(), {"nll": -logp.detach(), "entropy": entropy.detach()}


@dataclass
class Likelihood:
    """Each row is one sequence."""

    config: schema.SFT
    policy: Policy
    longest: int

    def __post_init__(self) -> None:
        self.capacity = offline.fitting(self.config, self.longest - 1, "row")

    def learner(self, policy: Policy, ranks: Ranks) -> Learner:
        return make_learner(self.config, policy.model, ranks)

    def before(self, run: Path | None, examples: Sequence[Example]) -> None:
        pass

    def work(self, examples: Sequence[Example]) -> list[tuple[Batch, Loss]]:
        samples = [e.sequences[0].sample(group=i) for i, e in enumerate(examples)]
        lengths = [sum(s.mask) for s in samples]
        weights = DENOMINATORS[self.config.denominator](lengths, [*range(len(samples))], 0)
        batches = pack(samples, weights, self.capacity, self.config.parallel.shares, self.policy.pair_cost)
        return [(batch, negative_log_likelihood) for batch in batches]

    def figures(self, stats: Stats) -> dict[str, float]:
        """`nll`: mean over tokens, whatever the loss's denominator is; `perplexity` is its exponential."""
        nll = stats.mean("nll")
        return {"loss": stats.loss, "nll": nll, "perplexity": exp(min(nll, 700.0)), "entropy": stats.mean("entropy")}

    def score(self, figures: dict[str, float]) -> float:
        return -figures["nll"]
