"""`key=value` words and YAML files -> a checked configuration. Hydra composes the presets; an error is one line.

Order: the schema's defaults, then the chosen presets, then files and `key=value` words in the given order. Later ones
win. A text key takes the text after `=` literally, so that paths, prompts and patterns need no second quoting.
"""

import copy
import difflib
import functools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from birl.config import file
from birl.config.check import command, configured, refusal, wrong_type
from birl.config.keys import DEFAULT_PRESETS, PRESETS, SHORTHANDS, Doc, documentation, presets, written
from birl.config.nearest import FILES, meant, suggest
from birl.config.rules import rules
from birl.config.schema import DPO, RL, RM, SFT, Eval, Serve, Stage, Tinker
from birl.errors import BirlError, did_you_mean, first_line
from birl.hub import is_model, is_run

Config = TypeVar("Config", RL, SFT, RM, DPO, Eval, Serve, Tinker)
Section = TypeVar("Section")

HYDRA = threading.Lock()
FOLDERS = ("run", "resume", "output")  # in these ~ is the user's home: no folder of that name is created
NULL = ("null", "Null", "NULL", "~", "None", "???")  # null in YAML, Python and OmegaConf
ONE_MARK = re.compile(r"\[([^\[\],'\"=]+)\]")  # [END], [/INST]
EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key and its written value: the text after `=`, or a list from a YAML file. `source`: its text in messages;
    `exact`: brackets and quotes around a text belong to it, as YAML has its own.

    Example: Setting(key="optimizer.lr", value="1e-5", source="optimizer.lr=1e-5")
    """

    key: str
    value: str | list[Any]
    source: str
    exact: bool = False


def load(schema: type[Config], overrides: list[str]) -> Config:
    """The checked configuration. Raises one `BirlError` that lists all errors."""
    return load_with_choices(schema, overrides)[0]


def load_with_choices(schema: type[Config], overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """As `load`, also returns the chosen presets by group: {"algorithm": "grpo", "model": "smollm2"}.

    "model" is absent if `model=` is a folder, a file or a hub id: then it is in `config.model.path`.
    """
    settings, errors = _read(overrides, schema)
    choices, settings = _choose(settings, schema, errors)
    config = copy.deepcopy(_composed(schema, tuple(choices.items())))
    for setting in settings:
        try:
            _apply(config, setting, schema)
        except BirlError as error:
            errors.append(str(error))
    docs, sources = documentation(schema), {setting.key: setting for setting in settings}
    result, refused = configured(schema, _values(config))
    known = not errors and not any(map(wrong_type, refused.values()))  # what the rules compare
    for key, why in refused.items():
        place = _file_of(sources.get(key))
        errors.append(_wrong_type(docs[key], sources[key]) if wrong_type(why) else refusal(docs[key], why, place))
    if errors := [*errors, *(rules(result) if known else ())]:
        raise BirlError("\n".join(errors))
    return result, choices


def _read(overrides: Iterable[str], schema: type) -> tuple[list[Setting], list[str]]:
    settings, errors = [], []
    for argument in overrides:
        try:
            settings += _read_file(argument, schema) if _is_file(argument) else [_read_argument(argument, schema)]
        except BirlError as error:
            errors.append(str(error))
    return settings, errors


def _is_file(argument: str) -> bool:
    return "=" not in argument and argument.endswith((".yaml", ".yml"))


def _read_argument(argument: str, schema: type) -> Setting:
    key, equals, value = argument.partition("=")
    key = key.strip()
    if key[:1] in ("-", "+", "~"):
        name = key.lstrip("-+~")
        hint = f" Did you mean {name}={value or '...'}?" if name in documentation(schema) else suggest(name, schema)
        without = "without dashes" if key[0] == "-" else "and can neither be added (+) nor removed (~)"
        raise BirlError(f"{argument}: keys are written key=value, {without}.{hint}")
    named = "/" in key and is_run(Path(argument)) if equals else is_model(argument)  # RUN/seed=0, of --multirun
    if named and schema in (Eval, Serve, Tinker):
        return Setting(key="model.path", value=argument, source=argument)
    if not equals and key in documentation(schema):
        raise BirlError(f"{argument}: has no value; write {key}=VALUE")
    if not equals:
        raise BirlError(f"{argument}: expected key=value or a .yaml file.{suggest(key, schema)}{meant(key, schema)}")
    if not key:
        raise BirlError(f"{argument}: there is no key before the equals sign")
    return Setting(key=key, value=value, source=f"{key}={value}")


def _read_file(name: str, schema: type) -> list[Setting]:
    if schema in (Eval, Serve, Tinker) and Path(name).name == "config.yaml" and is_run(Path(name).parent):
        command, run = schema.__name__.lower(), Path(name).parent
        raise BirlError(
            f"{name}: says how a training run was configured, and `birl {command}` has other keys. The run itself is a "
            f"model: birl {command} {run}" + (" data.validation=FILE" if schema is Eval else "")
        )
    values = file.read(name).items()
    return [Setting(key=k, value=v, source=f"{name}: {k}: {written(v)}", exact=True) for k, v in values]


def _file_of(setting: Setting | None) -> str:
    """`FILE: ` if the setting is from a file."""
    name, between, _ = setting.source.rpartition(f": {setting.key}: ") if setting else ("", "", "")
    return f"{name}: " if between else ""


def _choose(settings: list[Setting], schema: type, errors: list[str]) -> tuple[dict[str, str], list[Setting]]:
    """Separate the choices of presets from the settings, and expand the shorthands."""
    groups = presets(schema)
    choices = {group: name for group, name in DEFAULT_PRESETS.items() if group in groups}
    rest = []
    for setting in settings:
        group, value = setting.key, setting.value
        if group not in groups:
            rest.append(replace(setting, key=SHORTHANDS.get(group, group)))
        elif isinstance(value, str) and value in groups[group]:
            choices[group] = value
            rest = [other for other in rest if not (group == "model" and other.key == "model.path")]
        elif group == "model" and isinstance(value, str) and not _misspelt(value, groups[group]):
            choices.pop("model", None)
            rest.append(replace(setting, key="model.path"))
        else:
            errors.append(_unknown_preset(setting, list(groups[group])))
    return choices, rest


def _misspelt(value: str, names: Iterable[str]) -> bool:
    if not value or Path(value).exists():
        return not value
    near = difflib.get_close_matches(value.lower(), list(names), cutoff=0.8)
    return "," in value or value.startswith("[") or (bool(near) and "/" not in value)


def _unknown_preset(setting: Setting, names: list[str]) -> str:
    value = written(setting.value)
    literal = f" For a folder, a file or a hub id of that name: model.path={value}" if setting.key == "model" else ""
    hint = _multirun_hint(value) or did_you_mean(value, names)
    return f"{setting.source}: no such preset of {setting.key}: {' | '.join(names)}.{hint}{literal}"


def _multirun_hint(value: str) -> str:
    return " To run once for each value, add --multirun." if "," in value or value.endswith(")") else ""


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra has one state per process: other threads wait, and an application that uses Hydra keeps its own."""
    kinds, instances = (GlobalHydra, VersionBase), Singleton._instances  # pyright: ignore[reportPrivateUsage]
    with HYDRA:
        theirs = {kind: instances.pop(kind) for kind in kinds if kind in instances}
        try:
            yield
        finally:
            for kind in kinds:
                instances.pop(kind, None)
            instances.update(theirs)


