"""Preference optimisation: pairs of answers -> log-probs of each, against a reference -> the chosen one must gain.

One loss of `algorithms/preference.py`, chosen by preference.loss. KTO judges every answer alone; the others compare.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birl.algorithms import preference
from birl.algorithms.custom import part
from birl.config import schema
from birl.data.examples import Example, load_pairs
from birl.data.pack import Batch, pack
from birl.data.sequences import Tokens
from birl.errors import BirlError
from birl.learner.learner import Learner, Loss, Stats
from birl.learner.open import make_learner
from birl.learner.policy import DTYPES, Policy
from birl.learner.reference import Reference, answers, samples_of
from birl.parallel.ranks import Ranks
from birl.train import offline


def train(
    config: schema.DPO, choices: dict[str, str] | None = None, dry_run: bool = False, given: Any = None
) -> dict[str, Any]:
    """Run to the end, or to the first Ctrl-C or SIGTERM; returns the summary. Raises `BirlError` for anything the user
    can mend."""
    return offline.train(config, choices, dry_run, given, pairs, Preferences)


def follow(config: schema.DPO) -> None:
    """Every rank but 0, until the run ends."""
    offline.follow(config, Preferences)


def pairs(policy: Policy, data: schema.Pairs, which: Any, limit: int, given: Any):
    return load_pairs(data, which, policy.chat, limit, given)


def preferred(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen one is ahead, 0 where the other is, 0.5 where they are equal, as before the first step."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


@dataclass
class Preferences:
    """Each row is a pair, or (KTO) one or two answers that are judged alone."""

    config: schema.DPO
    policy: Policy
    longest: int
    reference: Reference = field(init=False)

    def __post_init__(self) -> None:
        self.capacity = offline.fitting(self.config, self.longest, "pair (both answers together)")
        self.loss = self.config.preference.loss
        self.row = preference.PREFERENCE[self.loss]
        self.kind = "none" if self.row.mean else self.config.preference.reference

    def learner(self, policy: Policy, ranks: Ranks) -> Learner:
        frozen = None
        if self.kind == "live":
            dtype = DTYPES[self.config.model.dtype]
            frozen = Learner(deepcopy(policy.model), dtype=dtype, trainable=False, ranks=ranks)
        trained = make_learner(self.config, policy.model, ranks)
        self.reference = Reference(
            trained=trained, frozen=frozen, capacity=self.capacity, pair_cost=self.policy.pair_cost
        )
        return trained

    def before(self, run: Path | None, examples: Sequence[Example]) -> None:
        if not self.row.alone and any(len(e.sequences) == 1 for e in examples):
            raise BirlError(
                f"preference.loss={self.loss} compares two answers, and the rows have one and a `label`: set "
                "preference.loss=kto, or give rows with `chosen` and `rejected`."
            )
        if self.kind == "precomputed":
            self.reference.precompute(examples, self.config.batch_size, run)

    def work(self, examples: Sequence[Example]) -> list[tuple[Batch, Loss]]:
        samples = samples_of(examples)
        weight = 1 / len(samples) if self.row.alone else 1 / len(examples)
        batches = pack(
            samples, [weight] * len(samples), self.capacity, self.config.parallel.shares, self.policy.pair_cost
        )
        make = self._paired
        if self.row.alone:
            make = partial(self._kto, self._good(examples), self._divergence(examples))
        return [(b, make(r)) for b, r in zip(batches, self.reference.of(batches, examples), strict=True)]

    def _paired(self, reference: Tensor) -> Loss:
        keys = self.config.preference
        compare = part("preference.loss", self.loss, {self.loss: self.row.loss}, keys, (), ()).bound({})

        def loss(logp: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            """Answers 2i and 2i + 1 are the chosen and the rejected one of row i."""
            a = answers(logp, batch)
            gained = (a.mean if self.row.mean else a.total) - reference.to(logp.device)
            chosen, rejected = gained[0::2], gained[1::2]
            each = compare(chosen, rejected)
            nll = -a.mean[0::2]
            coefficient = keys.nll_coef if self.row.nll is None else self.row.nll
            if coefficient:
                each = each + coefficient * nll
            figures = {"loss": each, "nll": nll, "accuracy": preferred(chosen, rejected)}
            figures |= {"chosen": keys.beta * chosen, "rejected": keys.beta * rejected}
            return (each * a.weight[0::2]).sum(), {n: v.detach() for n, v in figures.items()}

        return loss

    def _good(self, examples: Sequence[Example]) -> Tensor:
        """[answers of the step]: a pair has a good and a bad one."""
        pairs = [(True, False) if len(e.sequences) == 2 else (e.good,) for e in examples]
        return torch.tensor([good for pair in pairs for good in pair], dtype=torch.bool)

    def _divergence(self, examples: Sequence[Example]) -> float:
        """KTO's reference point: KL(policy || reference), estimated on prompts with the answers of the next row."""
        others = [*examples[1:], *examples[:1]]
        mixed = [
            _joined(e.sequences[i], o.sequences[min(i, len(o.sequences) - 1)]).sample(group=n)
            for n, (e, o) in enumerate(zip(examples, others, strict=True))
            for i in range(len(e.sequences))
        ]
        mixed = [s for s in mixed if len(s.tokens) <= self.capacity and len(examples) > 1]
        gained = self.reference.sums(self.reference.trained, mixed)
        if self.reference.frozen is not None:
            gained = gained - self.reference.sums(self.reference.frozen, mixed)
        return max(gained.mean().item(), 0.0) if mixed else 0.0

    def _kto(self, good: Tensor, divergence: float, reference: Tensor) -> Loss:
        keys = self.config.preference

        def loss(logp: Tensor, _: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            a = answers(logp, batch)
            gained = a.total - reference.to(logp.device)
            mine = good.to(logp.device)[a.number]
            each = preference.kto(
                gained,
                mine,
                torch.tensor(divergence, dtype=torch.float32),
                beta=keys.beta,
                desirable_weight=keys.desirable_weight,
                undesirable_weight=keys.undesirable_weight,
            )
            reward = keys.beta * gained.detach()
            right = torch.where(mine, gained > divergence, gained < divergence).float()
            figures = {"loss": each.detach(), "accuracy": right, "kl": torch.full_like(reward, divergence)}
            figures |= {
                "nll": -a.mean.detach(),
                "chosen": reward * mine,
                "rejected": reward * ~mine,
                "good": mine.float(),
            }
            return (each * a.weight).sum(), figures

        return loss

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


def _joined(prompt: Tokens, answer: Tokens) -> Tokens:
    """The prompt of one sequence with the answer of another."""
    before, after = prompt.mask.index(1), answer.mask.index(1)
    return Tokens(ids=prompt.ids[:before] + answer.ids[after:], mask=bytes(before) + answer.mask[after:])
