"""The input of `birl plan --simulate`: the times of the parts of a training, each with where its figure comes from.

A scenario is read from YAML or JSON files and `section.key=value` words, later ones win. What is not given is
SmolLM2-135M on two CPU cores (benchmarks/README.md); there a "GPU" is such a machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from birl.errors import BirlError

Lengths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine. A decoding step of n sequences with c tokens of context together takes `table`(n), or
    base + per_sequence n where there is no table, and per_context c on top [s]."""

    gpus: int = 1
    """GPUs of one engine."""
    table: tuple[tuple[float, float], ...] = ((1, 0.01434), (16, 0.01664), (32, 0.02225), (64, 0.03388))
    """(sequences, seconds of a step), read as straight lines between; beyond the ends the line goes on."""
    base: float = 0.0
    """[s]"""
    per_sequence: float = 0.0
    """[s]"""
    per_context: float = 0.0
    """[s per token of context]"""
    prefill: float = 1600.0
    """Prompt tokens per second. Decoding stands still meanwhile."""
    max_batch: int = 64
    """Sequences at once; the others wait in the engine's queue."""
    share_prompts: bool = True
    """An engine computes a prompt once for all its answers of that group."""
    recompute_kv: bool = True
    """New weights make an engine compute the contexts of what is running again."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A replica holds the whole model; replicas split the batch by samples and add their gradients in a ring:
    seconds = constant + per_token x (tokens of the fullest replica) + 2 (R - 1) / R x bytes / bandwidth."""

    gpus: int = 1
    """GPUs of one replica."""
    constant: float = 0.0
    """Of a step, whatever its size [s]."""
    per_token: float = 0.00121
    """Of one replica [s]."""
    bytes: float = 538e6
    """Gradient [bytes]."""
    bandwidth: float = 1e9
    """Of a replica to the next [bytes/s]."""
    share_prompts: bool = True
    """A prompt is trained once for all answers of its group."""
    trained: float = 1.0
    """Share of the tokens that have a gradient; the others are not computed [0 to 1]."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """New weights: transferred while engines go on, then every engine stands still for `pause`. The learner waits."""

    every: int = 1
    """Training steps."""
    pause: float = 0.1
    """[s]"""
    bytes: float = 269e6
    """Weights [bytes]."""
    bandwidth: float = 1e9
    """What each engine receives [bytes/s]."""
    source_bandwidth: float = 0.0
    """What all engines receive together [bytes/s]; 0: no limit, as with a tree or a broadcast."""
    switch: float = 0.0
    """Where generation and training share the GPUs: to change from one to the other and back [s per step]."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The lengths of answers are drawn from `tokens`, whole groups at once where it is a list of lists, so that the
    prompts with long answers stay together; or lognormal with `mean` and `sigma`, cut at `max`."""

    prompt: float = 45.0
    """[tokens]"""
    tokens: Lengths = ()
    """Measured answers [tokens]."""
    mean: float = 64.0
    """Before the cut [tokens per turn]."""
    sigma: float = 0.6
    """Of the logarithm. 0: all have the same length."""
    max: int = 256
    """[tokens per turn]"""
    turns: tuple[float, float] = (1, 1)
    """Fewest and most, uniform."""
    wait: tuple[float, float] = (0, 0)
    """For the environment between two turns, uniform [s]."""
    observation: float = 0.0
    """What the environment adds before the next turn [tokens]."""
    reward: tuple[float, float] = (0, 0)
    """From the last token to the reward, uniform [s]."""


@dataclass(frozen=True, kw_only=True)
class Run:
    gpus: tuple[int, ...] = (8, 64)
    """Numbers of GPUs to split."""
    prompts_per_gpu: float = 1.0
    """Prompts of a training step, for each GPU."""
    prompts: int = 0
    """Prompts of a training step, however many GPUs there are; 0: prompts_per_gpu decides."""
    group_size: int = 8
    """Episodes per prompt."""
    max_staleness: tuple[int, ...] = (0, 1, 2, 4, 8)
    """To compare [training steps]."""
    order_window: int = 0
    """Groups that may be overtaken by later ones, where the staleness allows it."""
    route: str = "episode"
    """What is sent to the engine with the fewest open answers, and stays there: an episode | a whole group."""
    engines: tuple[int, ...] = ()
    """Numbers of engines to try, instead of a choice; what is left of the GPUs learns."""
    steps: int = 0
    """Training steps to simulate. 0: at least 8, behind a start of two turns of the slots that is not counted."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured, to compare the simulation with it."""

    seconds_per_step: float = 0.0
    """[s]; 0: nothing was measured."""
    engines: int = 1
    learners: int = 1
    """Replicas."""
    shared: bool = False
    """Generation and training took turns on the same GPUs."""
    max_staleness: int = 0


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
    if scenario.learner.trained > 1:
        raise BirlError(f"learner.trained={scenario.learner.trained:g}: is a share, at most 1.")
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