@functools.cache
def _composed(schema: type, choices: tuple[tuple[str, str], ...]) -> DictConfig:
    name = f"birl_{schema.__name__.lower()}"
    chosen = [{group: preset} for group, preset in DEFAULT_PRESETS.items() if group in presets(schema)]
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=asdict(schema()))
    store.store(name=name, node={"defaults": [f"{name}_schema", *chosen, "_self_"]})
    OmegaConf.register_new_resolver("share", lambda whole, part: int(whole * part), replace=True)
    with _own_hydra(), initialize_config_dir(config_dir=str(PRESETS.resolve()), version_base="1.3", job_name="birl"):
        return compose(config_name=name, overrides=[f"{group}={preset}" for group, preset in choices])


def _apply(config: DictConfig, setting: Setting, schema: type) -> None:
    known = documentation(schema)
    doc = known.get(setting.key)
    if "env.options" in known and setting.key.startswith("env.") and (doc is None or setting.key == "env.options"):
        if setting.value == {}:
            return
        name = setting.key.removeprefix("env.").removeprefix("options").lstrip(".")
        if not name.isidentifier():
            raise BirlError(f"{setting.source}: an environment's own keys are written as env.NAME=value.")
        OmegaConf.update(config, f"env.options.{name}", setting.value, force_add=True)
        return
    if doc is None:
        raise BirlError(_unknown_key(setting, schema))
    value = _convert(doc, setting)
    if setting.key in FOLDERS:
        value = os.path.expanduser(value)
    try:
        OmegaConf.update(config, setting.key, value)
    except OmegaConfBaseException:  # an invalid interpolation
        raise BirlError(_wrong_type(doc, setting)) from None


