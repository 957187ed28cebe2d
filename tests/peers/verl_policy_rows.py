"""birl's losses, denominators, divergences and corrections beside verl's own functions."""

import sys
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from birl.algorithms import corrections, kl, selection, surrogates, values
from tests.peers.compare import Case, Pair, both, check
from tests.peers.verl_rows import CORE, OFF, actor

sys.modules.setdefault("ray", MagicMock(__spec__=None))  # as in verl_rows

from verl.trainer.ppo import core_algos as verl  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper as rollout  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402


def by_verl(case: Case, name: str, mode: str, config: ActorConfig, weights: Tensor | None = None):
    """verl's policy loss -> value, gradient [N]."""
    function = verl.get_policy_loss_fn(name)
    given = {"response_mask": case.mask.double(), "loss_agg_mode": mode, "config": config}
    return case.theirs(lambda logp: function(case.old, logp, case.advantages, **given, rollout_is_weights=weights)[0])


def clip_case(what: str, *, far: float = 0.4, dual: float = 0.0, low: float = 0.2, high: float = 0.28) -> None:
    @check(what, "verl", CORE + "compute_policy_loss_vanilla")
    def _(seed: int) -> Pair:
        case = Case(seed, far=far)
        if far > 10:  # log-ratios down to -30 and up to 30, for probabilities that are none
            case.old = case.logp + (case.uniform(*case.mask.shape) * 2 - 1) * 30
        config = actor(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual or OFF)
        options = {"clip_low": low, "clip_high": high, "dual_clip": dual}
        return Pair(by_verl(case, "vanilla", "token-mean", config), case.ours(surrogates.clip, options=options))


clip_case("PPO clip, DAPO's clip-higher")
clip_case("PPO clip, log-ratios up to ±30", far=30)
clip_case("dual clip, c = 1.5", far=0.8, dual=1.5)


@check("PPO clip times a correction", "verl", CORE + "compute_policy_loss_vanilla(rollout_is_weights)")
def _(seed: int) -> Pair:
    case = Case(seed)
    weights = case.uniform(*case.mask.shape) * 2
    theirs = by_verl(case, "vanilla", "token-mean", actor(), weights)
    options = {"clip_low": 0.2, "clip_high": 0.2}
    return Pair(theirs, case.ours(surrogates.clip, options=options, factor=case.flat(weights)))


def loss_case(what: str, name: str, function: str, mode: str, denominator: str, surrogate, ours: dict, **keys) -> None:
    @check(what, "verl", CORE + function)
    def _(seed: int) -> Pair:
        case = Case(seed)
        return Pair(by_verl(case, name, mode, actor(**keys)), case.ours(surrogate, denominator, options=ours))


BOUNDS, NARROW = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05}, {"clip_low": 0.03, "clip_high": 0.05}
GSPO = ("gspo", "compute_policy_loss_gspo")
loss_case("GSPO, mean of answers", *GSPO, "seq-mean-token-mean", "sequence", surrogates.gspo, NARROW, **BOUNDS)
loss_case("GSPO, token mean", *GSPO, "token-mean", "token", surrogates.gspo, NARROW, **BOUNDS)
loss_case(
    "GMPO", "geo_mean", "compute_policy_loss_geo_mean", "token-mean", "sequence", surrogates.gmpo, NARROW, **BOUNDS
)
loss_case("CISPO", "cispo", "compute_policy_loss_cispo", "token-mean", "token", surrogates.cispo, NARROW, **BOUNDS)
TAU = {"tau_positive": 1.0, "tau_negative": 1.05}
loss_case("SAPO", "sapo", "compute_policy_loss_sapo", "seq-mean-token-mean", "sequence", surrogates.sapo, TAU)
loss_case("REINFORCE", "gpg", "compute_policy_loss_gpg", "token-mean", "token", surrogates.reinforce, {})


