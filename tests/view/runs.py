"""Run folders for the tests of the page, of any length, as `birl rl` would leave them."""

import fcntl
import json
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from birl.config.file import flatten, to_yaml
from birl.config.schema import RL

START = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
#: what a name or a value of a configuration may hold
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>"
    "\u202egnp.exe\x1b[2J&quot;'\"\ud83d \U0001f468\u200d\U0001f469"
)


@cache
def _defaults() -> str:
    return json.dumps(flatten(RL()))


def config(**keys: Any) -> dict[str, Any]:
    """A complete configuration; `__` in a name stands for a dot."""
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    return {**json.loads(_defaults()), "steps": 30, "model.path": "models/tiny", **changed}


def metrics(step: int, chance: random.Random, of: int = 30) -> dict[str, float]:
    """Plausible figures of a step: the reward rises, the entropy falls, both with noise."""
    share = step / of
    reward = 0.9 / (1 + math.exp(-8 * (share - 0.4))) + 0.05 * chance.gauss(0, 1)
    return {
        "outcome/asked": 64.0,
        "outcome/ok": 60.0,
        "outcome/truncated": 4.0,
        "length/mean": 40 - 20 * share + chance.gauss(0, 2),
        "length/max": 64.0,
        "reward/mean": min(1.0, max(0.0, reward)),
        "reward/std": abs(0.4 - 0.3 * share + 0.03 * chance.gauss(0, 1)),
        "groups/kept": 8.0,
        "loss": 0.02 * chance.gauss(0, 1),
        "entropy": 0.9 * math.exp(-2 * share) + 0.02 * chance.random(),
        "clip_fraction": 0.01 * chance.random(),
        "kl": 0.02 * share * chance.random(),
        "mismatch/mean": 0.001 * chance.random(),
        "grad_norm": abs(0.5 + 0.1 * chance.gauss(0, 1)),
        "staleness/mean": float(step % 3),
        "tokens/generated": 2400.0,
        "tokens/trained": 4000.0,
        "speed/generate": 800 + 20 * chance.gauss(0, 1),
        "speed/train": 1900 + 40 * chance.gauss(0, 1),
        "time/step": 4 + chance.random(),
    }


def line(step: int, figures: dict[str, Any]) -> str:
    stamp = (START + timedelta(seconds=4.5 * step)).isoformat(timespec="milliseconds")
    return json.dumps({"step": step, "time": stamp, **figures}, separators=(",", ":")) + "\n"


def make(folder: Path, *, steps: int = 30, seed: int = 0, every: int = 10, ended: bool = True, **keys: Any) -> Path:
    """A run of `steps` steps with a validation after each `every`; `keys` of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    (folder / "config.json").write_text(json.dumps(config(seed=seed, **keys), indent=1))
    (folder / "config.yaml").write_text(to_yaml(RL()))
    rows = (line(step, metrics(step, chance, max(steps, 1))) for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(rows))
    tested = [
        line(step, {"seed": 0, "validation/all/pass@1": 0.3 + 0.6 * step / max(steps, 1), "samples": []})
        for step in range(0, steps + 1, every)
    ]
    (folder / "validation.jsonl").write_text("".join(tested) if steps else "")
    if ended:
        (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": steps, "seconds": 4.5 * steps}))
    return folder


def several(folder: Path) -> Path:
    """Three seeds of one configuration, and another one."""
    for seed in range(3):
        make(folder / "grpo" / f"seed={seed}", seed=seed)
    make(folder / "fast", seed=5, optimizer__lr=1e-4, model__path="models/other", algorithm__clip_high=0.28)
    return folder


def append(folder: Path, first: int, last: int, of: int = 30) -> None:
    """What the run writes in the steps `first` to `last`."""
    chance = random.Random(first)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(line(step, metrics(step, chance, of)) for step in range(first, last + 1))


@contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """As if this process was the run."""
    lock = folder / ".lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def long(folder: Path, *, steps: int, figures: int, seed: int = 0, **keys: Any) -> Path:
    """A run of very many steps with so many figures, written fast: 10^5 x 40 take some seconds."""
    import numpy as np

    make(folder, steps=0, seed=seed, **keys)
    names = [*metrics(1, random.Random(0)), *(f"more/figure_{i}" for i in range(figures))][:figures]
    chance = np.random.default_rng(seed)
    form = '{"step":%d,"time":"2026-03-01T08:00:00.000+00:00",' + ",".join(f'"{name}":%.17g' for name in names) + "}\n"
    with (folder / "metrics.jsonl").open("w") as file:
        for start in range(1, steps + 1, 1000):
            rows = range(start, min(start + 1000, steps + 1))
            values = (
                chance.random((len(rows), len(names))) + np.linspace(start, start + 1000, len(rows))[:, None] / steps
            )
            file.writelines(form % (step, *row) for step, row in zip(rows, values.tolist(), strict=True))
    tested = [line(step, {"validation/all/pass@1": step / steps}) for step in range(0, steps + 1, max(1, steps // 50))]
    (folder / "validation.jsonl").write_text("".join(tested))
    return folder
