from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from birl import Trainer
from tests.train.bench import Bench
from tests.train.trainers import QUIET, ROWS, SMALL, Make, letters


@pytest.fixture
def make(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A Trainer with small defaults, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def make(**arguments: Any) -> Trainer:
        small = {"num_generations": 2, "batch_size": 2, "max_tokens": 8, "max_steps": 1, "learning_rate": 1e-2}
        given = {"model": str(tiny), "reward_funcs": letters, "train_dataset": ROWS, "output_dir": "run", **small}
        overrides = {**SMALL, **QUIET, **arguments.pop("overrides", {})}
        return Trainer(**{**given, **arguments}, overrides=overrides)

    return make


@pytest.fixture
def bench(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)
    yield Bench(tiny, capsys)
    assert not list(tmp_path.rglob(".lock"))