@check("REINFORCE with truncated importance sampling", "verl", CORE + "compute_policy_loss_bypass_mode")
def _(seed: int) -> Pair:
    case = Case(seed)
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.1}
    config = actor(PolicyLossConfig(rollout_correction=correction))  # type: ignore[arg-type]
    ratio = case.flat(case.logp - case.old)
    factor = corrections.importance(ratio, case.sample, level="token", mode="truncate", low=0.0, high=1.1)
    return Pair(by_verl(case, "bypass_mode", "token-mean", config), case.ours(surrogates.reinforce, factor=factor))


def dppo_case(divergence: str, threshold: float, cut: float) -> None:
    note = "written as -M sg[w] A log π: value of birl's times log π, gradient the same"
    if cut < 20:
        note += "; and w cut at 3, ActorConfig's clip_ratio_c: the function's own 20 is never reached"

    @check(f"DPPO {divergence}, w cut at {cut:g}", "verl", CORE + f"compute_policy_loss_dppo_{divergence}", note)
    def _(seed: int) -> Pair:
        case = Case(seed, far=0.8)
        case.logp = -case.uniform(*case.mask.shape) * 2 - 0.05
        case.old = (case.logp + 0.8 * case.normal(*case.mask.shape)).clamp(max=-1e-3)
        theirs = by_verl(case, f"dppo_{divergence}", "token-mean", actor(
            clip_ratio_low=threshold, clip_ratio_high=threshold, clip_ratio_c=cut
        ))  # fmt: skip
        options = {"divergence": divergence, "threshold": threshold}
        plain = case.ours(surrogates.dppo, options=options)
        logp, old = case.flat(case.logp), case.flat(case.old)
        factor = (cut / (logp - old).exp()).clamp(max=1)
        each = surrogates.dppo(logp, old, case.flat(case.advantages), case.sample, **options).loss  # type: ignore
        value = (each * factor * logp * case.weights("token")).sum()
        _, gradient = case.ours(surrogates.dppo, options=options, factor=factor)
        return Pair(theirs, (value, gradient), plain)


dppo_case("tv", 0.1, 20.0)
dppo_case("kl", 0.05, 20.0)
dppo_case("tv", 0.1, 3.0)


def clip_cov_case(what: str, clip: float, differs: str) -> None:
    @check(what, "verl", CORE + "compute_policy_loss_clip_cov", differs)
    def _(seed: int) -> Pair:
        case = Case(seed)
        share, low, high = 0.2, 0.1, 2.0
        loss = PolicyLossConfig(clip_cov_ratio=share, clip_cov_lb=low, clip_cov_ub=high)
        torch.manual_seed(seed)
        theirs = by_verl(case, "clip_cov", "token-mean", actor(loss, clip_ratio_low=clip, clip_ratio_high=clip))
        options = {"clip_low": clip, "clip_high": clip}
        logp, old, advantages = case.flat(case.logp), case.flat(case.old), case.flat(case.advantages)
        cov = selection.covariance(logp, advantages)
        bound = surrogates.clip(logp, old, advantages, case.sample, **options).clipped
        found = []
        for c in (cov.masked_fill(bound, -torch.inf), cov):
            generator = torch.Generator().manual_seed(seed)
            held = selection.clip_cov(c, share=share, low=low, high=high, generator=generator)
            found.append(case.ours(surrogates.clip, options=options, factor=(~held).double()))
        return Pair(theirs, found[0], found[1] if differs else ())


clip_cov_case("Clip-Cov, no token clipped by PPO", 1e6, "")
clip_cov_case("Clip-Cov", 0.2, "draws only among tokens that PPO's clip leaves; the paper draws among all, as birl")


@check("KL-Cov", "verl", CORE + "compute_policy_loss_kl_cov")
def _(seed: int) -> Pair:
    case = Case(seed)
    config = actor(PolicyLossConfig(kl_cov_ratio=0.2, ppo_kl_coef=0.7))
    cov = selection.covariance(case.flat(case.logp), case.flat(case.advantages))
    held = selection.kl_cov(cov, share=0.2)
    ours = case.ours(surrogates.importance, held=held, held_coef=0.7)
    return Pair(by_verl(case, "kl_cov", "token-mean", config), ours)