#: parsers by type; the key's range is checked later
PLAIN: dict[str, TypeAdapter[Any]] = {
    "int": TypeAdapter(int),
    "float": TypeAdapter(float),
    "bool": TypeAdapter(bool),
    "list[int]": TypeAdapter(list[int]),
    "list[float]": TypeAdapter(list[float]),
    "list[str]": TypeAdapter(list[str]),
}


def _convert(doc: Doc, setting: Setting) -> Any:
    """The value of a key; one with an interpolation stays text until all are known."""
    value = _given(doc, setting)
    if doc.several:  # Hydra's grammar may have converted texts to numbers and booleans
        value = [str(one).lower() if isinstance(one, int | float) else one for one in value]
    if doc.type not in PLAIN or "${" in str(value):
        return value
    try:
        return PLAIN[doc.type].validate_python(value)
    except ValidationError:
        raise BirlError(_wrong_type(doc, setting)) from None


def _given(doc: Doc, setting: Setting) -> str | list[Any]:
    """The list or text of a key, as written."""
    value, several = setting.value, doc.several
    if not isinstance(value, str):
        if not several:
            raise BirlError(_wrong_type(doc, setting))
        return value
    if value.strip() in NULL and not (value == "None" and doc.choices):  # which may be a misspelling of one of them
        raise BirlError(
            f"{setting.source}: no key can be null or missing; its default is {doc.key}={written(doc.default)}"
        )
    if setting.exact and several:
        return [value] if value else []
    if doc.key == "rollout.stop" and not setting.exact and (mark := ONE_MARK.fullmatch(value)):
        raise BirlError(
            f"{setting.source}: is a list of one text, and could be a text in brackets. Write {doc.key}={mark[1]} for "
            f"{mark[1]}, or '{doc.key}=[\"{value}\"]' for {value}."
        )
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if not setting.exact and (quoted or (several and value.startswith("["))):
        value = _parse(setting, value, literal=doc.type == "str")
    elif several and "," in value:
        raise BirlError(f"{setting.source}: a list goes in brackets: {doc.key}=[{value}].{_multirun_hint(value)}")
    if several and not isinstance(value, list):
        return [value] if value != "" else []
    return value


def _parse(setting: Setting, text: str, literal: bool) -> Any:
    """Parse a list or a quoted text by Hydra's grammar; with `literal`, return the text itself if that fails."""
    try:
        value = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException as error:
        if literal:
            return text
        if re.fullmatch(r"\[[^\[\]'\"]*\]", text):  # [name=value,...]: the grammar does not allow = in a list
            return [word.strip() for word in text[1:-1].split(",") if word.strip()]
        reason = first_line(error)
        raise BirlError(
            f"{setting.source}: is not complete or not readable ({reason}). "
            "A list is [a,b]; put \"...\" around an element with unusual characters, and '...' around all of it "
            "for the shell."
        ) from None
    if isinstance(value, Sweep):
        if literal:
            return text
        raise BirlError(f"{setting.source}: more than one value.{_multirun_hint(',')}")
    return value


