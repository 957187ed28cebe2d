"""Which runs are the same but for their seed, and what an algorithm's settings are called."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

OWN = ("seed", "run", "resume", "threads")  # keys in which seeds of one configuration differ
OWN_SECTIONS = ("track.", "checkpoint.")
TEACHER = "algorithm.teacher"  # a model, which no preset can name
COMMANDS = {"preference.": "dpo", "ranking.": "rm"}  # sections that one command alone has


def family(run_id: str, config: Mapping[str, Any]) -> str:
    """The same for runs that differ in their seed, their folder and in what they report; a run whose configuration
    cannot be read is alone."""
    if not config:
        return run_id
    kept = {k: v for k, v in config.items() if k not in OWN and not k.startswith(OWN_SECTIONS)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]


def algorithm(config: Mapping[str, Any]) -> str:
    """What the run trains by, in a word: the preset whose keys it has (with "*" where others are changed), else its
    command."""
    if not config:
        return ""
    own = {
        key.removeprefix("algorithm."): value
        for key, value in config.items()
        if key.startswith("algorithm.") and key != TEACHER
    }
    if not own:
        return next((name for key, name in COMMANDS.items() if any(k.startswith(key) for k in config)), "sft")

    def changed(name: str) -> list[str]:
        preset = {**_defaults(), **_presets()[name]}
        return [key for key, value in own.items() if key in preset and not _same(preset[key], value)]

    best = min(_presets(), key=lambda name: (len(changed(name)), name), default="")
    return best + "*" * bool(best and changed(best))


def _same(wanted: Any, value: Any) -> bool:
    """A preset's value may follow from another key, as `${rollout.max_tokens}`."""
    return wanted == value or (isinstance(wanted, str) and "${" in wanted)


@cache
def _presets() -> dict[str, dict[str, Any]]:
    import yaml

    folder = resources.files("birl.config") / "presets" / "algorithm"
    found = {f.name.removesuffix(".yaml"): yaml.safe_load(f.read_text("utf-8")) or {} for f in folder.iterdir()}
    return {name: {k.removeprefix("algorithm."): v for k, v in keys.items()} for name, keys in found.items()}


@cache
def _defaults() -> dict[str, Any]:
    from dataclasses import asdict

    from birl.config.schema import RL

    return json.loads(json.dumps(asdict(RL().algorithm)))
