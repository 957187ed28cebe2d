import pytest

from birl.track.figures import OTHER, TABLE, described, figure, ordered


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("kl", "KL [nats]"),
        ("length/max", "Answer length, max [tokens]"),
        ("mismatch/mean", "Engine against learner, |log-prob gap|, mean [nats]"),
        ("validation/all/score", "Validation score, all [reward]"),
        ("validation/openai/gsm8k/pass@4", "Validation pass@4, openai/gsm8k [share]"),
        ("validation/nll", "Validation negative log-likelihood [nats]"),
        ("reward/letters", "Reward of letters [reward]"),
        ("reward/<function>", "Reward of <function> [reward]"),
        ("staleness/3", "Tokens of age 3 [share]"),
        ("validation/reward/<x>", "validation/reward/<x>"),
        ("__proto__", "__proto__"),
    ],
)
def test_the_heading_of_a_figure(name: str, heading: str) -> None:
    assert figure(name).heading == heading and (figure(name).section == OTHER) == (name == heading)


def test_what_matters_comes_first() -> None:
    names = ["new", "lr", "time/step", "validation/gsm8k/score", "kl", "validation/all/score", "reward/mean"]
    assert [row.name for row in ordered(names)] == [names[place] for place in (6, 5, 4, 3, 1, 2, 0)]
    assert described(["kl", "kl"])[0]["heading"] == "KL [nats]"


def test_each_row_has_a_sentence() -> None:
    assert all(
        row.about.endswith(".") and row.title and row.name.count("<") == row.title.count("<") for row in TABLE.values()
    )