@check(
    "KL-Cov, share of less than one token",
    "verl",
    CORE + "compute_policy_loss_kl_cov",
    "takes at least one token; the paper's top share of N tokens is none then, as in birl",
)
def _(seed: int) -> Pair:
    case = Case(seed)
    config = actor(PolicyLossConfig(kl_cov_ratio=1e-4, ppo_kl_coef=0.7))
    cov = selection.covariance(case.flat(case.logp), case.flat(case.advantages))
    ours, plain = (
        case.ours(surrogates.importance, held=selection.kl_cov(cov, share=share), held_coef=0.7)
        for share in (1 / len(cov), 1e-4)
    )
    return Pair(by_verl(case, "kl_cov", "token-mean", config), ours, plain)


# Denominators


def denominator_case(mode: str, name: str, limit: int | None = None, given: int | None = None) -> None:
    @check(f"denominator {name}, {mode}", "verl", CORE + "agg_loss")
    def _(seed: int) -> Pair:
        case = Case(seed)
        theirs = case.theirs(lambda x: verl.agg_loss(x, case.mask.double(), mode, loss_scale_factor=given))
        return Pair(theirs, both(lambda x: (x * case.weights(name, limit)).sum(), case.flat(case.logp)))


denominator_case("token-mean", "token")
denominator_case("seq-mean-token-mean", "sequence")
denominator_case("seq-mean-token-sum", "constant", limit=1)
denominator_case("seq-mean-token-sum-norm", "constant", limit=20, given=20)


def empty_case(mode: str, name: str) -> None:
    @check(
        f"denominator {name}, {mode}, an answer without trained tokens",
        "verl",
        CORE + "agg_loss",
        "leaves it out of the number of answers; birl's function counts it, as TRL's, and its caller leaves masked "
        "answers out. The papers have no such answer. Equal with verl's global_batch_size",
    )
    def _(seed: int) -> Pair:
        case = Case(seed)
        case.mask[0] = False
        case.lengths, case.sample = case.mask.sum(1), case.mask.nonzero()[:, 0]
        factor = {"loss_scale_factor": case.limit}
        counted = len(case.lengths)
        theirs, given = (
            case.theirs(lambda x, n=n: verl.agg_loss(x, case.mask.double(), mode, global_batch_size=n, **factor))
            for n in (None, counted)
        )
        value, gradient = both(lambda x: (x * case.weights(name)).sum(), case.flat(case.logp))
        share = counted / (counted - 1)
        assert torch.allclose(given[0], value), "not even with its global_batch_size"
        return Pair(theirs, (value * share, gradient * share), (value, gradient))


empty_case("seq-mean-token-mean", "sequence")
empty_case("seq-mean-token-sum-norm", "constant")


# KL


def kl_case(theirs: str, ours: str) -> None:
    @check(f'KL {ours}, "{theirs}"', "verl", CORE + "kl_penalty")
    def _(seed: int) -> Pair:
        case = Case(seed)
        logp, ref = case.flat(case.logp), case.flat(case.ref)
        function = kl.ESTIMATORS[ours]
        return Pair(both(lambda x: verl.kl_penalty(x, ref, theirs), logp), both(lambda x: function(x, ref), logp))


for name in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("abs", "abs")):
    kl_case(*name)


@check(
    "KL k3, far apart",
    "verl",
    CORE + "kl_penalty",
    "cut to [-10, 10]; the estimator is not, and without the cut it is unbiased",
)
def _(seed: int) -> Pair:
    case = Case(seed, far=3)
    logp = case.flat(case.logp)
    ref = logp + case.normal(len(logp)) * 3
    plain = both(lambda x: kl.k3(x, ref), logp)
    ours = both(lambda x: kl.k3(x, ref).clamp(max=10), logp)
    return Pair(both(lambda x: verl.kl_penalty(x, ref, "low_var_kl"), logp), ours, plain)


