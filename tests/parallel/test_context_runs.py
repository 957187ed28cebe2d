"""Whole runs whose rows are split over processes give the figures of one process."""

from pathlib import Path

import pytest

from birl.errors import BirlError
from tests.parallel.test_runs import figures, same_weights
from tests.train import test_offline as offline
from tests.train import test_rl as rl

pytestmark = pytest.mark.usefixtures("forking")

GATHER, ULYSSES = ("parallel.cp=2",), ("parallel.cp=2", "parallel.context=ulysses")


@pytest.mark.parametrize(("command", "form"), [("dpo", GATHER), ("rm", ULYSSES)])
def test_pairs_that_no_process_has_memory_for_alone(
    tiny: Path, tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    for folder, words in (("one", ()), ("two", (*form, "learner.tokens_per_microbatch=70"))):
        (tmp_path / folder).mkdir()
        offline.run(tiny, tmp_path / folder, command, "validation.every=3", *words, held_out=offline.PAIRS[:5])
    one, two = (figures(offline.log(tmp_path / f), "loss", "grad_norm") for f in ("one", "two"))
    assert two == pytest.approx(one, rel=2e-4)
    with pytest.raises(
        BirlError, match=r"=70 cannot hold the longest pair .* Set learner\.tokens_per_microbatch=\d+, or"
    ):
        offline.run(tiny, tmp_path, command, "learner.tokens_per_microbatch=70")
    with pytest.raises(BirlError, match=r"=40 x parallel\.cp=2 \(80 tokens\) cannot hold the longest pair"):
        offline.run(tiny, tmp_path, command, "learner.tokens_per_microbatch=40", *form)


def test_ppo_with_a_critic_on_the_backbone_and_a_reference(tiny: Path, tmp_path: Path) -> None:
    words = ("algorithm=ppo", "critic.shared=true", "algorithm.kl_coef=0.05", "optimizer.lr=1e-3", "steps=1")
    for folder, keys in (("one", ()), ("two", (*ULYSSES, "learner.tokens_per_microbatch=300"))):
        (tmp_path / folder).mkdir()
        rl.run(tiny, tmp_path / folder, *words, "model.max_length=512", *keys)
    names = ("loss", "grad_norm", "critic/loss", "tokens/generated")
    one, two = (rl.log(tmp_path / f) for f in ("one", "two"))
    assert figures(two, *names) == pytest.approx(figures(one, *names), rel=2e-4, abs=1e-6)
    same_weights(tmp_path)


def test_a_run_goes_on_with_its_rows_split_otherwise(tiny: Path, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    slow = ("batch_size=3", "optimizer.lr=1e-3")
    offline.run(tiny, tmp_path / "one", "sft", "steps=3", *slow)
    offline.run(tiny, tmp_path / "two", "sft", "steps=1", *slow, *GATHER)
    offline.run(tiny, tmp_path / "two", "sft", "steps=2", *slow, "parallel.fsdp=2")
    offline.run(tiny, tmp_path / "two", "sft", "steps=3", *slow, *ULYSSES)
    one, two = (figures(offline.log(tmp_path / f), "loss", "grad_norm") for f in ("one", "two"))
    assert two == pytest.approx(one, rel=2e-4)
    same_weights(tmp_path)
