"""Decisions that follow from several keys: values of `auto`, and the implementation that a setting selects."""

import math
import re
from dataclasses import dataclass

from birl.allocator import cores
from birl.config.schema import RL, Engine, Eval, Stage, reward_functions
from birl.errors import BirlError

SELF = "self"  # value of algorithm.teacher: the model that learns
CRITIC = ("gae", "turn_gae")  # advantages that need a critic
UNCLIPPED = ("reinforce", "importance")  # surrogates without a trust region
#: surrogates whose papers' ratio, mask or bound is against the policy that sampled, of any age: GSPO
#: arXiv:2507.18071 eq. 7, GMPO arXiv:2507.20673 eq. 5, CISPO arXiv:2506.13585 eq. 4, SAPO arXiv:2511.20347 eq. 5, DPPO
#: arXiv:2602.04879 eq. 11. M2PO arXiv:2510.01161 is known by algorithm.second_moment
AGAINST_BEHAVIOUR = ("gspo", "gmpo", "cispo", "sapo", "dppo")
RATIOS = ("clip", *AGAINST_BEHAVIOUR)  # surrogates that differ only if the ratio is not 1

TEACHER = re.compile(r"([\w.-]+)=(.+)")  # an entry of algorithm.teachers

OWN = "my_file.py:MyEngine"  # stands for all classes of the user
NAME = re.compile(r"[\w.-]+/[\w.-]+")  # experiment/trial
LAUNCHED = "birl-launch/"  # prefix of names of engines that `birl launch` starts beside the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An engine. `methods`: how it receives weights; `package`: requirement of its server; `module`: its part of birl,
    with `speak` and `start`, empty if it is in the run's process; `own`: it is `birl serve`, whose weights have the
    learner's names and types."""

    methods: tuple[str, ...]
    module: str = ""
    package: str = ""
    own: bool = False


FOLDERS = ("reload", "shared", "checkpoint")
ENGINES: dict[str, Kind] = {
    "embedded": Kind(methods=("memory",)),
    "birl": Kind(
        module="birl.engines.birl",
        methods=("reload", "shared", "volume", "direct", "nccl", "ipc", "checkpoint"),
        own=True,
    ),
    "vllm": Kind(module="birl.engines.vllm", package="vllm", methods=(*FOLDERS, "nccl")),
    "sglang": Kind(module="birl.engines.sglang", package="sglang", methods=(*FOLDERS, "nccl")),
    OWN: Kind(methods=("reload", "shared", "direct")),
}
SERVERS = tuple(name for name, kind in ENGINES.items() if kind.module)

USUAL = 10.0  # seconds for a call of a reward function
JUDGED = 120.0  # seconds for language models to judge a group
ROOM = 5.0  # seconds beside the tests of code: the first call starts the sandbox


def proximal(config: RL) -> str:
    """algorithm.proximal, with auto resolved: answers of older weights, or of int8 weights, are corrected by an
    importance weight, unless the surrogate's ratio is against the policy that sampled them."""
    keys = config.algorithm
    if keys.proximal != "auto":
        return keys.proximal
    if keys.surrogate in AGAINST_BEHAVIOUR or keys.second_moment > 0:
        return "behaviour"
    others = config.rollout.max_staleness > 0 or config.engine.weights != "same"
    return "recompute" if others else "behaviour"


def remembers(config: RL) -> bool:
    """Whether the log-probs of the proximal policy are computed before the first update. With a single update they are
    the learner's, which that update computes anyway."""
    updates = config.algorithm.updates_per_batch * config.algorithm.passes
    return proximal(config) == "recompute" and updates > 1


def corrects(config: RL) -> bool:
    """Whether there is an importance weight of the proximal policy against the sampling policy."""
    return proximal(config) != "behaviour" and config.algorithm.correction != "none"


