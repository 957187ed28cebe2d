"""Words that may follow `birl`: commands, their words, keys, and values of keys."""

from collections.abc import Mapping
from dataclasses import dataclass

from birl.config.keys import SHORTHANDS, Doc, documentation, presets
from birl.config.schema import COMMANDS

NOTHING = ("int", "float")  # types of keys without known values


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Completions of one command. `words` are literal, keys become `key=`. `files`: any, folders, or none (empty)."""

    text: str
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    files: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`values`: of keys with a fixed choice. `free`: keys with numbers, which have no completions; all others take
    files. `places`: words after `birl launch`."""

    commands: Mapping[str, Command]
    values: Mapping[str, tuple[str, ...]]
    free: tuple[str, ...]
    places: tuple[str, ...]


def filled(script: str, parts: Mapping[str, str]) -> str:
    """A shell script with each @NAME@ replaced."""
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def same_answers(cases: Mapping[str, str]) -> dict[str, list[str]]:
    """answer -> the keys that have it, which share a line of the script."""
    keys: dict[str, list[str]] = {}
    for key, answer in cases.items():
        keys.setdefault(answer, []).append(key)
    return keys


def vocabulary(
    texts: Mapping[str, str],
    flags: Mapping[str, tuple[str, ...]],
    environments: tuple[str, ...],
    places: tuple[str, ...],
) -> Vocabulary:
    """The vocabulary. `texts`: one line for each command; `flags`: words of each command."""
    result, docs = {}, {key: doc for schema in COMMANDS.values() for key, doc in documentation(schema).items()}
    free = tuple(sorted(key for key, doc in docs.items() if doc.type in NOTHING))
    for name, text in texts.items():
        schema = COMMANDS.get("rl" if name == "plan" else name)
        keys = _keys(schema) if schema else ()
        files = "any" if schema else "folders" if name not in ("doctor", "cache", "completion") else ""
        result[name] = Command(text=text, words=flags.get(name, ("--help",)), keys=keys, files=files)
    return Vocabulary(commands=result, values=_values(docs, environments), free=free, places=places)


def _keys(schema: type) -> tuple[str, ...]:
    known = documentation(schema)
    short = [name for name, key in SHORTHANDS.items() if key in known and name != "benchmark"]
    return tuple(sorted({*known, *presets(schema), *short}))


def _values(docs: Mapping[str, Doc], environments: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    known = {key: doc.choices or ("true", "false") for key, doc in docs.items() if doc.choices or doc.type == "bool"}
    for schema in COMMANDS.values():
        known |= {group: tuple(files) for group, files in presets(schema).items() if group != "model"}
    return known | dict.fromkeys(("env", "env.kind"), environments)
