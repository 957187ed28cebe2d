"""Fifty steps take no more memory than ten."""

import ctypes
import gc
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from birl.named import Given
from birl.track.tracker import Tracker
from birl.train import build
from birl.train.command import train
from tests.train.trainers import small

STEPS = 50


def different(completions: list[str], **columns: object) -> list[float]:
    return [float(i) for i in range(len(completions))]


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MallInfo(ctypes.Structure):
    """What glibc says of its blocks [bytes]."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


def in_use() -> int:
    """Bytes of all blocks that were not freed: every tensor, whoever holds it, and no holes between them."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = MallInfo
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("folder", ["tiny", "plain"])
def test_memory_is_flat(
    folder: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor more after 50 steps than after 10. What is allocated may grow by 16 KiB in a step: it trains at least
    320 tokens of hidden size 64, so that one float32 activation kept would be 80 KiB. The median, as oneDNN takes some
    MiB more when it meets a larger shape than ever before. All answers have the same length: oneDNN and PyTorch keep
    9 MiB of compiled products for each number of rows that they met (of the last 1,024 products). Resident memory
    grows in jumps as well, when no hole is large enough for a block: 24 MiB of that are allowed."""
    tensors: list[int] = []
    memory: list[int] = []
    allocated: list[int] = []
    trained: list[float] = []
    report = Tracker.step

    def step(self: Tracker, number: int, metrics: dict[str, float]) -> None:
        report(self, number, metrics)
        trained.append(metrics["tokens/trained"])
        memory.append(resident())
        allocated.append(in_use())
        if number in (10, 30, 50):
            gc.collect()
            tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    sampling = build.sampling
    monkeypatch.setattr(build, "sampling", lambda rollout: replace(sampling(rollout), ignore_eos=True))
    monkeypatch.setattr(Tracker, "step", step)
    words = ("data.train=[given]", "reward.functions=[given:x]", "rollout.prompts=2", "algorithm.kl_coef=0.01")
    words += ("model.dtype=bfloat16", "checkpoint.every=0", f"steps={STEPS}", "optimizer.lr=1e-4")
    config = small(request.getfixturevalue(folder), tmp_path, *words)
    rows = [{"prompt": f"What is {i} + {i}, my dear friend? Think about it.", "answer": str(2 * i)} for i in range(9)]
    train(config, given=Given(rewards=[different], train=rows))
    assert len(memory) == STEPS and min(trained) > 320
    assert max(tensors) == tensors[0]
    assert median(after - before for before, after in pairwise(allocated[10:])) < 16 * 2**10
    assert max(memory[10:]) - max(memory[:10]) < 24 * 2**20
