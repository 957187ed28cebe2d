"""Runs `birl` on rows, rewards and models that a test spoils, in a folder of its own."""

import json
from pathlib import Path

import pytest

from birl.cli import main
from birl.learner import checkpoint, step_folders

REWARDS = """
import os, time

def good(completions, **_): return [float(sum(map(ord, c)) % 7) for c in completions]
def same(completions, **_): return [1.0 for _ in completions]
def raises(completions, **_): raise ValueError("no gold here")
def texts(completions, **_): return ["good" for _ in completions]
def hangs(completions, **_): time.sleep(60)

def picky(completions, answer, **_):
    if any(a == "3" for a in answer):
        raise ValueError("bad one")
    return good(completions)

number = 3
"""
OUTCOMES = ("ok", "truncated", "env_error", "engine_error", "timeout", "aborted")


class Bench:
    """A folder with a data set and reward functions, and `birl rl` with small defaults in it."""

    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.defaults = {
            **{"model.path": str(model), "model.dtype": "float32", "data.train": "data.jsonl"},
            **{"reward.functions": "rewards.py:good", "rollout.prompts": "2", "rollout.group_size": "2"},
            **{"rollout.max_tokens": "8", "optimizer.lr": "1e-3", "checkpoint.every": "1", "steps": "1"},
            **{"threads": "1", "run": "run", "track.console": "plain", "track.tensorboard": "false"},
            "track.report": "false",
        }
        Path("rewards.py").write_text(REWARDS)
        write_rows("data.jsonl", [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(5)])

    def command(self, *words: str) -> list[str]:
        given = dict(word.split("=", 1) for word in words)
        return ["rl", *(f"{key}={value}" for key, value in {**self.defaults, **given}.items())]

    def run(self, *words: str) -> tuple[int, str]:
        code = main(self.command(*words))
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return code, out + err

    def refused(self, *words: str) -> str:
        code, said = self.run(*words)
        assert code == 2, said
        assert "birl: " in said
        return said

    def done(self, *words: str) -> str:
        code, said = self.run(*words)
        assert code == 0, said
        return said

    def metrics(self, run: str = "run") -> list[dict]:
        return [json.loads(line) for line in Path(run, "metrics.jsonl").read_bytes().splitlines()]


def write_rows(name: str, rows: list[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def contents(folder: str) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(Path(folder).rglob("*")) if f.is_file()}


def steps(run: str = "run") -> list[int]:
    found = step_folders.saved(Path(run, "checkpoints"))
    assert all(checkpoint.verify(s.path) == [] for s in found)
    return [s.step for s in found]
