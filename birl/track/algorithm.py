"""Names the algorithm of a run by its settings."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

TEACHERS = ("algorithm.teacher", "algorithm.teachers")  # paths of models, which no preset sets
MARKS = ("advantage", "surrogate", "teacher_divergence", "observation_coef")  # keys that distinguish methods
MARK = 4  # weight of such a key; others have 1


def algorithm(config: Mapping[str, Any]) -> str:
    """Name of a run's algorithm: the preset closest to its keys (with "*" if some differ), the preference loss, or else
    its command. `config` by dotted key; empty if unknown."""
    if not config:
        return ""
    own = {
        key.removeprefix("algorithm."): value
        for key, value in config.items()
        if key.startswith("algorithm.") and key not in TEACHERS
    }
    if not own:
        return str(config.get("preference.loss") or ("rm" if "ranking.centering" in config else "sft"))

    own = {**_defaults(), **own}  # runs of earlier versions lack keys

    def changed(name: str) -> list[str]:
        preset = {**_defaults(), **_presets()[name]}
        return [key for key, value in own.items() if key in preset and not _same(preset[key], value)]

    def alike(name: str) -> int:
        return sum(_same(value, own.get(key)) for key, value in _presets()[name].items())

    def far(name: str) -> int:
        return sum(MARK if key in MARKS else 1 for key in changed(name))

    best = min(_presets(), key=lambda name: (far(name), -alike(name), name), default="")
    return best + "*" * bool(best and changed(best))


def _same(wanted: Any, value: Any) -> bool:
    """Whether a value equals a preset's, which may refer to another key, as `${rollout.max_tokens}`."""
    return wanted == value or (isinstance(wanted, str) and "${" in wanted)


@cache
def _presets() -> dict[str, dict[str, Any]]:
    import yaml

    folder = resources.files("birl.config") / "presets" / "algorithm"
    result = {f.name.removesuffix(".yaml"): yaml.safe_load(f.read_text("utf-8")) or {} for f in folder.iterdir()}
    return {name: {k.removeprefix("algorithm."): v for k, v in keys.items()} for name, keys in result.items()}


@cache
def _defaults() -> dict[str, Any]:
    from dataclasses import asdict

    from birl.config.schema import RL

    return json.loads(json.dumps(asdict(RL().algorithm)))
