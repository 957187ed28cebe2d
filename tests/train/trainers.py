"""Trainers and configurations with small defaults, and what their runs wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from birl import Trainer
from birl.config.load import load
from birl.config.schema import RL

ROWS = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2), "level": i} for i in range(4)]
SMALL = {"engine.kv_cache_gb": 0.01, "threads": 1, "model.dtype": "float32", "checkpoint.every": 0}
QUIET = {"track.console": "off", "track.tensorboard": False, "track.report": False}
TOY = (
    *("model.dtype=float32", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=8", "optimizer.lr=3e-3"),
    *("steps=2", "track.console=off", "track.tensorboard=false", "track.report=false", "threads=1"),
)
Make = Callable[..., Trainer]


def small(model: Path, folder: Path, *words: str) -> RL:
    """The configuration of a run of seconds in `folder`/run. Later words win."""
    return load(RL, [f"model.path={model}", f"run={folder}/run", *TOY, *words])


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, c)) % 7) for c in completions]


def shortness(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(c)) for c in completions]


def rollouts(run: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_bytes().splitlines()]


def metrics(run: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_bytes().splitlines()]
