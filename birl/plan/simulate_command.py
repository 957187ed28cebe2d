"""`birl plan --simulate`: how to split GPUs into engines and learners, which of them wait, and the gain of asynchronous
training, from measured times of the parts, which files and words give."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from birl.config.file import parse
from birl.data.parse import unique
from birl.errors import BirlError, did_you_mean, first_line, placed
from birl.plan.fleet import Draws
from birl.plan.run_figures import from_run
from birl.plan.scenario import COMPONENTS, SECTIONS, Scenario, checked, source
from birl.plan.sweep import Row, best_of, compare, compared_with, sweep
from birl.regular import read_text
from birl.track.units import counted

LITTLE = 0.05  # share of the time; with less waiting a split is balanced


def run(words: list[str], *, measured: str = "", as_json: bool = False) -> dict[str, Any]:
    """Print tables, or JSON. `measured`: a file that also holds a measured result, to compare with."""
    scenario = read([*([measured] if measured else []), *words])
    if measured and not scenario.result.seconds_per_step:
        raise BirlError(f"{measured}: has no result.seconds_per_step to compare with.")
    compared = compare(scenario) if scenario.result.seconds_per_step else None
    draws, progress = Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed), _progress()
    rows = [row for gpus in dict.fromkeys(scenario.run.gpus) for row in sweep(scenario, gpus, draws, progress)]
    best = [best_of([r for r in rows if r.gpus == gpus]) for gpus in dict.fromkeys(scenario.run.gpus)]
    advised = [(row, advice(row, compared_with(scenario, row, draws))) for row in best]
    progress("")
    result = {
        "figures": {key: {"value": value, "source": source(scenario, key)} for key, value in figures(scenario)},
        "measured": compared,
        "configurations": [asdict(row) for row in rows],
        "best": [asdict(row) | {"advice": text} for row, text in advised],
    }
    print(json.dumps(result, indent=1) if as_json else "\n".join(render(scenario, compared, rows, advised)))
    return result


def figures(scenario: Scenario) -> list[tuple[str, Any]]:
    """Every key that has an effect, with its value."""
    result = []
    for section in COMPONENTS:
        its = getattr(scenario, section)
        for name in (f.name for f in fields(its)):
            key, value = f"{section}.{name}", getattr(its, name)
            if name in HIDDEN.get(section, lambda its: ())(its):
                continue
            result.append((key, value))
    return result


#: keys without effect, because of another key
HIDDEN: dict[str, Callable[[Any], tuple[str, ...]]] = {
    "engine": lambda its: ("base", "per_sequence") if its.table else ("table",),
    "episodes": lambda its: ("mean", "sigma", "max") if its.tokens else ("tokens",),
}


def advice(row: Row, faster: Callable[..., bool]) -> str:
    """One sentence: what to change. `faster(engines=8)`: whether the same split with eight engines has faster steps;
    only what is faster is advised. `row` is the fastest split tried for its number of GPUs."""
    learners, engines = f"{row.learners_waiting:.0%}", f"{row.engines_waiting:.0%}"
    if row.shared:
        return "Generation and training take turns on the same GPUs; no split that was tried is faster."
    if max(row.learners_waiting, row.engines_waiting) < LITTLE:
        return "Balanced: no part waits for long."
    if row.max_staleness == 0:
        text = f"They take turns: learners wait {learners}, engines {engines} of the time; "
        return text + ("raise max_staleness." if faster(max_staleness=1) else "a max_staleness of 1 is no faster.")
    if row.learners_waiting >= row.engines_waiting:
        if row.engines_working_while_learners_wait < 0.5:
            text = (
                f"A few long answers hold up the steps: learners wait {learners} of the time, and the engines work "
                f"{row.engines_working_while_learners_wait:.0%} of that; "
            )
            more = faster(max_staleness=row.max_staleness + 1)
            return text + ("raise max_staleness." if more else "a larger max_staleness is no faster.")
        if faster(engines=_more(row.engines)):
            return f"With more GPUs, add engines first: learners wait {learners} of the time."
        return f"Learners wait {learners} of the time, and more engines are no faster: long answers stay long."
    if row.engines_waiting_for_environments > row.engines_waiting / 2:
        return f"Engines wait {engines} of the time, mostly for environments: more episodes at once, or fewer engines."
    if faster(learners=_more(row.learners)):
        return f"With more GPUs, add learners first: engines wait {engines} of the time."
    return (
        f"Engines wait {engines} of the time, and more learners are no faster: the constant part of a training step, "
        "the exchange of gradients and the longest sample do not get shorter."
    )


def _more(count: int) -> int:
    """An eighth, or one."""
    return count + max(count // 8, 1)


def render(
    scenario: Scenario, compared: dict[str, float] | None, rows: list[Row], advised: list[tuple[Row, str]]
) -> list[str]:
    """The lines that are printed. `advised`: the best row of each number of GPUs, with its advice."""
    lines = ["Figures (a scenario file or section.key=value replaces them)"]
    lines += [f"  {key:<26}{_short(key, value):<40}{source(scenario, key)}" for key, value in figures(scenario)]
    if compared:
        lines += [
            "",
            f"Measured {compared['measured_seconds_per_step']:.4g} s a step, simulated "
            f"{compared['simulated_seconds_per_step']:.4g} s ({compared['off']:+.1%}).",
        ]
    for result, text in advised:
        its = [r for r in rows if r.gpus == result.gpus]
        lines += [
            "",
            f"{counted(result.gpus, 'GPU')}, {counted(result.prompts, 'prompt')} x {scenario.run.group_size} a step",
            HEAD,
        ]
        lines += [_line(row, row is result) for row in its]
        lines += [_verdict(result, its), text]
    return lines


HEAD = "  engines learners stale     s/step      tok/s  engines learners of ideal  mean max stale  who waits"


def _line(row: Row, best: bool) -> str:
    learners = "the same" if row.shared else f"{row.learners:,}"
    return (
        f"{'*' if best else ' '} {row.engines:>7,} {learners:>8} {row.max_staleness:>5} {row.seconds_per_step:>10.4g} "
        f"{row.answer_tokens_per_second:>10,.0f}  {row.engines_busy:>7.0%} {row.learners_busy:>8.0%} "
        f"{row.of_ideal:>8.0%}  {row.staleness_mean:>8.1f} {row.staleness_max:>5}  {_waits(row)}"
    )


def _waits(row: Row) -> str:
    parts = [("learners", row.learners_waiting), ("engines", row.engines_waiting)]
    waiting = [f"{who} {share:.0%}" for who, share in sorted(parts, key=lambda p: -p[1]) if share >= LITTLE]
    return ", ".join(waiting) or "none"


def _verdict(row: Row, rows: list[Row]) -> str:
    what = "shared" if row.shared else f"{counted(row.engines, 'engine')} + {counted(row.learners, 'learner')}"
    text = f"Fastest: {what}, max_staleness {row.max_staleness}: {row.seconds_per_step:.4g} s a step"
    turns = [r for r in rows if r.max_staleness == 0]
    if row.max_staleness and turns:
        other = best_of(turns)
        where = "on shared GPUs" if other.shared else f"with {counted(other.engines, 'engine')}"
        text += f", {other.seconds_per_step / row.seconds_per_step:.2f} times as fast as synchronous {where}"
    return text + "."


def _short(key: str, value: Any) -> str:
    if key == "engine.table":
        return " ".join(f"{n:g}:{s:.3g}" for n, s in value[:4]) + " ..." * (len(value) > 4)
    if key == "episodes.tokens":
        return f"{sum(map(len, value)):,} answers"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.4g}" if value < 1e6 else f"{value:.3g}"
    return f"{value[0]:g} to {value[1]:g}" if value[0] != value[1] else f"{value[0]:.4g}"


def _progress() -> Callable[[str], None]:
    """Progress on one line that is overwritten, on terminals only."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def read(words: list[str], base: Scenario | None = None) -> Scenario:
    """Files and `section.key=value` words. Raises `BirlError` naming the key."""
    scenario = base or Scenario()
    for word in words:
        key, equals, text = word.partition("=")
        if equals and not os.path.exists(word):  # Path.exists raises for a word that is too long for a name
            scenario = merged(scenario, _nested(key, _value(key, text)), "given")
        elif Path(word).is_dir():
            scenario = merged(scenario, from_run(Path(word)), "measured")
        else:
            with placed(word):
                scenario = merged(scenario, _file(Path(word)), f"given in {Path(word).name}")
    return checked(scenario)


