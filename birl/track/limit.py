"""One sentence about the bottleneck of a run, and the keys that would change it. Rules over `Shares`; if none applies,
the bottleneck is unknown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birl.track.shares import GROUP, Shares
from birl.track.units import counted

MUCH = 0.15  # share of the time from which on a wait matters
FEW = 3  # steps; fewer are not enough
STRAGGLERS = 0.35  # concurrent requests relative to their peak: below it a few long answers are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """`side`: generation | stragglers | environments | rewards | training | weights | validation | checkpoints |
    turns | balanced | unknown. `keys`: what to change."""

    side: str
    sentence: str
    keys: tuple[str, ...] = ()


def limit(shares: Shares | None, config: Mapping[str, Any]) -> Limit:
    if shares is None or shares.count < FEW:
        steps = 0 if shares is None else shares.count
        return Limit(side="unknown", sentence=f"Cannot tell from {counted(steps, 'step')}: {FEW} are needed.")
    for result in (_pauses(shares), _rl(shares, config) if GROUP in shares.learner else _offline(shares)):
        if result is not None:
            return result
    most, share = next(iter(shares.learner.items()))
    return Limit(
        side="unknown",
        sentence=f"No clear limit: no part waits for long; most of the learner's time is {phrase(most)} ({share:.0%}).",
    )


def _pauses(shares: Shares) -> Limit | None:
    """Pauses of both sides: validation and checkpoints."""
    validate, save = shares.learner.get("validate", 0.0), shares.learner.get("checkpoint", 0.0)
    if max(validate, save) < 2 * MUCH:
        return None
    if validate >= save:
        return Limit(
            side="validation",
            sentence=f"Validation takes {validate:.0%} of the time: a larger validation.every, or fewer rows "
            "(data.max_validation_samples).",
            keys=("validation.every", "data.max_validation_samples"),
        )
    return Limit(
        side="checkpoints",
        sentence=f"Saving checkpoints takes {save:.0%} of the time: a larger checkpoint.every, or "
        "checkpoint.asynchronous=true.",
        keys=("checkpoint.every", "checkpoint.asynchronous"),
    )


def _offline(shares: Shares) -> Limit | None:
    train = shares.learner.get("train", 0.0)
    if train < 0.5:
        return None
    return Limit(
        side="training",
        sentence=f"Training takes {train:.0%} of the time, and nothing else is waited for: more ranks "
        "(parallel.fsdp or parallel.ddp), or fuller micro-batches (learner.tokens_per_microbatch).",
        keys=("parallel.fsdp", "parallel.ddp", "learner.tokens_per_microbatch"),
    )


def _rl(shares: Shares, config: Mapping[str, Any]) -> Limit | None:
    if not shares.processes or not any(name.startswith("engine") for name in shares.processes):
        return Limit(side="unknown", sentence="Cannot tell: the trace says nothing about engines.")
    if shares.weights >= MUCH and shares.weights >= shares.learner[GROUP]:
        return Limit(
            side="weights",
            sentence=f"New weights take {shares.weights:.0%} of the learner's time: send them less often "
            "(weights.sync_every=2 with rollout.max_staleness of at least 1), or another way (weights.method).",
            keys=("weights.sync_every", "weights.method"),
        )
    waited = shares.learner[GROUP]
    if waited >= MUCH:
        return _waiting(shares, config, waited)
    train = shares.learner.get("train", 0.0)
    admission = shares.processes.get("rollout", {}).get("wait:the next training step", 0.0)
    if 1 - shares.busy >= 2 * MUCH and train >= 0.5:
        return Limit(
            side="training",
            sentence=f"The engines wait {1 - shares.busy:.0%} of the time, as the learner trains {train:.0%} of it"
            + (f" and no new group may begin for {admission:.0%}" if admission >= MUCH else "")
            + ": more ranks for the learner (parallel.fsdp or parallel.ddp), fuller micro-batches "
            "(learner.tokens_per_microbatch), or fewer engines (engine.count).",
            keys=("parallel.fsdp", "parallel.ddp", "learner.tokens_per_microbatch", "engine.count"),
        )
    if train + waited >= 0.7:
        return Limit(
            side="balanced",
            sentence=f"Balanced: the learner trains {train:.0%} of the time and waits {waited:.0%}, the engines work "
            f"{shares.busy:.0%}. Faster needs more of both.",
        )
    return None


def _waiting(shares: Shares, config: Mapping[str, Any], waited: float) -> Limit:
    """The bottleneck while the learner waits for groups."""
    embedded, ahead = config.get("engine.kind") == "embedded", config.get("rollout.max_staleness", 0)
    says = f"The learner waits {waited:.0%} of the time for "
    later = () if ahead else ("rollout.max_staleness",)
    if shares.busy_in_wait < 0.5:
        rest = {name: share for name, share in shares.episodes.items() if name != "engine"}
        name, share = next(iter(rest.items()), ("", 0.0))
        if share < MUCH:
            return Limit(
                side="unknown",
                sentence=f"{says}groups, and the engines work in only {shares.busy_in_wait:.0%} of that; the trace "
                "does not say what else was waited for.",
            )
        if name == "rewards":
            return Limit(
                side="rewards",
                sentence=f"{says}groups, and the engines work in only {shares.busy_in_wait:.0%} of that: groups wait "
                f"for rewards ({share:.0%} of the episodes' time). More reward.workers, a faster reward function"
                + ("" if ahead else ", or rollout.max_staleness=1, so that others are sampled meanwhile")
                + ".",
                keys=("reward.workers", *later),
            )
        return Limit(
            side="environments",
            sentence=f"{says}groups, and the engines work in only {shares.busy_in_wait:.0%} of that: episodes wait for "
            f"{name} ({share:.0%} of their time). More episodes at once (rollout.prompts), or a faster environment"
            + ("" if ahead else "; rollout.max_staleness=1 lets others be sampled meanwhile")
            + ".",
            keys=("rollout.prompts", *later),
        )
    if shares.crowd < STRAGGLERS:
        return Limit(
            side="stragglers",
            sentence=f"{says}groups, mostly for a few long answers: average concurrency is {shares.crowd:.0%} of "
            "its peak. A larger rollout.max_staleness or rollout.order_window lets others go ahead, "
            "rollout.oversample cuts the last ones, a smaller rollout.max_tokens bounds them.",
            keys=("rollout.max_staleness", "rollout.order_window", "rollout.oversample", "rollout.max_tokens"),
        )
    if embedded:
        return Limit(
            side="generation",
            sentence=f"{says}generation, on the same device, so they take turns: shorter answers (rollout.max_tokens), "
            "or engines of their own beside the learner (engine.kind=birl with rollout.max_staleness=1).",
            keys=("rollout.max_tokens", "engine.kind", "rollout.max_staleness"),
        )
    if not ahead:
        return Limit(
            side="turns",
            sentence=f"{says}generation, and the engines rest while it trains: rollout.max_staleness=1 lets both work; "
            "then engine.count, or shorter answers (rollout.max_tokens).",
            keys=("rollout.max_staleness", "engine.count", "rollout.max_tokens"),
        )
    return Limit(
        side="generation",
        sentence=f"{says}generation, and the engines work {shares.busy:.0%} of it: more engines (engine.count), or "
        "shorter answers (rollout.max_tokens).",
        keys=("engine.count", "rollout.max_tokens"),
    )


PHRASES = {
    "wait:rollout": "waiting for groups",
    "wait:engines": "waiting for new weights to arrive",
    "wait:rank 0": "waiting for rank 0",
    "sync": "sending weights",
    "load": "taking weights",
    "admission": "waiting for the next training step",
}


def phrase(name: str) -> str:
    """Words for a span's name. Example: phrase("wait:environment") == "waiting for environment" """
    return PHRASES.get(name) or (f"waiting for {name[5:]}" if name.startswith("wait:") else name)
