"""Fits the input of `birl plan --simulate RUN` to the measured times in the folder of a finished run."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.plan.fleet import Floats
from birl.plan.scenario import Engine, step_seconds
from birl.regular import read_json
from birl.track.log import Growing, parsed, read_jsonl

ENOUGH = 4  # least number of steps for a fit
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # raised by damaged figures
TABLE_OF_SMOLLM2 = "assumed: shape of SmolLM2's table, scaled to the run's tokens per second"


@dataclass(slots=True)
class Rolled:
    """Records of one training step in rollouts.jsonl."""

    groups: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # group -> answers [tokens]
    prompts: list[int] = field(default_factory=list[int])  # of each group [tokens]
    samples: int = 0  # tokens, each with its prompt
    turns: list[int] = field(default_factory=list[int])
    between: list[int] = field(default_factory=list[int])  # tokens that environments added


def from_run(folder: Path) -> dict[str, Any]:
    """The sections that `simulate_command.merged` takes, with the source of each figure. Raises `BirlError` if the
    folder has no finished step of `birl rl`, or damaged figures."""
    try:
        return _figures(folder)
    except OSError as error:
        raise BirlError(f"{error.filename or folder} cannot be read: {error.strerror or error}.") from error
    except (*DAMAGE, ArithmeticError) as error:
        raise BirlError(
            f"{folder}: the figures of config.json and metrics.jsonl do not fit together ({type(error).__name__}: "
            f"{error})."
        ) from error


def _figures(folder: Path) -> dict[str, Any]:
    config, metrics = _config(folder / "config.json"), _metrics(folder / "metrics.jsonl")
    needed = ("time/generate", "time/train", "tokens/generated", "tokens/trained", "length/mean", "length/max")
    steps = [m for m in metrics if all(isinstance(m.get(name), int | float) for name in needed)]
    if not steps:
        raise BirlError(f"{folder}: metrics.jsonl holds no step of `birl rl` with times and tokens.")
    steps = steps[1:] if len(steps) > ENOUGH else steps  # the first one warms up
    rolled = _rolled(folder / "rollouts.jsonl", {m["step"] for m in steps})
    engines, engine_gpus, learner_gpus = _machines(config)
    size, batch, all_steps = config["rollout.group_size"], config["engine.max_batch"], len(steps)
    steps = _undisturbed(steps, rolled, batch * engines)
    rolled = {step: its for step, its in rolled.items() if step in {m["step"] for m in steps}}
    name = f"measured: {folder.name}, {len(steps)} of {all_steps} steps"
    left = ("time/validate", "time/checkpoint")  # parts of a step that a simulation leaves out
    reward = float(np.median([m.get("time/reward") or 0.0 for m in steps]))
    result: dict[str, Any] = {
        "engine": {
            "gpus": engine_gpus,
            "max_batch": batch,
            "recompute_kv": bool(config.get("engine.recompute_kv", True)),
        },
        "learner": {"gpus": learner_gpus, "share_prompts": False},
        "sync": {"every": config.get("weights.sync_every", 1)},
        "episodes": {"reward": [reward, reward], "max": config["rollout.max_tokens"]},
        "run": {
            "prompts": config["rollout.prompts"],
            "group_size": size,
            "gpus": [max(8, 2 * max(engine_gpus, learner_gpus))],
            "order_window": config.get("rollout.order_window", 0),
        },
        "result": {
            "seconds_per_step": float(np.mean([m["time/step"] - sum(m.get(n) or 0.0 for n in left) for m in steps])),
            "engines": engines,
            "learners": 1,
            "shared": config["rollout.max_staleness"] == 0 and _embedded(config),
            "max_staleness": config["rollout.max_staleness"],
        },
        "sources": {
            **dict.fromkeys(
                ("engine.gpus", "engine.max_batch", "learner.gpus", "sync.every"), "the run's configuration"
            ),
            "learner.share_prompts": "as `tokens/trained` counts",
            "episodes.max": "the run's configuration",
            **dict.fromkeys(("episodes", "result"), name),
            "run": "the run's configuration",
        },
    }
    _engine(result, steps, rolled, engines, name)
    _learner(result, steps, rolled, name)
    _episodes(result, steps, rolled, config)
    return result


def _embedded(config: Mapping[str, Any]) -> bool:
    return config.get("engine.kind", "embedded") == "embedded"


def _machines(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Number of engines, GPUs of each, and GPUs of the learner, whose ranks count as one replica. Every data-parallel
    group of ranks has an embedded engine."""
    groups, ranks = (
        math.prod(config.get(f"parallel.{axis}", 1) for axis in axes) for axes in (("ddp", "fsdp"), ("cp", "tp"))
    )
    if _embedded(config):
        return groups, ranks, groups * ranks
    each = config.get("engine.tensor_parallel", 1) * config.get("engine.pipeline_parallel", 1)
    return config.get("engine.count", 1), each, groups * ranks


