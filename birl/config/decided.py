"""What keys come to together: `auto` decided, and which part of the package a setting means."""

import math
import re
from dataclasses import dataclass

from birl.allocator import cores
from birl.config.schema import RL, Engine, Eval, reward_functions

SELF = "self"  # as algorithm.teacher: the model that learns
CRITIC = ("gae", "turn_gae")  # advantages that need one
UNCLIPPED = ("reinforce", "importance")  # surrogates without a bound
#: surrogates whose papers' ratio, mask or bound is against the policy that sampled, however old it is: GSPO
#: arXiv:2507.18071 eq. 7, GMPO arXiv:2507.20673 eq. 5, CISPO arXiv:2506.13585 eq. 4, SAPO arXiv:2511.20347 eq. 5, DPPO
#: arXiv:2602.04879 eq. 11. M2PO arXiv:2510.01161 is known by algorithm.second_moment
AGAINST_BEHAVIOUR = ("gspo", "gmpo", "cispo", "sapo", "dppo")
RATIOS = ("clip", *AGAINST_BEHAVIOUR)  # surrogates that differ only where the ratio is not 1

TEACHER = re.compile(r"([\w.-]+)=(.+)")  # an entry of algorithm.teachers

OWN = "my_file.py:MyEngine"  # stands for every class of the user's
NAME = re.compile(r"[\w.-]+/[\w.-]+")  # experiment/trial
LAUNCHED = "birl-launch/"  # names of engines that `birl launch` starts beside the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An engine. `methods`: how it takes weights; `package`: what its server needs; `module`: its part of birl, with
    `speak` and `start`, empty where it is in the process of the run; `own`: it is `birl serve`, which names and types
    weights as the learner does."""

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

USUAL = 10.0  # seconds a call of a reward function may take
JUDGED = 120.0  # seconds that language models may take to judge a group
ROOM = 5.0  # seconds beside the tests of code themselves: the first call starts the sandbox


def proximal(config: RL) -> str:
    """algorithm.proximal, with auto decided: answers of older weights, or of weights in int8, are corrected by an
    importance weight, unless the surrogate's own ratio is against what sampled them."""
    keys = config.algorithm
    if keys.proximal != "auto":
        return keys.proximal
    if keys.surrogate in AGAINST_BEHAVIOUR or keys.second_moment > 0:
        return "behaviour"
    others = config.rollout.max_staleness > 0 or config.engine.weights != "same"
    return "recompute" if others else "behaviour"


def remembers(config: RL) -> bool:
    """Is the proximal policy computed before the first update? Where there is one update only, it is the learner in
    that update, whose log-probs are there anyway."""
    updates = config.algorithm.updates_per_batch * config.algorithm.passes
    return proximal(config) == "recompute" and updates > 1


def corrects(config: RL) -> bool:
    """Is there an importance weight of the proximal policy against the one that sampled?"""
    return proximal(config) != "behaviour" and config.algorithm.correction != "none"


def algorithm_notes(config: RL) -> list[str]:
    """What a run says at its start of keys that have no effect in it, and are no mistake."""
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
    """The model of each teacher by its name, which a single one has not; none without."""
    keys = config.algorithm
    if keys.teachers:
        return {match[1]: match[2] for entry in keys.teachers if (match := TEACHER.fullmatch(entry))}
    return {"": keys.teacher} if keys.teacher else {}


def compares(config: RL | Eval) -> bool:
    """Does the reward need a right answer in every row?"""
    return config.env.kind == "single_turn" and "math" in reward_functions(config)


def kind_of(engine: Engine) -> str:
    """engine.kind, or `OWN`."""
    return OWN if ":" in engine.kind else engine.kind


def weights_method(config: RL) -> str:
    """weights.method, with auto decided."""
    if config.weights.method != "auto":
        return config.weights.method
    return "memory" if config.engine.kind == "embedded" else "reload"


def answers_at_once(config: RL) -> int:
    """Answers of the training that are under way at once, at most: those of as many steps as rollout.max_staleness lets
    overlap."""
    rollout = config.rollout
    steps = max(rollout.max_staleness - config.weights.sync_every + 2, 1)
    return steps * rollout.prompts * (rollout.group_size + rollout.oversample)


def reward_timeout(config: RL | Eval) -> float:
    """Longest one call of a reward function may take [s]."""
    if config.reward.timeout:
        return config.reward.timeout
    functions = reward_functions(config)
    usual = JUDGED if "judge" in functions else USUAL
    return max(usual, tests_seconds(config)) if "code" in functions else usual


def tests_seconds(config: RL | Eval) -> float:
    """What `code` may take for one group [s]."""
    return math.ceil(most_answers(config) / at_once(config)) * config.sandbox.total_seconds + ROOM


def most_answers(config: RL | Eval) -> int:
    """Answers that one call judges."""
    if isinstance(config, RL):
        return max(config.validation.samples, config.rollout.group_size + config.rollout.oversample)
    return config.validation.samples


def at_once(config: RL | Eval) -> int:
    """Programs that one reward worker runs at once."""
    return config.sandbox.workers or max(1, cores() // config.reward.workers)
