"""Guess the number, search and the calculator: several turns."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from birl.envs.tasks.calculator import Calculator
from birl.envs.tasks.invented import country, passages, questions
from birl.errors import BirlError
from birl.types import Message, ToolCall
from tests.envs.tasks.playing import opened, play, rewards, row, tasks


def hints(remind: str, *replies: str) -> list[str]:
    found = play(opened("guess_number", remind=remind), row(answer="11"), *replies)
    return [f.messages[0].content if f.messages else "" for f in found]


def test_guesses_are_answered() -> None:
    replies = ("8", "My guess is 12.", "no idea", "11")
    assert hints("false", *replies) == ["Higher.", "Lower.", "Say a number.", ""]
    left = "Guess from 9 to 11."
    assert hints("true", *replies) == ["Higher. Guess from 9 to 16.", f"Lower. {left}", f"Say a number. {left}", ""]
    assert hints("true", "10", "12")[1] == "Lower. Guess 11."
    assert hints("false", "12345678911", "11") == ["Say a number.", ""]  # no guess of 11


def started(**options: str) -> list[tuple[str, str]]:
    world = opened("guess_number", **options)
    task = row("Guess my number from 1 to 16.", answer="11")
    first = (Message(role="system", content="Be brief."), *task.prompt)
    return [(m.role, m.content) for m in asyncio.run(world.open(replace(task, prompt=first)).start())]  # type: ignore


def test_a_game_is_shown_before() -> None:
    asked = ("user", "Guess my number from 1 to 16.")
    assert started(example="false") == [("system", "Be brief."), asked]
    shown = [asked, ("assistant", "8"), ("user", "Higher. Guess from 9 to 16."), ("assistant", "12")]
    assert started() == [("system", "Be brief."), *shown, ("user", f"Right. {asked[1]}")]


def test_a_guess_earns_at_its_own_turn() -> None:
    world, task = opened("guess_number", wasted="0.25"), row(answer="11")
    assert rewards(world, task, "8", "7", "what?", "12", "11") == [0, -0.25, -0.25, 0, 1]
    assert rewards(world, task, "17", "11") == [-0.25, 1]
    played = play(world, task, "8", "8", "11")
    assert [f.score for f in played] == [0, 0, 1] and played[-1].info == {"guess_number/guesses": 3.0}


def test_guesses_come_to_an_end() -> None:
    played = play(opened("guess_number"), row(answer="11"), *["1"] * 5)
    assert [f.done for f in played] == [False] * 4 + [True] and played[-1].score == 0


def test_halving_finds_every_number_and_one_guess_does_not() -> None:
    world = opened("guess_number", low="3", high="40", turns="6")
    lengths = []
    for secret in range(3, 41):
        task = row(answer=str(secret))
        replies = world.open(task).gold(task)  # type: ignore[union-attr]
        lengths.append(len(replies))
        assert rewards(world, task, *replies) == [0.0] * (len(replies) - 1) + [1.0]
    assert max(lengths) <= 6 and lengths.count(1) == 1


def test_guessing_without_a_chat_template_goes_on_in_text() -> None:
    task = row(answer="11")
    plain = replace(task, prompt="Guess from 1 to 16.")
    (feedback,) = play(opened("guess_number"), plain, "5")
    assert feedback.messages[0].content == "\nHigher. Guess from 6 to 16.\nGuess: "


CALL = Message(role="assistant", content="", tool_calls=(ToolCall(name="calculator", arguments="{}", id="a"),))


def call(name: str = "calculator", **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments), id="a")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (call(expression="12 * 12 + 1"), "145"),
        (call(expression="1 / 3"), "0.333333333333"),
        (call(expression="2 / 0"), "Error: it divides by zero."),
        (call(expression="__import__('os')"), "Error: only numbers, + - * / and parentheses are allowed."),
        (call(expression=7), "Error: calculator needs expression, as text."),
        (call(), "Error: calculator needs expression, as text."),
        (call("python", code="1"), "Error: there is no tool python; there is calculator."),
        (call(expression="*".join(["9999999999"] * 18) + "/7"), None),
    ],
)
def test_the_calculator_answers_whatever_it_is_asked(made: ToolCall, told: str | None) -> None:
    answer = asyncio.run(Calculator(row(answer="145"), Calculator.Config()).answer(made))
    assert answer == told if told else len(answer) > 10


def test_calculator_episodes() -> None:
    world, task = opened("calculator"), row(answer="145")
    asked = Message(role="assistant", content="", tool_calls=(call(expression="144 + 1"), call(expression="1")))
    first, last = play(world, task, asked, "It is 145.")
    assert [(m.role, m.content, m.tool_call_id, m.name) for m in first.messages] == [
        ("tool", "145", "a", "calculator"),
        ("tool", "1", "a", "calculator"),
    ]
    assert (first.reward, first.done, last.reward, last.done) == (0, False, 1, True)
    assert last.info == {"calculator/calls": 2.0}
    assert rewards(world, task, "It is 144.") == [0.0]
    assert play(world, task, *[asked] * 4)[-1].done
    assert world.open(task).tools[0]["function"]["name"] == "calculator"  # type: ignore[union-attr]


# --- search ---


def test_the_invented_country_is_consistent() -> None:
    land, titles = country(), [p["title"] for p in passages()]
    assert len(titles) == len(set(titles)) == 150
    texts = {p["title"]: p["text"] for p in passages()}
    for q in questions():
        assert all(title in texts for title in q["searches"]) and q["answer"] in texts[q["searches"][-1]]
        assert q["answer"] not in q["prompt"]
    assert all(p.teacher != p.name for p in land.people)


def test_every_question_can_be_found_out() -> None:
    world = opened("search")
    index = world.shared
    for q in questions():
        for title in q["searches"]:
            assert title in [hit["title"] for hit in index.search(title, 3)]
    train, held = tasks(world, "train"), tasks(world, "validation")
    assert len(train) + len(held) == len(questions()) and len(held) > 40
    assert not {t.prompt for t in train} & {t.prompt for t in held}


def test_search_episodes() -> None:
    world = opened("search", passages="2", turns="3")
    town = country().towns[0]
    task = row(f"On which river is {town.name}?", answer=town.river)
    found, done = play(
        world, task, f"<search>{town.name}</search> <answer>wrong</answer>", f"<answer>{town.river.upper()}.</answer>"
    )
    told = found.messages[0].content
    assert told.startswith("<information>\n") and town.river in told and told.count("\n") == 3
    assert (found.reward, found.done, done.reward, done.done) == (0, False, 1, True)
    assert done.info == {"search/searches": 1.0}
    assert rewards(world, task, "<answer>the sea</answer>") == [0.0]
    none, lost, last = play(world, task, "<search>zzz</search>", "hm", "<search></search>")
    assert "Nothing was found" in none.messages[0].content and "Write <search>" in lost.messages[0].content
    assert last.done and last.reward == 0


def test_a_corpus_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    text = "Oslo is the capital\u2028of Norway."  # a line break to Python, and none to JSON
    file.write_text(f'{{"title": "Oslo", "text": "{text}"}}\n\n{{"title": "B", "text": "c"}}\n')
    world = opened("search", corpus=str(file))
    assert world.rows is not None and world.rows("train") == []
    (feedback,) = play(world, row(answer="Oslo"), "<search>capital Norway</search>")
    assert "Oslo: Oslo is the capital" in feedback.messages[0].content
    for text, told in [
        ('{"title": "a"}', "row 1 needs"),
        ('{"title": "a", "text": "b"}\n{', "line 2: broken JSON"),
        ("", "is empty"),
        ("[]", "has no passages"),
    ]:
        file.write_text(text)
        with pytest.raises(BirlError, match=told):
            opened("search", corpus=str(file))
    with pytest.raises(BirlError, match="cannot be read"):
        opened("search", corpus=str(tmp_path / "none.jsonl"))


def test_search_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(BirlError, match=r"pip install 'birl\[search\]'"):
        opened("search")
