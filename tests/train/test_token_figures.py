"""What rollouts.jsonl says of single tokens agrees with the figures of the step."""

import math
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from tests.train.test_rl import log, run

pytestmark = pytest.mark.usefixtures("forking")


def tokens(record: dict[str, Any], name: str) -> list[float]:
    """A figure of all trained tokens of an episode; [] where it has none."""
    found: list[float] = []
    for sample in record["samples"]:
        if (values := sample.get(name)) is not None:
            found += values if isinstance(values, list) else [values] * sum(sample["mask"])
    return found


def test_on_policy_the_gap_is_the_mismatch_and_the_entropies_have_its_mean(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "steps=2")
    for step in log(tmp_path):
        records = [r for r in log(tmp_path, "rollouts") if r["step"] == step["step"]]
        gaps = [g for r in records for g in tokens(r, "gaps")]
        entropies = [e for r in records for e in tokens(r, "entropies")]
        assert len(gaps) == len(entropies) > 0
        assert math.isclose(sum(map(abs, gaps)) / len(gaps), step["mismatch/mean"], rel_tol=1e-3, abs_tol=1e-9)
        assert math.isclose(sum(entropies) / len(entropies), step["entropy"], rel_tol=1e-3)
        assert all(r["source"] for r in records)
        for record in records:
            assert [len(tokens(record, "entropies"))] in ([0], [sum(map(sum, (s["mask"] for s in record["samples"])))])


def test_the_second_part_of_a_batch_is_off_policy(tiny: Path, tmp_path: Path) -> None:
    """With two passes the figures are those of the first."""
    run(tiny, tmp_path, "steps=1", "algorithm.updates_per_batch=2", "algorithm.passes=2")
    records = log(tmp_path, "rollouts")
    largest = [max(map(abs, tokens(r, "gaps")), default=0.0) for r in records]
    assert max(largest[:8]) < 1e-5 and max(largest[8:]) > 1e-4


def test_answers_without_a_gradient_have_none(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "steps=1", reward=lambda completions, **_: [1.0] * len(completions))
    assert not any("gaps" in s for r in log(tmp_path, "rollouts") for s in r["samples"])


@pytest.mark.parametrize(("words", "differ"), [((), False), (("algorithm=ppo", "critic.lr=1e-3"), True)])
def test_advantages_stand_there_where_they_differ(tiny: Path, tmp_path: Path, words: tuple, differ: bool) -> None:
    try:
        run(tiny, tmp_path, "steps=1", *words)
    except BirlError as error:
        pytest.fail(str(error))
    records = log(tmp_path, "rollouts")
    assert any("advantages" in s for r in records for s in r["samples"]) == differ
    for record in records:
        if each := tokens(record, "advantages"):
            assert math.isclose(sum(each) / len(each), record["advantage"], rel_tol=1e-4, abs_tol=1e-6)


def test_several_learners_say_it_of_all_their_answers(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "one", "steps=1")
    run(tiny, tmp_path / "two", "steps=1", "parallel.ddp=2")
    one, two = (log(tmp_path / name, "rollouts") for name in ("one", "two"))
    assert [len(tokens(r, "entropies")) for r in one] == [len(tokens(r, "entropies")) for r in two]
    for a, b in zip(one, two, strict=True):
        assert all(
            math.isclose(x, y, rel_tol=1e-2)
            for x, y in zip(tokens(a, "entropies"), tokens(b, "entropies"), strict=True)
        )
