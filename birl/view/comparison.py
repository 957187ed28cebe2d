"""Runs side by side: the keys of their configurations that differ, and what each figure came to."""

from typing import Any

import numpy as np

from birl.track.figures import ordered
from birl.track.progress import rises
from birl.track.runs import ALWAYS_OTHER
from birl.view.folders import Run
from birl.view.history import History

# What should rise and what should fall; of other figures, such as an entropy, neither end is better.
RISING = ("reward/", "score/", "speed/", "accuracy", "margin")
FALLING = ("loss", "time/", "memory/", "mismatch/", "updates/nonfinite", "updates/skipped", "packing/padding")


def differences(runs: list[Run]) -> list[dict[str, Any]]:
    """The keys that differ, dotted, with the value of each run; "set" says which have the key at all. A run whose
    configuration cannot be read has none and makes nothing differ."""
    configs = [run.config for run in runs]
    readable = [config for config in configs if config]
    result = []
    for key in dict.fromkeys(key for config in readable for key in config):
        if key in ALWAYS_OTHER:
            continue
        values = [config.get(key) for config in configs]
        if any(key not in config or config[key] != readable[0].get(key) for config in readable):
            result.append({"key": key, "values": values, "set": [key in config for config in configs]})
    return sorted(result, key=lambda row: row["key"])


def figures(histories: list[History]) -> list[dict[str, Any]]:
    """For each figure and run the last value and the best, with its step."""
    names = dict.fromkeys(name for history in histories for name in history.names)
    result = []
    for name, heading in ((row.name, row.heading) for row in ordered(names)):
        way = "" if name == "loss" and "reward/mean" in names else better(name)  # a policy's loss says little
        values = [_figures(history, name, way) for history in histories]
        result.append({"name": name, "heading": heading, "better": way, "values": values})
    return result


def better(name: str) -> str:
    """ "high", "low", or "" where it is unknown."""
    if name.startswith("validation/"):
        if "/pass@" in name or name.endswith(("/score", "accuracy")):
            return "high"
        return "" if rises(name) else "low"
    if name == "reward/std":
        return ""
    if name.startswith(RISING) or name.endswith(("/accuracy", "/margin")):
        return "high"
    return "low" if name.startswith(FALLING) else ""


def _figures(history: History, name: str, direction: str) -> dict[str, Any] | None:
    with history.lock:
        table = history.table(name)
        values, steps = table[name], table["step"]
        there = np.flatnonzero(np.isfinite(values))
        if not len(there):
            return None
        result: dict[str, Any] = {"last": values[there[-1]], "last_step": steps[there[-1]]}
        if direction:
            place = there[(np.argmax if direction == "high" else np.argmin)(values[there])]
            result |= {"best": values[place], "best_step": steps[place]}
        return result
