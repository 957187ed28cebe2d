"""YAML files of keys, in which every value keeps the text of the file; a configuration as YAML and as a flat dict."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from birl.errors import BirlError, did_you_mean
from birl.regular import read_text

if TYPE_CHECKING:
    from birl.config.schema import Config

DEPTH, ENTRIES = 32, 100_000  # limits of a YAML file: nesting, and total number of entries


def read(name: str) -> Mapping[str, Any]:
    """Texts and lists by dotted key. Raises `BirlError`."""
    try:
        content = parse(read_text(Path(name)))
    except FileNotFoundError:
        near = did_you_mean(name, map(str, Path(name).parent.glob("*.y*ml")))
        raise BirlError(f"{name}: cannot be read: there is no such file.{near}") from None
    except OSError as error:
        raise BirlError(f"{name}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        alike = "" if isinstance(error, yaml.constructor.ConstructorError) else " Are the lines indented alike?"
        raise BirlError(f"{name}{where}: is not valid YAML: {error.problem}.{alike}") from None
    except RecursionError:
        raise BirlError(f"{name}: is not valid YAML: it is nested too deep") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BirlError(f"{name}: is not valid YAML: {' '.join(str(error).split())}") from None
    if content in ("", None):
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise BirlError(f"{name}: expected keys and values, such as `optimizer: {{lr: 1e-5}}`, not a {kind}")
    result: dict[str, Any] = {}
    for key, value in flat(content):
        if key in result:
            raise BirlError(f"{name}: {key} is there twice, nested and with a dot. Remove one.")
        result[key] = value
    return result


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Texts(yaml.BaseLoader):
    """Loader that keeps every scalar as its text: YAML would turn `wandb: off` into a boolean. A duplicate key is an
    error: YAML would drop the first with all that is below it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is there twice", problem_mark=key.start_mark
                )
            if isinstance(key, yaml.ScalarNode) and key.value == "<<":
                raise yaml.constructor.ConstructorError(
                    problem="merge keys (<<) are not supported; write out their contents", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """Parse YAML; None if it is empty. Raises `yaml.YAMLError`."""
    loader = _Texts(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {}, 0)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Number of entries of a node, with those of aliases at each use. Raises `ConstructorError` above `ENTRIES` or
    `DEPTH`, and for an alias of a node that contains it."""
    if known.get(id(node)) == 0:
        raise yaml.constructor.ConstructorError(problem="an alias is in what it names", problem_mark=node.start_mark)
    if id(node) not in known:
        known[id(node)] = 0  # in progress
        inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        inner = inner if isinstance(node, yaml.CollectionNode) else ()
        known[id(node)] = 1 + sum(_size(one, known, depth + 1) for one in inner)
    if depth > DEPTH or known[id(node)] > ENTRIES:
        problem = f"nested deeper than {DEPTH}" if depth > DEPTH else f"more than {ENTRIES:,} entries, with its aliases"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
    return known[id(node)]


def to_yaml(config: "Config") -> str:
    """The whole configuration as YAML. `birl rl FILE.yaml` reads it back to the same values."""
    return yaml.safe_dump(_escape(asdict(config)), sort_keys=False, allow_unicode=True, width=120)


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def flatten(config: "Config") -> dict[str, Any]:
    """All dotted keys and values, in the schema's order: {"model.path": "smollm2", ..., "threads": 0}."""
    return dict(flat(asdict(config)))
