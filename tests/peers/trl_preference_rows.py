"""Preference losses and reward models beside TRL's own trainers."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from birl.algorithms import preference
from tests.peers.compare import Case, Pair, both, check
from tests.peers.trl_rows import bare


class Answers:
    """Pairs of answers, [chosen, rejected] along the batch as TRL has them, and a model that gives these log-probs."""

    def __init__(self, seed: int) -> None:
        case = Case(seed)
        self.pairs = case.integer(1, 6)
        rows, width = 2 * self.pairs, 9
        lengths = torch.tensor([case.integer(1, width - 1) for _ in range(rows)])
        begin = torch.tensor([case.integer(1, width - int(n)) for n in lengths])
        place = torch.arange(width)
        self.mask = (place >= begin[:, None]) & (place < (begin + lengths)[:, None])
        self.trained = self.mask[:, 1:]
        self.lengths = lengths.double()
        self.logp = -case.uniform(rows, width - 1) * 2 - 0.05
        self.ref = (self.logp + 0.5 * case.normal(rows, width - 1)).clamp(max=-1e-3)
        self.case = case

    def inputs(self, **more: Any) -> dict:
        ids = torch.ones_like(self.mask, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": ids, "completion_mask": self.mask.long()} | more

    def model(self, logp: Tensor) -> Any:
        def forward(**_: Any) -> SimpleNamespace:
            zeros = torch.zeros_like(logp)
            chosen = torch.where(self.trained, logp, 0)
            return SimpleNamespace(log_probs=chosen, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

        return forward

    def ratios(self, logp: Tensor, mean: bool = False) -> tuple[Tensor, ...]:
        """log π - log π_ref of whole answers, or the mean over tokens: [chosen], [rejected]."""
        ratio = torch.where(self.trained, logp - self.ref, 0).sum(1)
        return (ratio / self.lengths if mean else ratio).chunk(2)


def by_dpo(answers: Answers, loss_type: str, smoothing: float) -> tuple[Tensor, Tensor]:
    trainer = bare(
        DPOTrainer,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ld_alpha=None,
        precompute_ref_logps=False,
        ref_model=answers.model(answers.ref),
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=smoothing,
        use_weighting=False,
    )
    return both(lambda logp: trainer._compute_loss(answers.model(logp), answers.inputs(), False), answers.logp)


def dpo_case(what: str, loss_type: str, ours, *, smoothing: float = 0.0, differs: str = "") -> None:
    """`ours(c, r)`; with `differs`, TRL's ratios are means over tokens."""

    @check(what, "TRL", f"DPOTrainer._compute_loss({loss_type})", differs)
    def _(seed: int) -> Pair:
        answers = Answers(seed)
        found = [
            both(lambda logp, mean=mean: ours(*answers.ratios(logp, mean)).mean(), answers.logp)
            for mean in ([True, False] if differs else [False])
        ]
        return Pair(by_dpo(answers, loss_type, smoothing), found[0], found[1] if differs else ())


dpo_case("DPO", "sigmoid", lambda c, r: preference.dpo(c, r, beta=0.3))


dpo_case("hinge (RSO)", "hinge", lambda c, r: preference.hinge(c, r, beta=0.3))


dpo_case("robust DPO", "robust", lambda c, r: preference.robust(c, r, beta=0.3, label_smoothing=0.1), smoothing=0.1)


dpo_case(
    "IPO",
    "ipo",
    lambda c, r: preference.ipo(c, r, beta=0.3),
    differs="means over tokens; the paper's eq. 17 has whole answers, as birl (TRL's comment: its authors used means)",
)


def contrast_case(what: str, loss_type: str, ours, **keys: Any) -> None:
    @check(what, "TRL", f"CPOTrainer.cpo_loss({loss_type})")
    def _(seed: int) -> Pair:
        answers = Answers(seed)
        c, r = answers.ratios(answers.logp)
        trainer = bare(
            CPOTrainer, **({"alpha": 0.0, "beta": 0.3, "label_smoothing": 0.0, "loss_type": loss_type} | keys)
        )
        theirs, mine = (both(lambda x, f=f: f(x[0], x[1]), torch.stack([c, r])) for f in (
            lambda a, b: trainer.cpo_loss(a, b)[0], ours
        ))  # fmt: skip
        return Pair(theirs, mine)


contrast_case(
    "conservative DPO (DPOTrainer has none)",
    "sigmoid",
    lambda c, r: preference.dpo(c, r, beta=0.3, label_smoothing=0.1),
    label_smoothing=0.1,
)


contrast_case("SimPO", "simpo", lambda c, r: preference.simpo(c, r, beta=0.3, margin=0.5), simpo_gamma=0.5)


contrast_case("hinge", "hinge", lambda c, r: preference.hinge(c, r, beta=0.3))


contrast_case("IPO, as a function of the log-ratios", "ipo", lambda c, r: preference.ipo(c, r, beta=0.3))


@check("ORPO, odds ratio (float32 in TRL)", "TRL", "ORPOTrainer.odds_ratio_loss")
def _(seed: int) -> Pair:
    case = Case(seed)
    means = -case.uniform(2, 8) * 3 - 0.05
    trainer = bare(ORPOTrainer, beta=0.2)
    theirs = both(lambda x: -trainer.odds_ratio_loss(x[0], x[1])[0], means)
    return Pair(theirs, both(lambda x: preference.orpo(x[0], x[1], beta=0.2), means))


@check("KTO", "TRL", "KTOTrainer._compute_loss")
def _(seed: int) -> Pair:
    answers = Answers(seed)
    right = answers.case.uniform(len(answers.logp)) < 0.5
    # The answers of other prompts, of which TRL takes the KL, are given as their sums over tokens.
    policy, reference = answers.case.normal(2, len(right))
    trainer = bare(
        KTOTrainer,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        precompute_ref_logps=True,
        calculate_KL=True,
        _compute_kl_logps=lambda *_: policy,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
    )
    reference_sums = torch.where(answers.trained, answers.ref, 0).sum(1)
    inputs = answers.inputs(label=right, ref_logps=reference_sums, ref_KL_logps=reference)
    theirs = both(lambda logp: trainer._compute_loss(answers.model(logp), inputs, False), answers.logp)

    def loss(logp: Tensor) -> Tensor:
        ratio = torch.cat(answers.ratios(logp))
        weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
        return preference.kto(ratio, right, (policy - reference).mean(), beta=0.3, **weights).mean()

    return Pair(theirs, both(loss, answers.logp))


def reward_case(what: str, margin: bool, centering: float | None) -> None:
    @check(what, "TRL", "RewardTrainer.compute_loss")
    def _(seed: int) -> Pair:
        case = Case(seed)
        scores, wanted = case.normal(10), case.uniform(5)
        trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=centering))
        given = {"attention_mask": torch.ones(10, 3)} | ({"margin": wanted} if margin else {})
        theirs = both(
            lambda x: trainer.compute_loss(lambda **_: SimpleNamespace(logits=x[:, None]), dict(given)), scores
        )

        def loss(x: Tensor) -> Tensor:
            options = {"margin": wanted if margin else 0.0, "centering": centering or 0.0}
            return preference.bradley_terry(*x.chunk(2), **options).mean()

        return Pair(theirs, both(loss, scores))


reward_case("reward model", False, None)


reward_case("reward model with margin", True, None)


reward_case("reward model with centering", False, 0.05)


reward_case("reward model with margin and centering", True, 0.05)
