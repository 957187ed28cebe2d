"""What `birl plan --simulate` is told: the times of the parts of a training, each with where its figure comes from.

A scenario is read from YAML or JSON files and `section.key=value` words, later ones win. What nobody gives is
SmolLM2-135M on two CPU cores (benchmarks/README.md); there a "GPU" is such a machine.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from birl.config.check import did_you_mean
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
class Failures:
    """A failing engine begins its open answers again after `restart`. A failing learner ends the run, which goes on
    from the last checkpoint after `restart`; what was not trained by then is rolled out again."""

    hours_between: float = 0.0
    """Mean time between the failures of one GPU [h]; 0: there are none."""
    restart: float = 120.0
    """[s]"""
    checkpoint_every: int = 10
    """Training steps."""
    checkpoint: float = 0.0
    """To write one; nothing else happens on the learner meanwhile [s]."""


@dataclass(frozen=True, kw_only=True)
class Run:
    gpus: tuple[int, ...] = (8, 64, 1024, 16384)
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
    """`sources`: key -> where its figure comes from; keys that nobody gave are not in it."""

    engine: Engine = field(default_factory=Engine)
    learner: Learner = field(default_factory=Learner)
    sync: Sync = field(default_factory=Sync)
    episodes: Episodes = field(default_factory=Episodes)
    failures: Failures = field(default_factory=Failures)
    run: Run = field(default_factory=Run)
    result: Result = field(default_factory=Result)
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


SECTIONS = tuple(f.name for f in fields(Scenario) if f.name != "sources")
COMPONENTS = ("engine", "learner", "sync", "episodes")
POSITIVE = (
    *("engine.gpus", "engine.prefill", "engine.max_batch", "learner.gpus", "learner.bandwidth", "sync.every"),
    *("sync.bandwidth", "episodes.mean", "episodes.max", "failures.checkpoint_every", "run.gpus", "run.group_size"),
    *("run.prompts_per_gpu", "run.engines", "result.engines", "result.learners"),
)
CPU = "SmolLM2-135M on two CPU cores, benchmarks/results"
ASSUMED = "assumed"
#: where the defaults come from
DEFAULT_SOURCES = {
    "engine.table": f"measured: {CPU}/rollout.json",
    "engine.prefill": "assumed: twice the learner's tokens per second",
    "engine.max_batch": "birl's default",
    "learner.per_token": f"measured: {CPU}/grpo_step.json, 1.46 s for 1,204 tokens, the constant part in it",
    "learner.bytes": "computed: 134.5 million float32 numbers",
    "sync.bytes": "computed: 134.5 million bfloat16 numbers",
}
BEHAVIOUR = ("gpus", "share_prompts", "recompute_kv", "every")  # settings, not figures


def source(scenario: Scenario, key: str) -> str:
    return scenario.sources.get(key) or DEFAULT_SOURCES.get(key, ASSUMED)


def read(words: list[str], base: Scenario | None = None) -> Scenario:
    """Files and `section.key=value` words; presets are files in all but name. Raises `BirlError` naming the key."""
    scenario = base or Scenario()
    for word in words:
        key, equals, text = word.partition("=")
        if equals and not Path(word).exists():
            scenario = merged(scenario, _nested(key, _value(key, text)), "given")
        elif word in PRESETS:
            scenario = merged(scenario, PRESETS[word](), "")
        else:
            scenario = merged(scenario, _file(Path(word)), f"given in {Path(word).name}")
    return checked(scenario)


def merged(scenario: Scenario, values: Mapping[str, Any], origin: str) -> Scenario:
    """`values`: section -> key -> value, and `sources`: a key or a section -> text. Those that `sources` does not name
    come from `origin`."""
    sources = dict(scenario.sources)
    told = values.get("sources", {})
    if not isinstance(told, Mapping):
        raise BirlError(f"sources: must map keys to texts, not {told!r}.")
    changed: dict[str, Any] = {}
    for name, section in values.items():
        if name == "sources":
            continue
        if name not in SECTIONS:
            raise BirlError(f"{name}: there is no such section; {', '.join(SECTIONS)}.{did_you_mean(name, SECTIONS)}")
        if not isinstance(section, Mapping):
            raise BirlError(f"{name}: is a section with keys, such as {name}.{fields(getattr(scenario, name))[0].name}.")
        kinds = {f.name: _kind(f.type) for f in fields(getattr(scenario, name))}
        for key in section:
            if key not in kinds:
                raise BirlError(f"{name}.{key}: there is no such key; {', '.join(kinds)}.{did_you_mean(key, kinds)}")
            sources[f"{name}.{key}"] = str(told.get(f"{name}.{key}") or told.get(name) or origin)
        found = {key: converted(f"{name}.{key}", kinds[key], value) for key, value in section.items()}
        if name == "engine" and {"base", "per_sequence"} & set(found):
            found.setdefault("table", ())  # or the table would hide them
        changed[name] = replace(getattr(scenario, name), **found)
    return replace(scenario, **changed, sources=sources)


def _kind(annotation: Any) -> str:
    return annotation.__name__ if type(annotation) is type else str(annotation)


def converted(key: str, kind: str, value: Any) -> Any:
    """A value of YAML or JSON as the type of the key, or a `BirlError` that says what it must be."""
    try:
        found = _convert(key, kind, value)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        raise BirlError(f"{key}={value!r}: {EXPECTED.get(key) or EXPECTED.get(kind, 'is not possible')}.") from None
    _numbers(key, found)
    return found


EXPECTED = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "str": "must be episode or group",
    "tuple[float, float]": "must be a number, or [least, most]",
    "tuple[int, ...]": "must be a list of whole numbers, as in [8,64]",
    str(Lengths): "must be a list of answer lengths, or a list of such lists, one a group",
    "engine.table": "must map sequences to the seconds of a step, as in {1: 0.014, 16: 0.017}",
}


def _convert(key: str, kind: str, value: Any) -> Any:
    if key == "engine.table":
        rows = value.items() if isinstance(value, Mapping) else value
        return tuple(sorted((_whole(int(n)), _number(s)) for n, s in rows))
    if kind == str(Lengths):
        nested = [row if isinstance(row, list) else [row] for row in value]
        return tuple(tuple(_whole(n) for n in row) for row in nested)
    if kind == "tuple[float, float]":
        low, high = value if isinstance(value, list) else (value, value)
        return _number(low), _number(high)
    if kind == "tuple[int, ...]":
        return tuple(_whole(n) for n in (value if isinstance(value, list) else [value]))
    if kind == "bool":
        if not isinstance(value, bool):
            raise TypeError
        return value
    if kind == "str":
        if value not in ("episode", "group"):
            raise ValueError
        return value
    return _whole(value) if kind == "int" else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _whole(value: Any) -> int:
    if _number(value) != int(value):
        raise ValueError
    return int(value)


def _numbers(key: str, found: Any) -> None:
    flat = list(_flat(found))
    if any(not math.isfinite(x) or x < 0 for x in flat):
        raise BirlError(f"{key}: must not be negative, nor infinite.")
    if key in POSITIVE and any(x == 0 for x in flat):
        raise BirlError(f"{key}: must be above 0.")
    if key in ("episodes.turns", "episodes.wait", "episodes.reward") and found[0] > found[1]:
        raise BirlError(f"{key}={list(found)}: the least is above the most.")


def _flat(value: Any) -> Any:
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    elif not isinstance(value, str):
        yield float(value)


def checked(scenario: Scenario) -> Scenario:
    """What involves several keys."""
    engine, run, episodes = scenario.engine, scenario.run, scenario.episodes
    if not engine.table and engine.base + engine.per_sequence <= 0:
        raise BirlError("engine.base and engine.per_sequence: a step takes no time; give one, or engine.table.")
    if engine.table and min(_line(engine.table, 1), _line(engine.table, engine.max_batch)) <= 0:
        raise BirlError(f"engine.table: a step of 1 or of engine.max_batch={engine.max_batch} would take no time.")
    if len({n for n, _ in engine.table}) < len(engine.table) or any(n < 1 for n, _ in engine.table):
        raise BirlError("engine.table: numbers of sequences must be different and at least 1.")
    if any(not row for row in episodes.tokens) or any(n < 1 for row in episodes.tokens for n in row):
        raise BirlError("episodes.tokens: every answer has at least one token, every group at least one answer.")
    if episodes.turns[0] < 1 or any(t != int(t) for t in episodes.turns):
        raise BirlError(f"episodes.turns={list(episodes.turns)}: must be whole numbers of at least 1.")
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
    """Seconds of a step without its context, for 0 to max_batch sequences (0: nothing to do)."""
    if engine.table:
        return [_line(engine.table, max(n, 1)) for n in range(engine.max_batch + 1)]
    return [engine.base + engine.per_sequence * n for n in range(engine.max_batch + 1)]


def _file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(PRESETS)
        raise BirlError(
            f"{path}: can not be read ({getattr(error, 'strerror', None) or 'no text'}). Name a YAML or JSON file, the "
            f"folder of a run, a preset ({names}), or section.key=value."
        ) from None
    try:
        found = json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))
    except (json.JSONDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise BirlError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(found, Mapping):
        raise BirlError(f"{path}: must hold sections ({', '.join(SECTIONS)}), each with its keys.")
    return found


def _value(key: str, text: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(f"it: {text}"))["it"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        raise BirlError(f"{key}={text}: is no number, list or text that YAML knows.") from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    name, dot, rest = key.partition(".")
    if not dot:
        owners = [s for s in SECTIONS if key in {f.name for f in fields(Scenario.__dataclass_fields__[s].default_factory)}]  # type: ignore[arg-type]
        hint = f" Did you mean {owners[0]}.{key}?" if owners else ""
        raise BirlError(f"{key}: keys have a section ({', '.join(SECTIONS)}), as in engine.max_batch=64.{hint}")
    return {name: {rest: value}}


def h200(parameters: float = 8e9, kv_bytes: float = 147_456, learner_gpus: int = 8) -> dict[str, Any]:
    """An 8-billion-parameter model in bfloat16 on H200s, from the public data sheet alone: 989 TFLOP/s, 4.8 TB/s,
    50 GB/s between machines. `kv_bytes`: of one token (36 layers, 8 heads of 128, keys and values)."""
    flops, memory, network = 989e12, 4.8e12, 50e9
    replica = learner_gpus * flops * 0.4
    return {
        "engine": {
            "base": 2 * parameters / (memory * 0.6),
            "per_sequence": 2 * parameters / (flops * 0.5),
            "per_context": kv_bytes / (memory * 0.6),
            "prefill": flops * 0.5 / (2 * parameters),
            "max_batch": 256,
        },
        "learner": {
            "gpus": learner_gpus,
            "constant": 0.5,
            "per_token": 6 * parameters / replica,
            "bytes": 2 * parameters,
            "bandwidth": network,
        },
        "sync": {"pause": 0.5, "bytes": 2 * parameters, "bandwidth": network * 0.5, "switch": 5.0},
        "episodes": {"prompt": 256, "mean": 2000, "sigma": 0.8, "max": 16384},
        "run": {"group_size": 16},
        "sources": {
            "engine.base": "assumed: weights [bytes] / (0.6 x 4.8 TB/s)",
            "engine.per_sequence": "assumed: 2 x parameters / (0.5 x 989 TFLOP/s)",
            "engine.per_context": "assumed: 147,456 bytes of keys and values / (0.6 x 4.8 TB/s)",
            "engine.prefill": "assumed: 0.5 x 989 TFLOP/s / (2 x parameters)",
            "learner.per_token": "assumed: 6 x parameters / (0.4 x 8 x 989 TFLOP/s)",
            "learner.bandwidth": "assumed: 400 Gbit/s",
            "learner.bytes": "computed: bfloat16 gradient",
            "sync.bytes": "computed: bfloat16 weights",
            "sync.bandwidth": "assumed: half of 400 Gbit/s",
            **dict.fromkeys(("engine", "learner", "sync", "episodes", "run"), "assumed"),
        },
    }


PRESETS = {"smollm2_cpu": dict[str, Any], "h200_8b": h200}
