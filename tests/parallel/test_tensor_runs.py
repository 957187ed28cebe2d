"""Whole runs with tensor parallelism give the figures of one process."""

from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.models import load
from tests.parallel.test_runs import figures, same_weights
from tests.train import test_offline as offline
from tests.train import test_rl as rl

pytestmark = pytest.mark.usefixtures("forking")

TP = "parallel.tp=2"
SLOW = ("optimizer.lr=1e-3", "optimizer.eps=1e-3")  # AdamW does not turn rounding errors into steps


@pytest.mark.parametrize("words", [("sft", "lora.rank=4", "lora.dora=true"), ("rm",), ("dpo",)], ids=lambda w: w[0])
def test_training_on_rows(plain: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    command, *keys = words
    rows = offline.TEXTS if command == "sft" else offline.PAIRS
    for folder, more in (("one", ()), ("two", (TP,))):
        (tmp_path / folder).mkdir()
        offline.run(plain, tmp_path / folder, command, *keys, *SLOW, *more, held_out=rows[:5])
    one, two = (figures(offline.log(tmp_path / f), "loss", "grad_norm") for f in ("one", "two"))
    assert two == pytest.approx(one, rel=2e-4)
    same_weights(tmp_path)


def test_ppo_without_sequence_parallel_regions(plain: Path, tmp_path: Path) -> None:
    """Engine, critic and reference get what the ranks have trained."""
    words = ("algorithm=ppo", "algorithm.kl_coef=0.05", "critic.lr=1e-3", "optimizer.lr=1e-3", "steps=2")
    for folder, keys in (("one", ()), ("two", (TP, "parallel.sequence=false"))):
        (tmp_path / folder).mkdir()
        rl.run(plain, tmp_path / folder, *words, *keys)
    one, two = (rl.log(tmp_path / f) for f in ("one", "two"))
    names = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
    assert figures(two[:1], *names) == pytest.approx(figures(one[:1], *names), rel=2e-4, abs=1e-6)
    assert max(figures(two, "mismatch/mean")) < 1e-5


def test_a_model_that_cannot_be_split_is_not_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", never)
    with pytest.raises(BirlError, match=r"parallel\.tp=2 does not divide the 1 key/value heads of this model"):
        offline.run(tiny, tmp_path, "sft", TP)