@check("KL, k3's value and k2's gradient", "verl", CORE + "kl_penalty(k3+)")
def _(seed: int) -> Pair:
    case = Case(seed)
    logp, ref = case.flat(case.logp), case.flat(case.ref)
    value, gradient = kl.k3(logp, ref), both(lambda x: kl.k2(x, ref), logp)[1]
    return Pair(both(lambda x: verl.kl_penalty(x, ref, "k3+"), logp), (value, gradient))


@check("adaptive KL coefficient", "verl", CORE + "AdaptiveKLController")
def _(seed: int) -> Pair:
    generator = np.random.default_rng(seed)
    theirs, ours = verl.AdaptiveKLController(0.2, 6.0, 1000), kl.AdaptiveKL(0.2, 6.0, 1000)
    path: list[tuple[float, float]] = []
    for found, episodes in zip(generator.uniform(0, 12, 50), generator.integers(1, 200, 50), strict=True):
        theirs.update(float(found), int(episodes))
        ours.update(float(found), int(episodes))
        path.append((float(theirs.value), ours.coef))
    columns = torch.tensor(path, dtype=torch.float64)
    return Pair((columns[:, 0],), (columns[:, 1],))


# The critic


@check("value loss with clip", "verl", CORE + "compute_value_loss")
def _(seed: int) -> Pair:
    case = Case(seed)
    old, new, returns = (case.normal(*case.mask.shape) for _ in range(3))
    new = old + 0.5 * new
    theirs = case.theirs(lambda v: verl.compute_value_loss(v, returns, old, case.mask.double(), 0.2)[0], new)

    def loss(v: Tensor) -> Tensor:
        each, _ = values.value_loss(v, case.flat(old), case.flat(returns), clip=0.2)
        return (each * case.weights("token")).sum()

    return Pair(theirs, both(loss, case.flat(new)))


# Off-policy corrections


def importance_case(level: str, mode: str) -> None:
    what = {"truncate": "truncated", "mask": "masked"}[mode]
    function = "rollout_corr_helper.compute_rollout_correction_weights"

    @check(f"{what} importance sampling, {level}", "verl", function)
    def _(seed: int) -> Pair:
        case = Case(seed)
        low, high = (0.7, 1.6)
        threshold = high if mode == "truncate" else f"{low}_{high}"
        theirs, _ = rollout.compute_rollout_correction_weights(
            case.logp - case.old, case.mask.double(), level, threshold
        )
        ratio = case.flat(case.logp - case.old)
        ours = corrections.importance(ratio, case.sample, level=level, mode=mode, low=low, high=high)
        return Pair((case.flat(theirs),), (ours,))


for level in ("token", "sequence"):
    for mode in ("truncate", "mask"):
        importance_case(level, mode)


def rejection_case(what: str, option: str, threshold: str, ours) -> None:
    @check(what, "verl", f"rollout_corr_helper.compute_rollout_rejection_mask({option})")
    def _(seed: int) -> Pair:
        case = Case(seed)
        ratio = case.logp - case.old
        theirs, _ = rollout.compute_rollout_rejection_mask(ratio, case.mask.double(), option, threshold)
        kept = ours(case.flat(ratio), case.sample, case.flat(case.advantages))
        return Pair((case.flat(theirs),), (kept.double(),))


def kept_inside(level: str):
    """verl's k1 is -log w: its bounds are those of 1 / w."""
    bounds = {"low": 1 / 1.25, "high": 1 / 0.8}
    return lambda ratio, sample, _: corrections.importance(ratio, sample, level=level, mode="mask", **bounds) > 0


def kept_by_divergence(ratio: Tensor, sample: Tensor, advantages: Tensor) -> Tensor:
    return ~corrections.rejected_by_divergence(ratio, sample, advantages, limit=0.05)


rejection_case(
    "masked importance sampling, geometric: what is kept", "seq_mean_k1", "0.8_1.25", kept_inside("geometric")
)
rejection_case("masked importance sampling, token: what is kept", "token_k1", "0.8_1.25", kept_inside("token"))
rejection_case("rejection by divergence", "seq_mean_k3", "0.05", kept_by_divergence)
