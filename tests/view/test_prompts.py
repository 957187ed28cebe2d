"""What was asked, in the list of rollouts and in a search."""

from pathlib import Path

import pytest

from birl.view.episodes import Episodes
from birl.view.prompts import Prompts
from birl.view.query import Query
from birl.view.search import Search
from birl.view.tokens import Vocabulary
from tests.view.made import record, run_folder, spoken

SYSTEM = "<|im_start|>system\nYou are helpful.<|im_end|>\n"


def asked(question: str, **more: object) -> dict:
    before = f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return spoken([(before, False), ("It is 7.<|im_end|>", True)], **more)


@pytest.fixture
def episodes(tmp_path: Path) -> Episodes:
    rows = [asked("What is 3 + 4?"), asked("Anna has apples.\nHow many?", step=2), record(step=3)]
    rows += [spoken([("Two plus two is ", False), ("4", True)], step=4), record(step=5, samples=[])]
    episodes = Episodes(run_folder(tmp_path / "demo", rows) / "rollouts.jsonl")
    episodes.read_on()
    return episodes


def test_the_prompt_is_the_users_message(episodes: Episodes) -> None:
    prompts = Prompts(episodes, Vocabulary(episodes.path.parent / "model"))
    assert prompts.text(0) == "What is 3 + 4?" and prompts.text(1) == "Anna has apples.\nHow many?"
    assert prompts.text(3) == "Two plus two is" and prompts.text(4) == ""
    assert Prompts(episodes, Vocabulary(episodes.path.parent / "none")).text(0) == ""


@pytest.mark.parametrize(
    ("query", "words", "rows"),
    [
        ("prompt ilike '%APPLES%'", "", [1]),
        ("contains(prompt, '3 + 4')", "", [0]),
        ("prompt not ilike '%what%' and step < 3", "", [1]),
        ("prompt ilike '%helpful%'", "", []),  # the system's
        ("prompt ilike '%anna%'", "It is 7", [1]),
        ("prompt_tokens > 0", "7", [0, 1, 2]),
        ("", "ANNA HAS", [1]),
    ],
)
def test_a_prompt_is_searched_by_its_text(episodes: Episodes, query: str, words: str, rows: list[int]) -> None:
    search = Search(episodes, Query.parse(query, words))
    search.go_on()
    assert search.rows.tolist() == rows
