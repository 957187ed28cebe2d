"""Fifty steps take no more memory than ten."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.loops import build, rl
from birl.track.tracker import Tracker

STEPS = 50


def different(completions: list[str], **columns: object) -> list[float]:
    return [float(i) for i in range(len(completions))]


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("folder", ["tiny", "plain"])
def test_memory_is_flat(
    folder: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor more after 50 steps than after 10. Resident memory may grow by 2 MiB: a step trains at least 320 tokens
    of hidden size 64, so that one float32 activation kept in each of 40 steps would be 3 MiB."""
    tensors: list[int] = []
    memory: list[int] = []
    trained: list[float] = []
    report = Tracker.step

    def step(self: Tracker, number: int, metrics: dict[str, float]) -> None:
        report(self, number, metrics)
        trained.append(metrics["tokens/trained"])
        memory.append(resident())
        if number in (10, 30, 50):
            gc.collect()
            tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    monkeypatch.setattr(Tracker, "step", step)
    config = load(
        schema.RL,
        [
            *(f"model.path={request.getfixturevalue(folder)}", "data.train=[given]", "reward.functions=[given:x]"),
            *("rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=8", "algorithm.kl_coef=0.01"),
            *("checkpoint.every=0", "track.console=off", "track.tensorboard=false", "track.report=false"),
            *(f"steps={STEPS}", f"run={tmp_path}/run", "threads=1", "optimizer.lr=1e-4"),
        ],
    )
    rows = [{"prompt": f"What is {i} + {i}, my dear friend? Think about it.", "answer": str(2 * i)} for i in range(9)]
    rl.train(config, given=build.Given(rewards=[different], train=rows))
    assert len(memory) == STEPS and min(trained) > 320
    assert max(tensors) == tensors[0]
    assert max(memory[10:]) - max(memory[:10]) < 2 * 2**20
