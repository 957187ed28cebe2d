import random
import string
import time

import pytest

from birl.view import flags

ENGLISH = (
    "Anna has three apples and buys five more, so she has eight. Then her brother eats two of them, which leaves six. "
    "She shares the rest among three friends; each gets two, and nothing is left over for the next day at all."
)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "no no no no no no no no no",
            "a" * 30,
            "Wait, let me think. " * 6,
            "x=1\n" * 10,
            "7 7 7 7 7 7 7 7 7 7 7 7 7",
        ),
        *(
            "And so on: " + "The answer is 7.\n" * 5,
            "🙂" * 24,
            "loop " * 30 + "\n\n",
            (ENGLISH + " ") * 12 + "The end.",
        ),
    ],
)
def test_repetition_is_seen(text: str) -> None:
    assert flags.repetition(text)


@pytest.mark.parametrize(
    "text", ["", "7", "no no no", ENGLISH, "a" * 23, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "ha " * 3]
)
def test_ordinary_text_does_not_repeat_itself(text: str) -> None:
    assert flags.repetition(text) == ""


def test_the_reason_names_the_unit_and_how_often() -> None:
    assert flags.repetition("Well. " + "Again! " * 5) == "ends with “ Again!” 5 times"


def test_random_text_is_not_repetitive() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(string.ascii_letters + " ", k=rng.randint(0, 400)))
        assert flags.repetition(text) == ""


def test_a_blowup_is_twice_what_is_usual() -> None:
    assert flags.length_blowup(201, 100.0) == "201 tokens, where 95 of 100 earlier answers had at most 100"
    assert not flags.length_blowup(200, 100.0) and not flags.length_blowup(63, 1.0)
    assert not flags.length_blowup(10**6, float("nan"))  # nothing to compare with


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{}", r"\boxed{} without content"),
        (r"\boxed{1} or \boxed{2}", r"2 different \boxed{}"),
        ("<answer></answer>", "<answer> without content"),
        ("<Answer>1</Answer><answer>2</answer>", "2 different <answer>"),
        ("#### 3\n#### 4\n#### 5", "3 different ####"),
        (
            "The answer is 1. The answer is 2. The answer is 3. The answer is 4.",
            "4 different values behind “answer is”",
        ),
    ],
)
def test_gamed_formats_are_seen(text: str, reason: str) -> None:
    assert flags.format_gaming(text) == reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        r"\boxed{7}",
        r"\boxed{7} so \boxed{ 7 }",
        "#### 72",
        "<answer>x</answer>",
        "# Title\n## Part",
        r"\boxed{\frac{1}{2}}",
    ],
)
def test_one_answer_in_its_format_is_no_gaming(text: str) -> None:
    assert flags.format_gaming(text) == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 7.", "7"),
        ("1,000 apples", "1000"),
        ("0.50", "1/2"),
        ("THE  CAT", "the cat"),
        ("\uff17", "7"),
        ("x=-3", "-3.0"),
    ],
)
def test_an_answer_that_is_there_backs_its_score(text: str, answer: str) -> None:
    assert flags.unbacked(text, answer, 1.0) == ""


def test_a_score_without_its_answer_is_seen() -> None:
    assert flags.unbacked("I do not know", "7", 1.0) == "score 1, but the answer “7” is not in the text"
    assert flags.unbacked("", "7", 1.5)
    for answer, score in (("7", 0.99), (None, 1.0), ("", 1.0), ("7" * 65, 1.0), ("7", None), ("7", float("nan"))):
        assert flags.unbacked("nothing", answer, score) == ""


@pytest.mark.parametrize("answer", ["1e999999999", "9" * 5000, "1/0", "--3", "1/2/3", "∞", "\ud800"])
def test_an_answer_that_is_hard_to_compute_takes_no_time(answer: str) -> None:
    start = time.monotonic()
    flags.unbacked("some 1e5 text 3/4 1/0 " * 20, answer[:64], 1.0)
    assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    "text",
    [
        *("The answer is семь потому что это правда", "答案是七, 因为三加四等于七。 The answer is seven, of course."),
        *("Well, I think 일곱입니다 그래서 정답은 칠", "abc " + "\ufffd" * 20),
    ],
)
def test_a_second_script_is_seen(text: str) -> None:
    assert flags.script_switch(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ENGLISH,
        "café déjà vu",
        "答えは七です。カタカナも漢字も",
        "\u03b1 + \u03b2 = \u03b3, where all of them are numbers",
        "Ответ: 7",
        "🙂🙂🙂",
        "x\ufffd",
    ],
)
def test_one_script_is_no_switch(text: str) -> None:
    assert flags.script_switch(text) == ""


def test_the_same_answers_are_counted() -> None:
    texts = [ENGLISH, ENGLISH.upper(), "short", "short", ENGLISH.replace(" ", "\n"), ENGLISH + "!"]
    same = "3 of 6 answers of its group are the same"
    assert flags.duplicates([flags.key(text) for text in texts]) == [same, same, "", "", same, ""]
    assert flags.duplicates([]) == []


def test_end_tokens_are_no_text() -> None:
    for text in ("7<|im_end|>", "7<|im_end|>\n<|endoftext|>", "7</s>", "7 <｜end▁of▁sentence｜>", "7"):
        assert flags.plain(text) == "7"
    assert flags.plain("a <|b") == "a <|b"


@pytest.mark.parametrize(
    "unit", ["\n", " ", "<|", "\\boxed{", "<answer>", "####", "the answer is ", "{", "\ufffd", "a\n", "1,", "<|x|>"]
)
def test_no_text_takes_a_detector_long(unit: str) -> None:
    text = unit * (60_000 // len(unit))
    start = time.monotonic()
    plain = flags.plain(text)
    for reason in (
        flags.repetition(plain),
        flags.format_gaming(plain),
        flags.unbacked(plain, "7.5", 1.0),
        flags.script_switch(plain),
    ):
        assert isinstance(reason, str)
    flags.key(plain)
    assert time.monotonic() - start < 100  # milliseconds, unless something is quadratic
