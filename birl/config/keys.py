"""Documentation of each key of a schema or of a user's section, for help, checks, hints and completion."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, with_config
from pydantic.errors import PydanticUserError

from birl.config.schema.kinds import MOST
from birl.errors import BirlError

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESETS = {"algorithm": "dr_grpo", "model": "smollm2"}
SHORTHANDS = {"reward": "reward.functions", "env": "env.kind", "benchmark": "env.kind"}
TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "object": "dict"}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "less than"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Doc:
    """One key of a schema. `unit`: the text's last brackets, or a range between two numbers. `choices`: names that it
    accepts, besides values like `example`. `range`: of its numbers, as text.

    Example: Doc(key="rollout.max_tokens", type="int", default=256, text="Longest answer.", unit="tokens per turn")
    """

    key: str
    type: str
    default: Any
    text: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    example: str = ""
    range: str = ""

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def several(self) -> bool:
        return self.type.startswith("list")


@cache
def documentation(schema: type) -> dict[str, Doc]:
    """All keys of `schema`, dotted, in the order of the source. A field without a docstring has an empty text."""
    return {doc.key: doc for doc in _walk(schema(), "", _json(schema).get("$defs", {}))}


@cache
def adapter(section: type) -> TypeAdapter[Any]:
    """The pydantic adapter that makes an object of a section from values."""
    for one in section.__mro__:
        if is_dataclass(one) and not hasattr(one, "__pydantic_config__"):  # a plain dataclass of the user
            with_config(ConfigDict(use_attribute_docstrings=True))(one)
    return TypeAdapter(section)


def _strange(key: str) -> BirlError:
    return BirlError(f"{key}: cannot be read from a text. A key is a number, true or false, text, or a list.")


def _walk(section: Any, prefix: str, definitions: Mapping[str, Any]) -> list[Doc]:
    schema, result = type(section), []
    known = _properties(schema, definitions.get(schema.__name__) or _json(schema))
    for field in fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        its = known[field.name]
        result += _walk(value, f"{key}.", definitions) if is_dataclass(value) else [_doc(key, value, its)]
    return result


@cache
def _json(section: type) -> Mapping[str, Any]:
    try:
        return adapter(section).json_schema()
    except (PydanticUserError, NameError):
        raise _strange(next(field.name for field in fields(section) if not _possible(section, field.name))) from None


def _possible(section: type, key: str) -> bool:
    try:
        TypeAdapter(get_type_hints(section, include_extras=True)[key]).json_schema()
    except (PydanticUserError, NameError):
        return False
    return True


def _properties(section: type, its: Mapping[str, Any]) -> Mapping[str, Any]:
    """JSON schema of each key; a field without a text in a subclass has that of the base class."""
    known = dict(its.get("properties", {}))
    for above in filter(is_dataclass, section.__mro__[1:]):
        for name, inherited in _json(above).get("properties", {}).items():
            known[name] = inherited | known[name]
    return known


def _doc(key: str, default: Any, its: Mapping[str, Any]) -> Doc:
    several = its.get("type") == "array"
    one = [*its.get("prefixItems", []), its.get("items") or {"type": "string"}][0] if several else its
    ways = one.get("anyOf", [one])
    text, unit = " ".join(its.get("description", "").split()), ""
    if named := re.search(r" \[([^\]=,\"]+)\](?=[.,;)]|$)", text):
        text, unit = text[: named.start()] + text[named.end() :], named[1]
    choices = tuple(name for way in ways for name in way.get("enum", [way["const"]] if "const" in way else []))
    kind = TYPES.get(ways[0].get("type"), "")
    if not kind:
        raise _strange(key)
    low, high = one.get("minimum"), one.get("maximum", one.get("exclusiveMaximum"))
    if not unit and kind == "float" and low == 0 and high is not None and high <= 1:
        unit = f"0 to {high:g}"
    return Doc(
        key=key,
        type=f"list[{kind}]" if several else kind,
        default=default,
        text=text,
        unit=unit,
        choices=choices,
        example=next((way["examples"][0] for way in ways if "examples" in way), ""),
        range=" and ".join(f"{words} {one[name]:g}" for name, words in BOUNDS.items() if one.get(name, MOST) != MOST),
    )


def presets(schema: type) -> dict[str, dict[str, Path]]:
    """The config groups of `schema` (fields with a folder of presets), each with its files by name."""
    names = [field.name for field in fields(schema)]
    return {
        name: {path.stem: path for path in sorted((PRESETS / name).glob("*.yaml"))}
        for name in names
        if (PRESETS / name).is_dir()
    }


def written(value: Any) -> str:
    """A value as typed after `key=`."""
    match value:
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(map(written, value))}]"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
