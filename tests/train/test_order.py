"""Runs that choose their prompts by their results: resumed, asynchronous, replayed, on several environments."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import step_folders
from birl.rollout.ledger import audit
from birl.train.command import train
from tests.train.test_resume import same
from tests.train.test_rl import any_a, log, run

UNEVEN = ("rollout.max_tokens=12", "rollout.prompts=3", "rollout.group_size=4", "engine.max_batch=6", "steps=8")


def stopping(after: int) -> Any:
    """Ctrl-C at the n-th call."""
    calls: list[int] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return any_a(completions)

    reward.__name__ = any_a.__name__
    return reward


def chosen(folder: Path) -> list[str]:
    rows = [r for r in log(folder, "rollouts") if r["episode"] == 0]
    return [r["task"] for r in sorted(rows, key=lambda r: (r["step"], r["group"]))]


@pytest.mark.parametrize(
    "words", ["data.order=thompson", "data.order=curriculum algorithm=dapo", "data.order=difficulty"]
)
def test_a_resumed_run_is_the_uninterrupted_one(tiny: Path, tmp_path: Path, words: str) -> None:
    keys = (
        *UNEVEN,
        *words.split(),
        "algorithm.overlong_buffer=0",
        "checkpoint.keep_last=0",
        "data.validation_split=0.2",
        "validation.every=3",
    )
    run(tiny, tmp_path / "a", *keys, reward=any_a, rows=20)
    for reward in (stopping(8), stopping(9), any_a):
        run(tiny, tmp_path / "b", *keys, reward=reward, rows=20)
    same(tmp_path / "a/run", tmp_path / "b/run")
    assert chosen(tmp_path / "a") == chosen(tmp_path / "b")
    assert log(tmp_path / "a")[-1]["order/seen"] > 3


def test_an_asynchronous_run_is_recorded_and_replayed(tiny: Path, tmp_path: Path) -> None:
    keys = (*UNEVEN, "data.order=thompson", "rollout.max_staleness=3", "rollout.order_window=3", "model.dtype=bfloat16")
    for reward in (stopping(9), any_a):  # in two lives
        run(tiny, tmp_path / "a", *keys, "track.record=true", "checkpoint.every=1", reward=reward, rows=30)
    assert not audit(tmp_path / "a/run").problems
    groups = [r["group"] for r in log(tmp_path / "a", "rollouts") if r["episode"] == 0]
    assert len(set(groups)) == len(groups) == 24
    run(tiny, tmp_path / "b", *keys, f"debug.replay={tmp_path}/a/run", reward=any_a, rows=30)
    figures = [[m[f"order/{n}"] for m in log(tmp_path / f) for n in ("predicted", "observed", "seen")] for f in "ab"]
    assert figures[0] == figures[1]
    path = tmp_path / "a/run/metrics.jsonl"
    path.write_text(
        path.read_text().replace('"order/seen": ', '"order/seen": 1').replace('"order/seen":', '"order/seen":1')
    )
    with pytest.raises(BirlError, match="order/seen is"):
        run(tiny, tmp_path / "c", *keys, f"debug.replay={tmp_path}/a/run", reward=any_a, rows=30)


def test_environments_keep_their_weights(tiny: Path, tmp_path: Path) -> None:
    """`env=mixture`: each environment's tasks are chosen among themselves; a weight of 0 asks for none."""
    envs = (
        "env.kind=mixture",
        "env.parts=[arithmetic,countdown,letter_counting]",
        "data.train=[]",
        "reward.functions=[]",
    )
    keys = (*envs, "data.weights=[1,0,2]", "steps=6", "data.order=thompson", "rollout.prompts=4")
    small = ("model.dtype=float32", "rollout.group_size=2", "rollout.max_tokens=4", "threads=1", "track.console=off")
    train(load(schema.RL, [f"model.path={tiny}", *keys, *small, f"run={tmp_path}/run"]))
    kinds = {task.partition(":")[0] for task in chosen(tmp_path)}
    assert kinds == {"arithmetic", "letter_counting"}
    with pytest.raises(BirlError, match=r"data\.weights has 2 values for 3 training sets"):
        train(load(schema.RL, [f"model.path={tiny}", *keys, *small, f"run={tmp_path}/wrong", "data.weights=[1,2]"]))


def test_another_run_s_checkpoint_brings_its_counts_along(tiny: Path, tmp_path: Path) -> None:
    """And one of a run without an order brings none."""
    run(tiny, tmp_path / "a", *UNEVEN, reward=any_a)
    first = f"resume={step_folders.latest(tmp_path / 'a/run/checkpoints')}"
    run(tiny, tmp_path / "b", *UNEVEN, "steps=10", "data.order=thompson", first, reward=any_a)
    assert [m["step"] for m in log(tmp_path / "b")] == [9, 10] and log(tmp_path / "b")[0]["order/seen"] <= 3
    second = f"resume={step_folders.latest(tmp_path / 'b/run/checkpoints')}"
    run(tiny, tmp_path / "c", *UNEVEN, "steps=11", "data.order=difficulty", second, reward=any_a)
    assert log(tmp_path / "c")[0]["order/seen"] >= log(tmp_path / "b")[-1]["order/seen"]


def test_what_is_wrong_is_said_before_the_run(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text("def backwards(tasks, step, rng): return [t.id for t in tasks] * 2\n")
    with pytest.raises(BirlError, match=r"data\.order=thomson: must be .*Did you mean thompson\?"):
        run(tiny, tmp_path, "data.order=thomson")
    with pytest.raises(BirlError, match=r"returned 'train:0' more than once"):
        run(tiny, tmp_path, f"data.order={tmp_path}/orders.py:backwards")
    with pytest.raises(BirlError, match=r"data\.shuffle=false: has no effect because data\.order=thompson"):
        run(tiny, tmp_path, "data.order=thompson", "data.shuffle=false")
    with pytest.raises(BirlError, match=r"Set data\.order_threshold"):
        run(tiny, tmp_path, "data.order=thompson", reward=lambda completions, **_: [7.0] * len(completions))