def merged(scenario: Scenario, values: Mapping[str, Any], origin: str) -> Scenario:
    """The scenario with `values` (section -> key -> value) and their `sources` (key or section -> text). The source of
    the others is `origin`."""
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
            raise BirlError(
                f"{name}: is a section with keys, such as {name}.{fields(getattr(scenario, name))[0].name}."
            )
        kinds = get_type_hints(type(getattr(scenario, name)), include_extras=True)
        for key in section:
            if key not in kinds:
                raise BirlError(
                    f"{name}.{key}: there is no such key; {', '.join(kinds)}.{did_you_mean(key, kinds, f'{name}.')}"
                )
            sources[f"{name}.{key}"] = str(told.get(f"{name}.{key}") or told.get(name) or origin)
        result = {key: converted(f"{name}.{key}", kinds[key], value) for key, value in section.items()}
        if name == "engine" and {"base", "per_sequence"} & set(result):
            result.setdefault("table", ())  # the table would have priority
        changed[name] = replace(getattr(scenario, name), **result)
    return replace(scenario, **changed, sources=sources)


def converted(key: str, kind: Any, value: Any) -> Any:
    """A value of YAML or JSON converted to the type of the key. Raises `BirlError` that says what it must be."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        told = error.errors(include_url=False)[0]["msg"]
        told = told.removeprefix("Value error, ").replace("Input should be", "must be")
        raise BirlError(f"{key}={value!r}: {told}.") from None


def _file(path: Path) -> Mapping[str, Any]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BirlError(
            f"{path}: can not be read ({getattr(error, 'strerror', None) or 'no text'}). Name a YAML or JSON file, the "
            "folder of a run, or section.key=value."
        ) from None
    try:
        if path.suffix == ".json":
            result = json.loads(text, object_pairs_hook=lambda pairs: unique(pairs, path, 1))
        else:
            result = OmegaConf.to_container(OmegaConf.create(text)) if isinstance(parse(text) or {}, dict) else text
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise BirlError(f"{path}: {getattr(error, 'problem', None) or first_line(error)}") from None
    if not isinstance(result, Mapping):
        raise BirlError(f"{path}: must hold sections ({', '.join(SECTIONS)}), each with its keys.")
    return result


def _value(key: str, text: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(f"it: {text}"))["it"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        raise BirlError(f"{key}={text}: is no number, list or text that YAML knows.") from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    name, dot, rest = key.partition(".")
    if not dot:
        owners = [s for s in SECTIONS if hasattr(getattr(Scenario(), s), key)]
        hint = f" Did you mean {' or '.join(f'{owner}.{key}' for owner in owners)}?" if owners else ""
        raise BirlError(f"{key}: keys have a section ({', '.join(SECTIONS)}), as in engine.max_batch=64.{hint}")
    return {name: {rest: value}}
