"""Checks values of a configuration; all errors are reported at once, before anything is loaded. The types and ranges of
single keys are in the schema; `rules/` has conditions on several keys."""

import copy
from collections.abc import Mapping
from dataclasses import asdict
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from birl.config.keys import Doc, adapter, documentation, written
from birl.config.schema import RL, Config, Stage
from birl.config.schema.kinds import MOST
from birl.errors import BirlError, did_you_mean

LIMITS = {  # pydantic's error types for values of the right type that the schema does not allow
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"),
    *("literal_error", "string_pattern_mismatch"),
}
Refused = Mapping[str, list[ErrorDetails]]


def check(config: Config) -> None:
    """Refuse impossible values and combinations. Raises `BirlError` naming key and fix."""
    if wrong := problems(config):
        raise BirlError("\n".join(wrong))


def problems(config: Config) -> list[str]:
    """All reasons why this configuration cannot run; empty if it can."""
    from birl.config.rules import rules

    config, refused = configured(type(config), asdict(config))
    docs = documentation(type(config))
    return [*(refusal(docs[key], errors) for key, errors in refused.items()), *rules(config)]


def configured(schema: type[Any], values: Mapping[str, Any]) -> tuple[Any, Refused]:
    """Make an object of a schema; returns it, and pydantic's errors by key. Refused keys get their defaults, so that
    rules of several keys can be checked; refused names are kept, so that no rule refuses what belongs to them."""
    try:
        return adapter(schema).validate_python(values), {}
    except ValidationError as error:
        docs, refused, kept = documentation(schema), {}, copy.deepcopy(dict(values))
        for one in error.errors(include_url=False):
            paths = (".".join(map(str, one["loc"][:n])) for n in range(len(one["loc"]), 0, -1))
            key = next((path for path in paths if path in docs), "")
            if not key:  # of a __post_init__ of the user
                raise ValueError(one["msg"].removeprefix("Value error, ")) from error
            refused.setdefault(key, []).append(one)
    for key in refused:
        *sections, name = key.split(".")
        reduce(getitem, sections, kept)[name] = docs[key].default
    config = adapter(schema).validate_python(kept)
    for key in (key for key in refused if docs[key].choices):
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, config), name, reduce(getitem, key.split("."), values))
    return config, refused


def wrong_type(errors: list[ErrorDetails]) -> bool:
    return any(one["type"] not in LIMITS for one in errors)


def refusal(doc: Doc, errors: list[ErrorDetails], prefix: str = "") -> str:
    """Message: why a key cannot have a value of the right type."""
    value, one = errors[0]["input"], errors[0]
    start = f"{prefix}{doc.key}={written(value)}: must be"
    if doc.choices:
        hint = " To run once for each value, add --multirun." if "," in value else did_you_mean(value, doc.choices)
        return f"{start} {' | '.join(doc.choices)}{f', or {doc.example}' if doc.example else ''}.{hint}"
    most = one["type"] == "less_than_equal" and one.get("ctx", {})["le"] == MOST
    return f"{start} {f'at most {MOST}' if most else doc.range or 'a finite number'}."


def command(config: Config | type) -> str:
    """Name of the `birl` command of a configuration."""
    return (config if isinstance(config, type) else type(config)).__name__.lower()


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def setting(config: Config, key: str) -> str:
    return f"{key}={written(value_of(config, key))}"


def capacity_setting(config: RL | Stage) -> str:
    """The setting that limits the tokens of a packed row, and why."""
    each, keys = setting(config, "learner.tokens_per_microbatch"), config.parallel
    axes = {"cp": keys.cp, "tp": keys.splits // keys.cp}
    factors = "".join(f" x parallel.{axis}={n}" for axis, n in axes.items() if n > 1)
    return f"{each}{factors} ({config.capacity} tokens)" if factors else each


def needed_setting(config: RL | Stage, tokens: int) -> str:
    """The setting that allows a packed row of so many tokens."""
    return f"learner.tokens_per_microbatch={-(-tokens // config.parallel.splits)}"