def _engine(
    scenario: dict[str, Any], steps: list[dict[str, Any]], rolled: Mapping[int, Rolled], engines: int, name: str
) -> None:
    """Fit time/generate = base x (decoding steps) + per_sequence x (tokens) + (prompt tokens) / prefill; each engine
    has its share of the tokens."""
    engine, sources = scenario["engine"], scenario["sources"]
    seconds = np.array([m["time/generate"] for m in steps])
    wanted = _work(steps, rolled, engine["max_batch"] * engines) / [1, engines, engines]
    # an answer of several turns takes more steps than are known here
    fits = bool((wanted[:, 0] >= wanted[:, 1] / engine["max_batch"] * 0.99).all())
    if len(steps) >= ENOUGH and fits and np.linalg.matrix_rank(wanted[:, :2] / wanted[:, :2].max(axis=0), 0.05) == 2:
        (base, each, prompt), error = nonnegative(wanted, seconds)
        if base + each > 0:
            engine |= {"base": base, "per_sequence": each}
            sources |= dict.fromkeys(
                ("engine.base", "engine.per_sequence"), f"{name}, fit off by {error:.0%} on average"
            )
            engine["prefill"] = 1 / prompt if prompt > 0 else 1e12
            sources["engine.prefill"] = sources["engine.base"] if prompt > 0 else "assumed: no time, none was seen"
            return
    tokens, total = wanted[:, 1].sum(), max(wanted[:, 0].sum(), 1)
    there = step_seconds(Engine(max_batch=engine["max_batch"]))
    at = min(max(round(tokens / total), 1), engine["max_batch"])
    scale = seconds.sum() / total / there[at]
    engine["table"] = {n: there[n] * scale for n in sorted({1, *(2**i for i in range(1, 12)), at}) if n < len(there)}
    sources["engine.table"] = f"{TABLE_OF_SMOLLM2} with {at} sequences"
    engine["prefill"], sources["engine.prefill"] = 1e12, "assumed: no time, it is in the table"


def _work(steps: list[dict[str, Any]], rolled: Mapping[int, Rolled], max_batch: int) -> Floats:
    """[steps, 3]: decoding steps, tokens, prompt tokens."""
    rows = []
    for m in steps:
        its = rolled.get(m["step"])
        lengths = [n for group in its.groups.values() for n in group] if its else []
        decoding = decoding_steps(lengths, max_batch) if lengths else m["length/max"]
        rows.append((decoding, m["tokens/generated"], sum(its.prompts) if its else 0))
    return np.array(rows, float)


def _undisturbed(steps: list[dict[str, Any]], rolled: Mapping[int, Rolled], max_batch: int) -> list[dict[str, Any]]:
    """Leave out steps that generated at less than half the usual speed for their size: another program had the
    machine."""
    if len(steps) < ENOUGH:
        return steps
    pace = np.array([m["time/generate"] for m in steps]) / _work(steps, rolled, max_batch)[:, 0]
    return [m for m, slow in zip(steps, pace > 2 * np.median(pace), strict=True) if not slow]


