"""The input of `birl plan --simulate`: times of the parts of a training, each with its source.

A scenario is read from YAML or JSON files and `section.key=value` words, later ones win. What is not given is
SmolLM2-135M on two CPU cores (benchmarks/README.md); there a "GPU" is such a machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool

from birl.errors import BirlError


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):  # "7" and true are not numbers
        raise ValueError("must be a number")
    return value


def _pair(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value, value)


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _groups(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of answer lengths, or a list of such lists, one a group")
    return [_several(row) for row in value]


def _rows(value: Any) -> Any:
    try:
        return sorted((int(n), seconds) for n, seconds in (value.items() if isinstance(value, Mapping) else value))
    except (TypeError, ValueError):
        raise ValueError("must map sequences to the seconds of a step, as in {1: 0.014, 16: 0.017}") from None


Amount = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[Amount, Field(gt=0)]
Share = Annotated[Amount, Field(le=1)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Count = Annotated[Whole, Field(ge=1)]
Table = Annotated[tuple[tuple[Whole, Amount], ...], BeforeValidator(_rows)]
Lengths = Annotated[tuple[tuple[Whole, ...], ...], BeforeValidator(_groups)]
Range = Annotated[tuple[Amount, Amount], BeforeValidator(_pair)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_several)]
Wholes = Annotated[tuple[Whole, ...], BeforeValidator(_several)]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine. A decoding step of n sequences with c tokens of context in total takes `table`(n), or base +
    per_sequence n without a table, plus per_context c [s]."""

    gpus: Count = 1
    """GPUs of one engine."""
    table: Table = ((1, 0.01434), (16, 0.01664), (32, 0.02225), (64, 0.03388))
    """(sequences, seconds of a step), interpolated linearly and extrapolated beyond the ends."""
    base: Amount = 0.0
    """[s]"""
    per_sequence: Amount = 0.0
    """[s]"""
    per_context: Amount = 0.0
    """[s per token of context]"""
    prefill: Positive = 1600.0
    """Prompt tokens per second. Decoding stops meanwhile."""
    max_batch: Count = 64
    """Concurrent sequences; the others wait in the engine's queue."""
    share_prompts: StrictBool = True
    """An engine computes a prompt once for all answers of a group (prefix cache)."""
    recompute_kv: StrictBool = True
    """New weights make an engine compute the KV cache of running sequences again."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A replica holds the whole model; replicas split the batch by samples and all-reduce their gradients in a ring:
    seconds = constant + per_token x (tokens of the fullest replica) + 2 (R - 1) / R x bytes / bandwidth."""

    gpus: Count = 1
    """GPUs of one replica."""
    constant: Amount = 0.0
    """Constant part of a step [s]."""
    per_token: Amount = 0.00121
    """Time per token of one replica [s]."""
    bytes: Amount = 538e6
    """Size of the gradient [bytes]."""
    bandwidth: Positive = 1e9
    """Bandwidth from a replica to the next [bytes/s]."""
    share_prompts: StrictBool = True
    """A prompt is trained once for all answers of its group."""
    trained: Share = 1.0
    """Share of the tokens that have a gradient; the others are not computed."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Weight sync: a transfer while engines continue, then all engines stop for `pause`. The learner waits."""

    every: Count = 1
    """Interval of weight syncs [training steps]."""
    pause: Amount = 0.1
    """[s]"""
    bytes: Amount = 269e6
    """Size of the weights [bytes]."""
    bandwidth: Positive = 1e9
    """Bandwidth of each engine [bytes/s]."""
    source_bandwidth: Amount = 0.0
    """Total bandwidth to all engines [bytes/s]; 0: no limit, as with a tree or a broadcast."""
    switch: Amount = 0.0
    """If generation and training share GPUs: time of both changes between them [s per step]."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Lengths of answers are drawn from `tokens` (of a list of lists whole groups, so that prompts with long answers
    stay together), or are lognormal with `mean` and `sigma`, cut at `max`."""

    prompt: Amount = 45.0
    """Length of a prompt [tokens]."""
    tokens: Lengths = ()
    """Measured lengths of answers [tokens]."""
    mean: Positive = 64.0
    """Mean length before the cut [tokens per turn]."""
    sigma: Amount = 0.6
    """Standard deviation of the logarithm. 0: all have the same length."""
    max: Count = 256
    """Longest answer [tokens per turn]."""
    turns: Range = (1, 1)
    """Fewest and most turns, uniform."""
    wait: Range = (0, 0)
    """Time of the environment between two turns, uniform [s]."""
    observation: Amount = 0.0
    """Observation that the environment adds before the next turn [tokens]."""
    reward: Range = (0, 0)
    """Time from the last token to the reward, uniform [s]."""


