"""Runs in which a tiny policy learns a tiny teacher's distributions, from its own answers and from given ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.train.command import train
from tests.tiny import tiny_model_folder
from tests.train.test_teacher import QUIET, run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("teacher") / "model", seed=7)


def divergences(folder: Path, name: str = "divergence", log: str = "metrics") -> list[float]:
    return [json.loads(line)[name] for line in (folder / f"run/{log}.jsonl").read_bytes().splitlines()]


def sft(tiny: Path, folder: Path, *words: str) -> list[float]:
    rows = [{"prompt": f"What is {i} + 2?", "response": f"The answer is {i + 2}."} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"data.train={folder}/rows.jsonl", "data.validation_split=0.25", f"run={folder}/run", f"model.path={tiny}")
    train(load(schema.SFT, [*given, *QUIET, "optimizer.lr=1e-2", "batch_size=9", *words]))
    return divergences(folder)


@pytest.mark.parametrize("words", ["reverse_kl", "forward_kl", "jsd", "reverse_kl algorithm.teacher_top_k=8"])
def test_the_policy_goes_to_its_teacher_on_its_own_answers(tiny: Path, other: Path, tmp_path: Path, words: str) -> None:
    more = ("steps=16", "optimizer.lr=5e-3", "rollout.group_size=8")
    run(tiny, tmp_path, str(other), *f"algorithm.teacher_divergence={words}".split(), *more)
    found = divergences(tmp_path)
    assert sum(found[-3:]) < 0.8 * sum(found[:3])


@pytest.mark.parametrize("words", ["reverse_kl", "forward_kl", "jsd", "forward_kl distill.top_k=8"])
def test_and_on_given_ones(tiny: Path, other: Path, tmp_path: Path, words: str) -> None:
    found = sft(tiny, tmp_path, f"distill.teacher={other}", *f"distill.divergence={words}".split(), "steps=25")
    assert found[-1] < 0.5 * found[0]
    held_out = divergences(tmp_path, "validation/divergence", "validation")
    assert held_out[-1] < 0.8 * held_out[0]


def test_a_model_is_no_way_from_itself(tiny: Path, tmp_path: Path) -> None:
    assert sft(tiny, tmp_path, f"distill.teacher={tiny}", "steps=1") == [pytest.approx(0.0, abs=1e-6)]


def test_another_vocabulary_is_refused_with_its_first_difference(tiny: Path, tmp_path: Path) -> None:
    """Both models are named."""
    other = tiny_model_folder(tmp_path / "other")
    tokenizer: Any = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(other)
    number = tokenizer.convert_tokens_to_ids("<other>")
    with pytest.raises(BirlError, match=rf"teacher={other}.*model\.path={tiny}.*token {number} is '<other>' there"):
        sft(tiny, tmp_path, f"distill.teacher={other}", "steps=1")


def test_more_words_than_there_are_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"distill\.top_k=320: learner and teacher have 320 tokens"):
        sft(tiny, tmp_path, f"distill.teacher={tiny}", "distill.top_k=320", "steps=1")
