"""Runs whose engine samples from weights in int8."""

import re
from pathlib import Path

import pytest

from birl.config import schema
from birl.config.load import load
from birl.engine.open import Sampled
from birl.errors import BirlError
from birl.kernels import problem
from tests.train.test_rl import log, run

INT8 = ("engine.weights=int8", "model.dtype=bfloat16", "optimizer.lr=0.01")


@pytest.mark.parametrize("words", [(), ("rollout.max_staleness=1",), ("lora.rank=4",)])
def test_an_engine_in_int8_is_corrected_and_compared_with_what_it_samples_from(
    tiny: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run(tiny, tmp_path, "steps=4", *INT8, *words)
    steps = log(tmp_path)
    exact = 0 if not problem() else 0.05
    for step in steps:
        assert step["mismatch/mean"] <= exact and step["mismatch/tokens"] > 0
        assert step["factor"] != 1 and ("rollout.max_staleness=1" in words or 0.9 < step["factor"] < 1.1)
    rounding = [step["mismatch/rounding"] for step in steps if step["mismatch/rounding"] is not None]
    assert rounding and all(1e-5 < gap < 0.3 for gap in rounding) and len(set(rounding)) == len(rounding)
    assert steps[-1]["reward/mean"] > 0


def test_an_engine_in_int8_with_weights_of_before_stops_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Sampled.refresh

    def late(self: Sampled) -> None:
        if self.learner.version == 0:
            plain(self)
        self.version = self.learner.version

    monkeypatch.setattr(Sampled, "refresh", late)
    with pytest.raises(BirlError, match="does not sample from the weights"):
        run(tiny, tmp_path, "steps=4", *INT8, "learner.max_logprob_gap=1e-4")


def test_a_run_in_int8_goes_on_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    for folder, words in (("a", ["steps=4"]), ("b", ["steps=2"]), ("b", ["steps=4"])):
        run(tiny, tmp_path / folder, *words, *INT8, "checkpoint.every=2")
    whole, resumed = (log(tmp_path / folder) for folder in "ab")
    figures = ("loss", "reward/mean", "mismatch/rounding", "grad_norm")
    assert [[step[f] for f in figures] for step in whole] == [[step[f] for f in figures] for step in resumed]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.dtype=float32", "int8: needs weights in bfloat16"),
        ("algorithm.correction=none", "algorithm.correction=none ignores"),
        ("algorithm.surrogate=reinforce algorithm.proximal=behaviour", "has no ratio that corrects it"),
        ("lora.rank=4 lora.quantize=nf4", "already quantised by lora.quantize=nf4"),
        ("policies=[a,b] lora.rank=4", "does not support several policies"),
        ("parallel.fsdp=2", "remove other parallel"),
        ("engine.kind=birl", "engine.weights=int8: has no effect because engine.kind=birl"),
    ],
)
def test_what_does_not_go_with_int8(words: str, said: str) -> None:
    with pytest.raises(BirlError, match=re.escape(said)):
        load(schema.RL, ["data.train=x.jsonl", "reward.functions=[math]", "engine.weights=int8", *words.split()])
