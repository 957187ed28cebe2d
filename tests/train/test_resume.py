"""Killed at any moment and started again, a run gives the same bits as one that was never interrupted."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from birl.learner import checkpoint, step_folders
from tests.parallel.processes import SERVER

DEADLINE = 60.0
#: the only figures that may differ: when, how fast, in how much memory, and what is lost with a process
CLOCKS = ("time", "speed/", "memory/", "engine/cache_hit")

REWARD = """
def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""


def birl(words: list[str], die_at: int | None, hang: bool) -> None:
    """In a child: one command line. `die_at` n: kill -9 oneself at the n-th thing done to a file under checkpoints/.
    `hang`: a disk that never finishes the first save."""
    torch.set_num_threads(1)
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree") and "checkpoints" in str(args[0]):
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if hang and event == "os.rename":
                Path(str(args[0]).partition("checkpoints")[0], "hangs").touch()
                time.sleep(DEADLINE)

    sys.addaudithook(hook)
    from birl.cli import main

    os._exit(main(words))


def start(words: list[str], die_at: int | None = None, hang: bool = False) -> multiprocessing.Process:
    process = SERVER.Process(target=birl, args=(words, die_at, hang))
    process.start()
    return process  # type: ignore[return-value]


def finish(process: multiprocessing.Process) -> int:
    process.join(DEADLINE)
    if process.exitcode is None:
        process.kill()
        pytest.fail("the run did not end")
    return process.exitcode


def command(tiny: Path, folder: Path, run: str, *more: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"What is {i} + {i % 3}?", "answer": str(i + i % 3)} for i in range(14)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("rl", f"model.path={tiny}", f"data.train={folder}/data.jsonl", f"reward.functions={folder}/reward.py:digits"),
        *("rollout.prompts=2", "rollout.group_size=3", "rollout.max_tokens=8", "optimizer.lr=1e-3"),
        *("optimizer.schedule=cosine", "optimizer.warmup_steps=2", "checkpoint.every=1", "checkpoint.keep_last=0"),
        *("steps=8", "data.validation_split=0.2", "validation.every=3", "track.tensorboard=false"),
        *("track.console=plain", "threads=1", f"run={folder}/{run}"),
        *more,
    ]


def lines(path: Path) -> list[dict]:
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKS)}
        for line in path.read_bytes().splitlines()
    ]


def same(one: Path, other: Path) -> None:
    """Every tensor of the last checkpoint (weights, masters, moments), every rollout and every figure."""
    a, b = (step_folders.saved(run / "checkpoints")[-1] for run in (one, other))
    assert a.step == b.step
    tensors = [checkpoint.read_tensors(s.path) for s in (a, b)]
    assert tensors[0].keys() == tensors[1].keys() and len(tensors[0]) > 20
    for key, value in tensors[0].items():
        assert torch.equal(value, tensors[1][key]), key
    for log in ("rollouts.jsonl", "metrics.jsonl", "validation.jsonl"):
        assert lines(one / log) == lines(other / log), log
    assert [line["step"] for line in lines(one / "metrics.jsonl")] == list(range(1, a.step + 1))


@pytest.mark.parametrize(("algorithm", "kills", "steps"), [("dr_grpo", 4, 16), ("dapo", 10, 24)])
def test_kill_minus_nine_at_any_moment_changes_no_bit(
    tiny: Path, tmp_path: Path, algorithm: str, kills: int, steps: int
) -> None:
    """Every other one while a checkpoint is being written or an old one removed."""
    extra = [f"algorithm={algorithm}", "algorithm.updates_per_batch=2", "checkpoint.keep_last=2", f"steps={steps}"]
    assert finish(start(command(tiny, tmp_path, "whole", *extra))) == 0
    rng = random.Random(algorithm)
    words = command(tiny, tmp_path, "killed", *extra)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for i in range(kills):
        if i % 2:
            process = start(words, die_at=rng.randint(1, 40))
        else:
            process = start(words)
            wait_for_step(tmp_path / "killed", done(metrics) + 1)
            time.sleep(rng.uniform(0, 0.2))
            process.kill()
        assert finish(process) == -signal.SIGKILL
    assert 1 <= done(metrics) < steps
    assert finish(start(words)) == 0
    same(tmp_path / "whole", tmp_path / "killed")


