"""The input of `birl plan --simulate`: the times of the parts of a training, each with where its figure comes from.

A scenario is read from YAML or JSON files and `section.key=value` words, later ones win. What is not given is
SmolLM2-135M on two CPU cores (benchmarks/README.md); there a "GPU" is such a machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool

from birl.errors import BirlError


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):  # "7" and true are none
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
    """One engine. A decoding step of n sequences with c tokens of context together takes `table`(n), or
    base + per_sequence n where there is no table, and per_context c on top [s]."""

    gpus: Count = 1
    """GPUs of one engine."""
    table: Table = ((1, 0.01434), (16, 0.01664), (32, 0.02225), (64, 0.03388))
    """(sequences, seconds of a step), read as straight lines between; beyond the ends the line goes on."""
    base: Amount = 0.0
    """[s]"""
    per_sequence: Amount = 0.0
    """[s]"""
    per_context: Amount = 0.0
    """[s per token of context]"""
    prefill: Positive = 1600.0
    """Prompt tokens per second. Decoding stands still meanwhile."""
    max_batch: Count = 64
    """Sequences at once; the others wait in the engine's queue."""
    share_prompts: StrictBool = True
    """An engine computes a prompt once for all its answers of that group."""
    recompute_kv: StrictBool = True
    """New weights make an engine compute the contexts of what is running again."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A replica holds the whole model; replicas split the batch by samples and add their gradients in a ring:
    seconds = constant + per_token x (tokens of the fullest replica) + 2 (R - 1) / R x bytes / bandwidth."""

    gpus: Count = 1
    """GPUs of one replica."""
    constant: Amount = 0.0
    """Of a step, whatever its size [s]."""
    per_token: Amount = 0.00121
    """Of one replica [s]."""
    bytes: Amount = 538e6
    """Gradient [bytes]."""
    bandwidth: Positive = 1e9
    """Of a replica to the next [bytes/s]."""
    share_prompts: StrictBool = True
    """A prompt is trained once for all answers of its group."""
    trained: Share = 1.0
    """Share of the tokens that have a gradient; the others are not computed."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """New weights: transferred while engines go on, then every engine stands still for `pause`. The learner waits."""

    every: Count = 1
    """Training steps."""
    pause: Amount = 0.1
    """[s]"""
    bytes: Amount = 269e6
    """Weights [bytes]."""
    bandwidth: Positive = 1e9
    """What each engine receives [bytes/s]."""
    source_bandwidth: Amount = 0.0
    """What all engines receive together [bytes/s]; 0: no limit, as with a tree or a broadcast."""
    switch: Amount = 0.0
    """Where generation and training share the GPUs: to change from one to the other and back [s per step]."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The lengths of answers are drawn from `tokens`, whole groups at once where it is a list of lists, so that the
    prompts with long answers stay together; or lognormal with `mean` and `sigma`, cut at `max`."""

    prompt: Amount = 45.0
    """[tokens]"""
    tokens: Lengths = ()
    """Measured answers [tokens]."""
    mean: Positive = 64.0
    """Before the cut [tokens per turn]."""
    sigma: Amount = 0.6
    """Of the logarithm. 0: all have the same length."""
    max: Count = 256
    """[tokens per turn]"""
    turns: Range = (1, 1)
    """Fewest and most, uniform."""
    wait: Range = (0, 0)
    """For the environment between two turns, uniform [s]."""
    observation: Amount = 0.0
    """What the environment adds before the next turn [tokens]."""
    reward: Range = (0, 0)
    """From the last token to the reward, uniform [s]."""


@dataclass(frozen=True, kw_only=True)
class Run:
    gpus: Counts = (8, 64)
    """Numbers of GPUs to split."""
    prompts_per_gpu: Positive = 1.0
    """Prompts of a training step, for each GPU."""
    prompts: Whole = 0
    """Prompts of a training step, however many GPUs there are; 0: prompts_per_gpu decides."""
    group_size: Count = 8
    """Episodes per prompt."""
    max_staleness: Wholes = (0, 1, 2, 4, 8)
    """To compare [training steps]."""
    order_window: Whole = 0
    """Groups that may be overtaken by later ones, where the staleness allows it."""
    route: Literal["episode", "group"] = "episode"
    """What is sent to the engine with the fewest open answers, and stays there: an episode | a whole group."""
    engines: Counts = ()
    """Numbers of engines to try, instead of a choice; what is left of the GPUs learns."""
    steps: Whole = 0
    """Training steps to simulate. 0: at least 8, behind a start of two turns of the slots that is not counted."""
    seed: Whole = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured, to compare the simulation with it."""

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
    """`sources`: key -> where its figure comes from; keys that were not given are not in it."""

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
#: where the defaults come from
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
    """What involves several keys."""
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
    """The table at n, by straight lines that go on beyond its ends."""
    if len(table) == 1:
        return table[0][1]
    right = next((i for i, (at, _) in enumerate(table) if at >= n), len(table) - 1) or 1
    (n0, s0), (n1, s1) = table[right - 1], table[right]
    return s0 + (n - n0) * (s1 - s0) / (n1 - n0)


def step_seconds(engine: Engine) -> list[float]:
    """Seconds of a step without its context, for 0 (as for 1) to max_batch sequences."""
    if engine.table:
        return [_line(engine.table, max(n, 1)) for n in range(engine.max_batch + 1)]
    return [engine.base + engine.per_sequence * max(n, 1) for n in range(engine.max_batch + 1)]
