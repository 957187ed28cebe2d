"""Arithmetic, countdown and letter counting: what is right, what is wrong, what is an error."""

import pytest

from birl.envs.tasks.dictionary import WORDS
from birl.envs.tasks.letter_counting import LetterCounting
from birl.envs.tasks.rows import final, normal, number
from birl.errors import BirlError
from tests.envs.tasks.playing import opened, play, rewards, row


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("14", 1.0),
        ("9 + 5 = 14.", 1.0),
        ("The sum of 9 and 5 is 14", 1.0),
        ("<answer>14</answer> not 15", 1.0),
        ("<answer>13</answer><answer> 14.0 </answer>", 1.0),
        ("9 + 5", 0.0),
        ("141", 0.0),
        ("-14", 0.0),
        ("14x", 0.0),
        ("", 0.0),
        ("fourteen", 0.0),
    ],
)
def test_arithmetic(reply: str, value: float) -> None:
    assert rewards(opened("arithmetic"), row(answer="14"), reply) == [value]


def test_numbers_of_all_spellings() -> None:
    assert [number(t) for t in ("1,234", "\u22125", "it is -0.5.", "x7 y", "1e5")] == [1234, -5, -0.5, None, None]
    assert number("two or Three", words=True) == 3 and number("3 times, not ten", words=True) == 10
    assert number("two") is None
    assert final("<answer>\n a </answer>") == "a" and final(" b ") == "b"
    assert normal("The Town of  Bel-ford!") == "town of bel ford"


def test_a_wrong_row_is_an_error_and_no_reward() -> None:
    for kind, task in [("arithmetic", row(answer="many")), ("arithmetic", row()), ("countdown", row(answer="1 + 2"))]:
        with pytest.raises(BirlError, match=r"is no number|has no (answer|column 'numbers')"):
            rewards(opened(kind), task, "14")


COUNTDOWN = [
    ("<answer>(6 - 2) * 5</answer>", True, True),
    ("I try 5 + 6. <answer>5 * (6 - 2) = 20</answer>", True, True),
    ("5 \u00d7 (6 \u2212 2)", True, True),
    ("<answer>5 * 6 - 2</answer>", True, False),
    ("<answer>20</answer>", False, False),
    ("<answer>5 * 2 * 2</answer>", False, False),
    ("<answer>(6 - 2) * 5 * 1</answer>", False, False),
    ("<answer>(6 - 2) * 5 + 5 - 5</answer>", False, False),
    ("<answer>5 / 0</answer>", False, False),
    ("<answer>5 ** 2</answer>", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("reply", "valid", "right"), COUNTDOWN)
def test_countdown(reply: str, valid: bool, right: bool) -> None:
    task = row(answer="(6 - 2) * 5", numbers=[5, 6, 2], target=20)
    (feedback,) = play(opened("countdown", partial="0.1"), task, reply)
    assert feedback.reward == (1.0 if right else 0.1 if valid else 0.0)
    assert feedback.score in (None, float(right)) and feedback.done
    assert feedback.info["countdown/valid"] == float(valid)


def test_countdown_with_numbers_left_over() -> None:
    task = row(answer="4 * 5", numbers=[4, 5, 7], target=20)
    assert rewards(opened("countdown", use="at_most_once"), task, "4 * 5") == [1.0]
    assert rewards(opened("countdown", use="at_most_once"), task, "4 + 4 + 7 + 5") == [0.0]
    assert rewards(opened("countdown"), task, "4 * 5") == [0.0]


@pytest.mark.parametrize(("reply", "value"), [("It occurs 2 times.", 1), ("Two", 1), ("3", 0), ("a pair", 0)])
def test_letter_counting(reply: str, value: float) -> None:
    assert rewards(opened("letter_counting"), row(answer="2"), reply) == [value]


def test_words_are_words() -> None:
    assert len(WORDS) == len(set(WORDS)) > 200 and all(w.isalpha() and w.islower() for w in WORDS)


def test_a_word_is_spelled_where_that_is_asked_for() -> None:
    plain, spelled = (LetterCounting.tasks(LetterCounting.Config(spelled=s, rows=3), "train")[0] for s in (False, True))
    word = plain["word"]
    assert spelled["prompt"] == plain["prompt"].replace(word, f"{word} ({' '.join(word)})") != plain["prompt"]


def test_no_answer_of_letter_counting_is_right_in_most_cases() -> None:
    """A model that always said 1 had 0.79 once, and that looked like learning."""
    config = LetterCounting.Config()
    for split in ("train", "validation"):
        answers = [row["answer"] for row in LetterCounting.tasks(config, split)]
        assert max(answers.count(a) for a in set(answers)) < 0.55 * len(answers)