def done(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_and_have_their_exit_code(tiny: Path, tmp_path: Path, number: signal.Signals) -> None:
    assert finish(start(command(tiny, tmp_path, "whole"))) == 0
    run = tmp_path / "stopped"
    words = command(tiny, tmp_path, "stopped", "checkpoint.every=0")
    process = start(words)
    wait_for_step(run, 2)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert finish(process) == 128 + number
    assert json.loads((run / "summary.json").read_text())["signal"] == number
    assert step_folders.saved(run / "checkpoints")[-1].step >= 2
    assert finish(start(words)) == 0
    same(tmp_path / "whole", run)


def test_ctrl_c_abandons_a_validation_that_is_repeated_later(tiny: Path, tmp_path: Path) -> None:
    """The reward hangs on the held-out rows of the second validation, the first time only."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def slow(completions, held=None, **_):\n"
        f"    flag = pathlib.Path({str(tmp_path)!r}) / 'hung'\n"
        "    if any(held or ()) and flag.parent.joinpath('slow', 'metrics.jsonl').read_text() and not flag.exists():\n"
        "        flag.touch(); time.sleep(60)\n"
        "    return [float(sum(c.isdigit() for c in text)) for text in completions]\n"
    )
    (tmp_path / "held.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2", "held": true}\n')
    more = [f"data.validation={tmp_path}/held.jsonl", "data.validation_split=0", "reward.timeout=100", "steps=4"]
    more += ["validation.at_start=false", "validation.every=2", f"reward.functions={tmp_path}/slow.py:slow"]
    process = start(command(tiny, tmp_path, "slow", *more))
    wait_for(lambda: (tmp_path / "hung").exists())
    assert process.pid is not None
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 128 + signal.SIGINT and time.monotonic() - began < 50
    assert [line["step"] for line in lines(tmp_path / "slow" / "validation.jsonl")] == []
    assert finish(start(command(tiny, tmp_path, "slow", *more))) == 0
    assert [line["step"] for line in lines(tmp_path / "slow" / "validation.jsonl")] == [2, 4]


def test_a_second_ctrl_c_exits_at_once(tiny: Path, tmp_path: Path) -> None:
    process = start(command(tiny, tmp_path, "run"), hang=True)
    wait_for(lambda: (tmp_path / "run" / "hangs").exists())
    assert process.pid is not None
    began = time.monotonic()
    for _ in range(50):  # on a busy machine two may arrive as one
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.2)
    assert finish(process) == 128 + signal.SIGINT
    assert time.monotonic() - began < 50


def test_more_steps_go_on_and_a_finished_run_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    words = command(tiny, tmp_path, "run", "optimizer.schedule=constant")
    whole = command(tiny, tmp_path, "whole", "optimizer.schedule=constant")
    assert finish(start([*words, "steps=3"])) == 0
    assert finish(start([*words, "steps=8"])) == 0
    assert finish(start(whole)) == 0
    for run in ("run", "whole"):
        assert [s.step for s in step_folders.saved(tmp_path / run / "checkpoints")] == list(range(1, 9))
    before = (tmp_path / "run" / "rollouts.jsonl").read_bytes()
    assert before == (tmp_path / "whole" / "rollouts.jsonl").read_bytes()
    assert finish(start([*words, "steps=8"])) == 0
    assert (tmp_path / "run" / "rollouts.jsonl").read_bytes() == before


def wait_for_step(run: Path, step: int) -> None:
    wait_for(lambda: done(run / "metrics.jsonl") >= step)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
