"""Files and words -> a `Scenario`. Every mistake is one `BirlError` that names the key."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from birl.errors import BirlError, did_you_mean, first_line
from birl.plan.run_figures import from_run
from birl.plan.scenario import SECTIONS, Lengths, Scenario, checked
from birl.regular import read_text

POSITIVE = (
    *("engine.gpus", "engine.prefill", "engine.max_batch", "learner.gpus", "learner.bandwidth", "sync.every"),
    *("sync.bandwidth", "episodes.mean", "episodes.max", "run.gpus", "run.group_size"),
    *("run.prompts_per_gpu", "run.engines", "result.engines", "result.learners"),
)


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
            raise BirlError(
                f"{name}: is a section with keys, such as {name}.{fields(getattr(scenario, name))[0].name}."
            )
        kinds = {f.name: _kind(f.type) for f in fields(getattr(scenario, name))}
        for key in section:
            if key not in kinds:
                raise BirlError(
                    f"{name}.{key}: there is no such key; {', '.join(kinds)}.{did_you_mean(key, kinds, f'{name}.')}"
                )
            sources[f"{name}.{key}"] = str(told.get(f"{name}.{key}") or told.get(name) or origin)
        result = {key: converted(f"{name}.{key}", kinds[key], value) for key, value in section.items()}
        if name == "engine" and {"base", "per_sequence"} & set(result):
            result.setdefault("table", ())  # or the table would hide them
        changed[name] = replace(getattr(scenario, name), **result)
    return replace(scenario, **changed, sources=sources)


def _kind(annotation: Any) -> str:
    return annotation.__name__ if type(annotation) is type else str(annotation)


def converted(key: str, kind: str, value: Any) -> Any:
    """A value of YAML or JSON as the type of the key, or a `BirlError` that says what it must be."""
    try:
        result = _convert(key, kind, value)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        raise BirlError(f"{key}={value!r}: {EXPECTED.get(key) or EXPECTED.get(kind, 'is not possible')}.") from None
    _numbers(key, result)
    return result


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


def _numbers(key: str, value: Any) -> None:
    flat = list(_flat(value))
    if any(not math.isfinite(x) or x < 0 for x in flat):
        raise BirlError(f"{key}: must not be negative, nor infinite.")
    if key in POSITIVE and any(x == 0 for x in flat):
        raise BirlError(f"{key}: must be above 0.")
    if key in ("episodes.turns", "episodes.wait", "episodes.reward") and value[0] > value[1]:
        raise BirlError(f"{key}={list(value)}: the least is above the most.")


def _flat(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    elif not isinstance(value, str):
        yield float(value)


def _file(path: Path) -> Mapping[str, Any]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BirlError(
            f"{path}: can not be read ({getattr(error, 'strerror', None) or 'no text'}). Name a YAML or JSON file, the "
            "folder of a run, or section.key=value."
        ) from None
    try:
        result = json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))
    except (json.JSONDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise BirlError(f"{path}: {first_line(error)}") from None
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
        hint = f" Did you mean {owners[0]}.{key}?" if owners else ""
        raise BirlError(f"{key}: keys have a section ({', '.join(SECTIONS)}), as in engine.max_batch=64.{hint}")
    return {name: {rest: value}}