def _wrong_type(doc: Doc, setting: Setting) -> str:
    sample = written(doc.default) if doc.default else {"list[str]": "[a,b]"}.get(doc.type, "[1,2]")
    expected = EXPECTED.get(doc.type) or f"a list such as {sample}"
    unit = f" [{doc.unit}]" if doc.unit else ""
    hint = _multirun_hint(written(setting.value)) + (f" It is: {doc.text}" if doc.text else "")
    return (
        f"{setting.source}: {doc.key} takes {expected} ({doc.type}{unit}, default "
        f"{written(doc.default) or 'empty'}).{hint}"
    )


def _unknown_key(setting: Setting, schema: type) -> str:
    key = setting.key
    inside = [name for name in documentation(schema) if name.startswith(f"{key}.")]
    if inside:
        return f"{setting.source}: {key} is a section; set one of its keys: {', '.join(inside)}"
    where = f"`birl {command(schema)} --help all` lists all keys."
    return f"{setting.source}: there is no key {key}.{suggest(key, schema)} {where}"


def _values(config: DictConfig) -> dict[str, Any]:
    """All values, with `${section.key}` resolved."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise BirlError(
            f"{error.full_key}: {first_line(error)}. ${{section.key}} copies a key's value; write \\${{ for the text."
        ) from None


def read_section(schema: type[Section], written: Mapping[str, Any], prefix: str) -> Section:
    """A section that is not part of the configuration, such as an environment's: a dataclass with the given values of
    its keys. Raises one `BirlError` that lists all errors."""
    try:
        docs = documentation(schema)
    except BirlError as error:
        raise BirlError(f"{prefix}{error}") from None
    settings, values, errors = {}, {}, []
    for key, value in written.items():
        settings[key] = setting = Setting(key=key, value=value, source=f"{prefix}{key}={value}")
        if key not in docs:
            hint = did_you_mean(key, docs, prefix) or f" It has: {', '.join(prefix + k for k in docs) or 'none'}."
            errors.append(f"{setting.source}: there is no such key.{hint}")
            continue
        try:
            values[key] = _convert(docs[key], setting)
        except BirlError as error:
            errors.append(str(error))
    try:
        result, refused = configured(schema, values)
    except Exception as error:
        raise BirlError(f"{prefix.rstrip('.')}: {schema.__qualname__} refuses its keys: {first_line(error)}") from error
    for key, wrong in refused.items():
        doc = docs[key]
        errors.append(_wrong_type(doc, settings[key]) if wrong_type(wrong) else refusal(doc, wrong, prefix))
    if errors:
        raise BirlError("\n".join(errors))
    return result


def run_folder(config: RL | Stage, choices: Mapping[str, str], without: Iterable[str] = ()) -> str:
    """`config.run`, or runs/<model>-<data>-<preset, or command>-<seed>, without the parts whose key is in `without`
    (the swept keys)."""
    if config.run:
        return config.run
    left_out = {key.split(".")[0] for key in without}
    task = config.env.kind.rpartition(":")[2] if isinstance(config, RL) else ""
    parts = {
        "model": _short_name(config.model.path),
        "data": _short_name(config.data.train[0]) if config.data.train else task,
        "algorithm": choices.get("algorithm", "") if isinstance(config, RL) else command(config),
        "seed": str(config.seed),
    }
    name = "-".join(part for key, part in parts.items() if part and key not in left_out)
    return f"runs/{name or 'multirun'}"


def _short_name(path: str) -> str:
    """gsm8k for `train@openai/gsm8k` and for data/gsm8k/train.jsonl."""
    path = path.rpartition("@")[2].rstrip("/")
    where = Path(path)
    stem = where.stem if where.suffix in FILES else where.name
    parent = where.parent.name.strip(".")
    return re.sub(r"[^\w.+-]+", "_", parent if stem in ("train", "data", "main") and parent else stem)
