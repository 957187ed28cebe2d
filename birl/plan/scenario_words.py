"""Files and words -> a `Scenario`. Every mistake is one `BirlError` that names the key."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from birl.errors import BirlError, did_you_mean, first_line
from birl.plan.run_figures import from_run
from birl.plan.scenario import SECTIONS, Scenario, checked
from birl.regular import read_text


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
