"""Problems and scores are the package's own."""

import asyncio

from tests.envs.adapters.play import installed, mistake, opened, play, without, world

reasoning_gym = installed("reasoning_gym")


def test_scores_are_the_packages() -> None:
    made = world("reasoning_gym", task="chain_sum", parameters=["max_terms=3", "max_digits=2"], rows="4", seed="5")
    assert made.rows is not None
    own = reasoning_gym.create_dataset("chain_sum", size=104, seed=5, max_terms=3, max_digits=2)
    for row, problem in zip(made.rows("train"), own, strict=False):
        assert (row["prompt"], row["answer"]) == (problem["question"], problem["answer"])
        for text, answer in ((f"So <answer> {row['answer']} </answer>", row["answer"]), ("<answer>x</answer>", "x")):
            first, found = play(made, row, text)
            assert first == row["prompt"] and found[0].done
            assert found[0].reward == own.score_answer(answer, problem)
        assert play(made, row, str(row["answer"]))[1][0].reward == own.score_answer(None, problem) == 0.0


def test_partial_credit_is_the_packages() -> None:
    made = world("reasoning_gym", task="countdown", rows="1", tag="")
    assert made.rows is not None
    (row,) = made.rows("train")
    own = reasoning_gym.create_dataset("countdown", size=101, seed=0)
    for text in (row["answer"], "1 + 1", "no sum"):
        assert play(made, row, text)[1][0].reward == own.score_answer(text, own[0])
    assert 0 < play(made, row, "1 + 1")[1][0].reward < 1 == play(made, row, row["answer"])[1][0].reward


def test_problems_come_from_the_seed_and_validation_has_others() -> None:
    def prompts(split: str, seed: str) -> list[str]:
        made = world("reasoning_gym", task="chain_sum", rows="20", validation_rows="20", seed=seed)
        assert made.rows is not None
        return [row["prompt"] for row in made.rows(split)]

    assert prompts("train", "3") == prompts("train", "3") != prompts("train", "4000")
    assert not set(prompts("train", "3")) & set(prompts("validation", "3"))


def test_the_answer_is_asked_for_as_the_package_does() -> None:
    made = world("reasoning_gym", system="direct")
    assert made.rows is not None
    first = asyncio.run(opened(made, made.rows("train")[0]).start())
    assert first[0].content == reasoning_gym.utils.SYSTEM_PROMPTS["direct"]
    assert [m.role for m in first] == ["system", "user"]


def test_mistakes_are_told() -> None:
    assert "Did you mean chain_sum" in mistake("reasoning_gym", task="chain_sums")
    assert "unexpected keyword argument 'terms'" in mistake("reasoning_gym", parameters=["terms=3"])
    assert "chain_sum: " in mistake("reasoning_gym", parameters=["min_terms=9", "max_terms=2"])
    assert "is not name=value" in mistake("reasoning_gym", parameters=["terms"])
    assert "pip install 'birl[reasoning-gym]'" in without("reasoning_gym", "reasoning_gym")