@dataclass(frozen=True, kw_only=True)
class Run:
    gpus: Counts = (8, 64)
    """Numbers of GPUs to split."""
    prompts_per_gpu: Positive = 1.0
    """Prompts of a training step, per GPU."""
    prompts: Whole = 0
    """Prompts of a training step, for any number of GPUs; 0: prompts_per_gpu decides."""
    group_size: Count = 8
    """Episodes per prompt."""
    max_staleness: Wholes = (0, 1, 2, 4, 8)
    """Values of max_staleness to compare [training steps]."""
    order_window: Whole = 0
    """Number of groups that later ones may overtake, if the staleness allows it."""
    route: Literal["episode", "group"] = "episode"
    """Unit of routing to the engine with the fewest unfinished answers: an episode | a whole group."""
    engines: Counts = ()
    """Numbers of engines to try, instead of a search; the remaining GPUs train."""
    steps: Whole = 0
    """Training steps to simulate. 0: at least 8, after an uncounted start of two rounds of the slots."""
    seed: Whole = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measured result that the simulation is compared with."""

    seconds_per_step: Amount = 0.0
    """[s]; 0: nothing was measured."""
    engines: Count = 1
    learners: Count = 1
    """Replicas."""
    shared: StrictBool = False
    """Generation and training took turns on the same GPUs."""
    max_staleness: Whole = 0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`sources`: key -> source of its figure; only keys that were given."""

    engine: Engine = field(default_factory=Engine)
    learner: Learner = field(default_factory=Learner)
    sync: Sync = field(default_factory=Sync)
    episodes: Episodes = field(default_factory=Episodes)
    run: Run = field(default_factory=Run)
    result: Result = field(default_factory=Result)
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


SECTIONS = tuple(f.name for f in fields(Scenario) if f.name != "sources")
COMPONENTS = ("engine", "learner", "sync", "episodes")
CPU = "measured: SmolLM2-135M on two CPU cores"
SETTINGS = ("gpus", "share_prompts", "recompute_kv", "every", "turns", "prompt", "mean", "sigma", "max", "observation")
#: source of the defaults
DEFAULT_SOURCES = {
    "engine.table": f"{CPU}, results/rollout.json",
    "engine.prefill": "assumed: twice the learner's tokens per second",
    "engine.max_batch": "birl's default",
    "learner.constant": "assumed: it is in learner.per_token",
    "learner.per_token": f"{CPU}, results/grpo_step.json",
    "learner.bytes": "computed: 134.5 million float32 numbers",
    "sync.bytes": "computed: 134.5 million bfloat16 numbers",
}


def source(scenario: Scenario, key: str) -> str:
    told = scenario.sources.get(key) or DEFAULT_SOURCES.get(key)
    return told or ("default" if key.partition(".")[2] in SETTINGS else "assumed")


def checked(scenario: Scenario) -> Scenario:
    """Check conditions that involve several keys."""
    engine, run, episodes = scenario.engine, scenario.run, scenario.episodes
    if engine.max_batch > 100_000:
        raise BirlError(f"engine.max_batch={engine.max_batch}: no engine has more than 100,000 sequences at once.")
    if not engine.table and engine.base + engine.per_sequence <= 0:
        raise BirlError("engine.base and engine.per_sequence: a step takes no time; give one, or engine.table.")
    if len({n for n, _ in engine.table}) < len(engine.table) or any(n < 1 for n, _ in engine.table):
        raise BirlError("engine.table: numbers of sequences must be different and at least 1.")
    if min(step_seconds(engine)) <= 0:
        raise BirlError(f"engine.table: a step of at most engine.max_batch={engine.max_batch} would take no time.")
    if any(not row for row in episodes.tokens) or any(n < 1 for row in episodes.tokens for n in row):
        raise BirlError("episodes.tokens: every answer has at least one token, every group at least one answer.")
    if episodes.turns[0] < 1 or any(t != int(t) for t in episodes.turns):
        raise BirlError(f"episodes.turns={list(episodes.turns)}: must be whole numbers of at least 1.")
    for name in ("turns", "wait", "reward"):
        low, high = getattr(episodes, name)
        if low > high:
            raise BirlError(f"episodes.{name}=[{low:g}, {high:g}]: the least is above the most.")
    for name, values in (("run.gpus", run.gpus), ("run.max_staleness", run.max_staleness)):
        if not values:
            raise BirlError(f"{name} is empty; name at least one.")
    return scenario


def _line(table: tuple[tuple[float, float], ...], n: float) -> float:
    """The table at n, interpolated linearly and extrapolated beyond its ends."""
    if len(table) == 1:
        return table[0][1]
    right = next((i for i, (at, _) in enumerate(table) if at >= n), len(table) - 1) or 1
    (n0, s0), (n1, s1) = table[right - 1], table[right]
    return s0 + (n - n0) * (s1 - s0) / (n1 - n0)


def step_seconds(engine: Engine) -> list[float]:
    """Seconds of a decoding step without the context's part, for 0 (as for 1) to max_batch sequences."""
    if engine.table:
        return [_line(engine.table, max(n, 1)) for n in range(engine.max_batch + 1)]
    return [engine.base + engine.per_sequence * max(n, 1) for n in range(engine.max_batch + 1)]
