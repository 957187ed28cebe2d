"""What stops a step of reinforcement learning, and the warning of one that continued with less."""

from birl.config import schema
from birl.errors import BirlError
from birl.rollout.pipeline import Step
from birl.track.units import counted


def staleness(oldest: int, config: schema.Rollout) -> None:
    """The bound that `rollout/pipeline.py` proves. `oldest`: steps since the oldest group was begun."""
    if oldest > config.max_staleness:
        raise BirlError(
            f"A group was begun {counted(oldest, 'step')} ago, and rollout.max_staleness={config.max_staleness}. "
            "That is a mistake in birl: please report it, with the ledger.jsonl of this run."
        )


def refill(step: Step, config: schema.RL) -> str:
    """The pipeline gives up after max_refill and hands over what it has; the step goes on with that."""
    wanted, asked = config.rollout.prompts, len(step.groups) + len(step.refused)
    if len(step.groups) >= wanted or len(step.refused) <= config.algorithm.max_refill * wanted:
        return ""
    return (
        f"Step {step.number}: only {len(step.groups)} of {asked} groups have rewards that differ "
        f"(algorithm.max_refill={config.algorithm.max_refill:g}). Where that lasts, the prompts are too easy or too "
        "hard by now."
    )


#: nats a token that right engines and learners stay below: birl's differ by less than 1e-5 in float32; in bfloat16 by
#: 0.04 with published models, and by 0.43 with large random weights in two implementations
GAPS = {"float32": 0.002, "bfloat16": 0.5}


def gap(mean: float, version: int, config: schema.RL) -> None:
    """`mean`: between the log-probs of engine and learner, of the same tokens and weights [nats a token]. Raises
    `BirlError` above learner.max_logprob_gap."""
    kind = config.model.dtype if config.engine.recompute_kv else "bfloat16"  # keys of older weights differ more
    most = config.learner.max_logprob_gap or GAPS[kind]
    if not mean <= most:
        raise BirlError(
            f"The engine's log-probs of tokens of version {version} differ from the learner's by {mean:.3g} nats a "
            f"token on average; learner.max_logprob_gap={most:g} is allowed. The engine does not sample from the "
            "weights that are trained."
        )