def algorithm_notes(config: RL) -> list[str]:
    """Notes at the start of a run on keys that have no effect in it but are no mistake."""
    keys = config.algorithm
    if keys.surrogate not in RATIOS or proximal(config) != "recompute" or remembers(config):
        return []
    return [
        f"algorithm.surrogate={keys.surrogate} bounds nothing in this run: with one update a batch the ratio starts "
        "from the learner's own log-probs (algorithm.proximal=recompute) and is 1, whichever surrogate is set; "
        "algorithm.correction alone weighs answers of older weights. To bound their ratios, set "
        "algorithm.proximal=behaviour, or algorithm.updates_per_batch=2 or more."
    ]


def teachers_of(config: RL) -> dict[str, str]:
    """The model of each teacher by name, "" for a single one; empty without teachers."""
    keys = config.algorithm
    if keys.teachers:
        return {match[1]: match[2] for entry in keys.teachers if (match := TEACHER.fullmatch(entry))}
    return {"": keys.teacher} if keys.teacher else {}


def compares(config: RL | Eval) -> bool:
    """Whether the reward needs a right answer in every row."""
    return config.env.kind == "single_turn" and "math" in reward_functions(config)


def kind_of(engine: Engine) -> str:
    """engine.kind, or `OWN` for a class of the user."""
    return OWN if ":" in engine.kind else engine.kind


def weights_method(config: RL) -> str:
    """weights.method, with auto resolved."""
    if config.weights.method != "auto":
        return config.weights.method
    return "memory" if config.engine.kind == "embedded" else "reload"


def answers_at_once(config: RL) -> int:
    """Largest number of concurrent training answers: those of as many steps as rollout.max_staleness lets overlap."""
    rollout = config.rollout
    steps = max(rollout.max_staleness - config.weights.sync_every + 2, 1)
    return steps * rollout.prompts * (rollout.group_size + rollout.oversample)


def reward_timeout(config: RL | Eval) -> float:
    """Time limit of a call of a reward function [s]."""
    if config.reward.timeout:
        return config.reward.timeout
    functions = reward_functions(config)
    usual = JUDGED if "judge" in functions else USUAL
    return max(usual, tests_seconds(config)) if "code" in functions else usual


def tests_seconds(config: RL | Eval) -> float:
    """Time limit of `code` for one group [s]."""
    return math.ceil(most_answers(config) / at_once(config)) * config.sandbox.total_seconds + ROOM


def most_answers(config: RL | Eval) -> int:
    """Largest number of answers that one call judges."""
    if isinstance(config, RL):
        return max(config.validation.samples, config.rollout.group_size + config.rollout.oversample)
    return config.validation.samples


def at_once(config: RL | Eval) -> int:
    """Number of programs that one reward worker runs concurrently."""
    return config.sandbox.workers or max(1, cores() // config.reward.workers)


def total_steps(config: RL | Stage, rows: int, step: int = 0, consumed: int = 0) -> int | None:
    """Number of steps of a run on so many rows, of which `step` steps have `consumed` some: fewer than they could if
    the data ended there once. None: unknown."""
    if config.steps:
        return config.steps
    if isinstance(config, RL) and config.algorithm.dynamic_sampling:
        return None  # it is unknown how many prompts a step will take
    each = config.rollout.prompts if isinstance(config, RL) else config.batch_size
    left = max(config.epochs * rows - consumed, 0)
    return step + -(-left // each)


def check_warmup(config: RL | Stage, rows: int) -> None:
    """Raises `BirlError` if a run on so many rows (0: unknown) ends before its learning rate is optimizer.lr."""
    each = config.algorithm.updates_per_batch * config.algorithm.passes if isinstance(config, RL) else 1
    updates, warmup = each * (total_steps(config, rows) or 0), config.optimizer.warmup_steps
    if 0 < updates <= warmup:
        raise BirlError(
            f"optimizer.warmup_steps={warmup}: the run has only {updates} optimizer step{'s' * (updates > 1)}, so it "
            "would end before reaching optimizer.lr; lower it, or train longer."
        )
