"""The figures of a training step for metrics.jsonl."""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

from birl.learner.learner import Stats
from birl.parallel.machine import peak_memory
from birl.rollout import assemble, pipeline
from birl.rollout.records import outcome_metrics, reward_metrics, said_by_policies
from birl.train.credit import Credited
from birl.types import Group

if TYPE_CHECKING:
    from birl.learner.policies import Policies
    from birl.train.rl import Loop


def step_metrics(
    loop: "Loop", step: pipeline.Step, credited: Credited, stats: Stats, waited: float, training: float
) -> dict[str, float]:
    """All figures of a step. `waited` [s]: for its groups."""
    worker, everything = loop.worker, (*step.groups, *step.refused)
    counters = loop.take_counters()
    computed = [s for s in credited.samples if worker.has_gradient(s)]
    trained = sum(len(s.tokens) for s in computed)
    metrics = outcome_metrics(everything) | reward_metrics(everything)
    metrics |= {
        "groups/kept": float(len(step.groups)),
        "groups/refilled": float(len(step.refused)),
        "groups/no_signal": float(sum(not assemble.has_signal(g, loop.usage) for g in everything)),
        "loss": stats.loss,
        "entropy": stats.mean("entropy"),
        "clip_fraction": stats.mean("clip_fraction"),
        "ratio/mean": stats.mean("ratio"),
        "ratio/max": stats.maxima.get("ratio", nan),
        "mismatch/mean": stats.first_gap,
        "grad_norm": stats.grad_norm,
        "lr": worker.rate,
        "updates/done": float(stats.updates),
        "updates/skipped": float(stats.skipped),
        "updates/nonfinite": float(stats.nonfinite),
        "tokens/generated": float(counters.tokens),
        "tokens/trained": float(trained),
        "tokens/computed": float(stats.computed),
        "tokens/learned": float(sum(assemble.trained_lengths(computed))),
        "speed/generate": counters.tokens / max(counters.seconds, 1e-9),
        "speed/guessed": counters.accepted / counters.tokens if counters.tokens else nan,
        "engine/cache_hit": counters.reused / known if (known := counters.reused + counters.prefilled) else nan,
        "speed/train": trained / max(training, 1e-9),
        "time/generate": counters.seconds,
        "time/train": training,
        "time/wait": waited,
        "time/checkpoint": loop.run.saving,
        "memory/peak": peak_memory(),
    }
    metrics |= policy_metrics(everything, stats, worker.learner.policies)
    staleness = loop.schedule.max_staleness
    if staleness == 0:
        metrics["time/reward"] = max(waited - counters.seconds, 0.0)
    told = [n for n in stats.sums if n in ("kl", "held", "factor") or n.startswith("critic/")]
    metrics |= {name: stats.mean(name) for name in told} | stats.other
    for name, of, n in (("observations/loss", "observed", "observations"), ("divergence", "divergence", "compared")):
        metrics |= {name: stats.sums[of] / count} if (count := stats.sums.get(n)) else {}
    if worker.credit.hints is not None:
        metrics["hint/share"] = sum(s.hinted is not None for s in credited.samples) / max(len(credited.samples), 1)
    if credited.kl == credited.kl:
        metrics |= {"kl/episode": credited.kl, "kl/coef": worker.kl.coef}
    if staleness > 0:
        metrics |= {"queue/ready": float(step.ready), "queue/running": float(step.running)}
    return metrics | worker.ages.figures(credited.samples, staleness) | weights_metrics(loop)


def policy_metrics(groups: Sequence[Group], stats: Stats, policies: "Policies | None") -> dict[str, float]:
    """What each policy did and learned, where they have names."""
    norms = {} if policies is None else policies.norms
    result = said_by_policies(groups)
    for name, own in stats.of.items():
        told = {"loss": own.loss, "entropy": own.mean("entropy"), "mismatch": own.first_gap}
        told |= {"learned": float(own.count), "grad_norm": norms.get(name, stats.grad_norm)}
        result |= {f"{figure}/{name}": value for figure, value in told.items() if name}
    return result


def weights_metrics(loop: "Loop") -> dict[str, float]:
    """What the last update of the engines cost; nothing where they have the learner's own weights."""
    sent = loop.sent
    if not sent.digest:
        return {}
    return {
        "time/weights": sent.seconds,
        "weights/paused": sent.paused,
        "weights/bytes": float(sent.bytes),
        "weights/gap": sent.gap,
    }