def _learner(scenario: dict[str, Any], steps: list[dict[str, Any]], rolled: Mapping[int, Rolled], name: str) -> None:
    """Fit time/train = constant + per_token x tokens/trained."""
    computed = [m for m in steps if m["tokens/trained"] > 0]
    if not computed:
        return  # nothing had a gradient
    tokens = np.array([m["tokens/trained"] for m in computed], float)
    seconds = np.array([m["time/train"] for m in computed])
    if len(computed) >= ENOUGH:
        (constant, each), error = nonnegative(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
        source = f"{name}, fit off by {error:.0%} on average"
    else:
        constant, each, source = 0.0, float(seconds.sum() / tokens.sum()), f"{name}, the constant part in it"
    scenario["learner"] |= {"constant": constant, "per_token": each}
    scenario["sources"] |= dict.fromkeys(("learner.constant", "learner.per_token"), source)
    samples = sum(rolled[m["step"]].samples for m in steps if m["step"] in rolled)
    trained = sum(m["tokens/trained"] for m in steps if m["step"] in rolled)
    if samples:
        scenario["learner"]["trained"] = min(trained / samples, 1.0)
        scenario["sources"]["learner.trained"] = name


def _episodes(scenario: dict[str, Any], steps: list[dict[str, Any]], rolled: Mapping[int, Rolled], config: Any) -> None:
    episodes, sources = scenario["episodes"], scenario["sources"]
    if rolled:
        episodes["tokens"] = [group for its in rolled.values() for group in its.groups.values() if group]
        episodes["prompt"] = float(np.mean([n for its in rolled.values() for n in its.prompts]))
        turns = [n for its in rolled.values() for n in its.turns]
        between = [n for its in rolled.values() for n in its.between]
        episodes["turns"] = [min(turns), max(turns)]
        episodes["observation"] = float(np.mean(between)) if between else 0.0
        return
    episodes["mean"] = float(np.mean([m["length/mean"] for m in steps]))
    sources["episodes.sigma"] = "assumed: there is no rollouts.jsonl"
    episodes["sigma"] = 0.6
    episodes["prompt"] = config.get("data.max_prompt_tokens") or 128
    sources["episodes.prompt"] = "assumed: there is no rollouts.jsonl"


def decoding_steps(lengths: Sequence[int], max_batch: int) -> int:
    """Number of steps until answers of these lengths are generated, in order, at most `max_batch` at once. Example:
    decoding_steps([3, 1, 1], 2) == 3"""
    ends: list[int] = []
    for length in lengths:
        start = heapq.heappop(ends) if len(ends) == max_batch else 0
        heapq.heappush(ends, start + length)
    return max(ends)


def nonnegative(columns: Floats, values: Floats) -> tuple[tuple[float, ...], float]:
    """Coefficients >= 0 with the least squared relative error, the best of all subsets of the few columns; and the mean
    relative error."""
    weighted = columns / values[:, None]
    best, error = np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), count):
            result, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(values)), rcond=None)
            off = float(np.square(weighted[:, chosen] @ result - 1).sum())
            if result.min() >= 0 and off < error * (1 - 1e-9):
                best, error = np.zeros(columns.shape[1]), off
                best[list(chosen)] = result
    return tuple(float(x) for x in best), float(np.abs(weighted @ best - 1).mean())


def _rolled(path: Path, steps: set[int]) -> dict[int, Rolled]:
    """Records by step; empty if there is no such file (track.rollouts=false)."""
    result: dict[int, Rolled] = {}
    lines = itertools.chain.from_iterable(Growing(path).new())  # the file may be larger than memory
    for number, line in enumerate(lines, 1):
        try:
            _add(parsed(path, number, line), result, steps)
        except DAMAGE as error:
            raise BirlError(f"{path}, line {number} is damaged ({type(error).__name__}: {error}).") from error
    return {step: its for step, its in result.items() if any(its.groups.values())}


def _add(record: dict[str, Any], rolled: dict[int, Rolled], steps: set[int]) -> None:
    if record.get("step") not in steps or not record.get("samples"):
        return
    its = rolled.setdefault(record["step"], Rolled())
    if record["group"] not in its.groups:
        its.prompts.append(record["samples"][0]["mask"].index(1) if 1 in record["samples"][0]["mask"] else 0)
    turns = 0
    for sample in record["samples"]:
        its.samples += len(sample["tokens"])
        runs = [(made, len(list(run))) for made, run in itertools.groupby(sample["mask"])]
        its.groups[record["group"]] += [n for made, n in runs if made]
        its.between += [n for made, n in runs[1:] if not made]
        turns += sum(bool(made) for made, _ in runs)
    its.turns.append(max(turns, 1))


def _config(path: Path) -> dict[str, Any]:
    try:
        result = read_json(path)
    except FileNotFoundError:
        raise BirlError(f"{path.parent}: is no run of birl; there is no {path.name} in it.") from None
    except ValueError as error:
        raise BirlError(f"{path}: {error}") from None
    if not isinstance(result, dict):
        raise BirlError(f"{path}: is no object of keys.")
    if missing := [key for key in KEYS if key not in result]:
        raise BirlError(f"{path}: has no {missing[0]}; only runs of `birl rl` can be simulated.")
    return result


KEYS = ("rollout.prompts", "rollout.group_size", "rollout.max_tokens", "rollout.max_staleness", "engine.max_batch")


def _metrics(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path)
    except FileNotFoundError:
        raise BirlError(f"{path.parent}: there is no {path.name} in it; has the run done a step?") from None
