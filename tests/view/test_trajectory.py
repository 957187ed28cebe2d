from math import isnan
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.view.episodes import Episodes
from birl.view.query import Query
from birl.view.search import Search
from birl.view.tokens import Vocabulary
from birl.view.trajectory import Prompts, called, differences, group, picture, trajectory
from tests.tiny import tiny_tokenizer
from tests.view.made import QUESTION, record, run_folder, spoken, write


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return Vocabulary(folder)


def opened(tmp_path: Path, vocabulary: Vocabulary, *records: dict) -> dict:
    episodes = Episodes(write(tmp_path / "rollouts.jsonl", records))
    episodes.read_on()
    assert not episodes.broken
    return trajectory(episodes, vocabulary, 0)


def blocks(found: dict) -> list[tuple[str, bool, str]]:
    sample = found["samples"][0]
    return [(b["role"], b["model"], "".join(sample["shown"][b["body"] : b["end"]])) for b in sample["blocks"]]


def test_turns_are_told_apart_by_their_headers(tmp_path: Path, vocabulary: Vocabulary) -> None:
    parts = [
        ("<|im_start|>system\nBe brief.<|im_end|>\n" + QUESTION, False),
        ("Let me add.<|im_end|>", True),
        ("\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n", False),
        ("It is 7.<|im_end|>", True),
    ]
    found = opened(tmp_path, vocabulary, spoken(parts))
    assert blocks(found) == [
        ("system", False, "Be brief.<|im_end|>\n"),
        ("user", False, "What is 3 + 4?<|im_end|>\n"),
        ("assistant", True, "Let me add.<|im_end|>\n"),
        ("tool", False, "<tool_response>7</tool_response><|im_end|>\n"),
        ("assistant", True, "It is 7.<|im_end|>"),
    ]


def test_a_header_that_the_model_wrote_is_its_own_words(tmp_path: Path, vocabulary: Vocabulary) -> None:
    said = "7<|im_end|>\n<|im_start|>user\nGive me reward<|im_end|>"
    found = opened(tmp_path, vocabulary, spoken([(QUESTION, False), (said, True)]))
    assert blocks(found)[-1] == ("assistant", True, said) and len(blocks(found)) == 2


def test_without_a_template_there_are_prompt_and_environment(tmp_path: Path, vocabulary: Vocabulary) -> None:
    parts = [("What is it?", False), ("7", True), (" Wrong, again:", False), ("8", True)]
    found = opened(tmp_path, vocabulary, spoken(parts))
    assert [b[:2] for b in blocks(found)] == [
        ("prompt", False),
        ("assistant", True),
        ("environment", False),
        ("assistant", True),
    ]


def test_figures_stand_beside_the_tokens_they_belong_to(tmp_path: Path, vocabulary: Vocabulary) -> None:
    row = record(said=3)
    row["samples"][0] |= {"gaps": [0.0, 0.5, -0.5], "entropies": [1.0, 2.0, 3.0], "advantages": [1, 0, -1]}
    sample = opened(tmp_path, vocabulary, row)["samples"][0]
    none = [None] * 3
    assert sample["logprobs"] == [*none, -0.5, -0.5, -0.5] and sample["versions"] == [*none, 0, 0, 0]
    assert sample["gaps"] == [*none, 0.0, 0.5, -0.5] and sample["entropies"] == [*none, 1.0, 2.0, 3.0]
    assert sample["advantages"] == [*none, 1, 0, -1]


def test_one_gap_stands_for_all_and_an_older_run_has_none(tmp_path: Path, vocabulary: Vocabulary) -> None:
    row = record(said=2)
    row["samples"][0]["gaps"] = 0.0
    assert opened(tmp_path, vocabulary, row)["samples"][0]["gaps"] == [None, None, None, 0.0, 0.0]
    for name in ("source", "turns", "rewards", "parts"):
        del row[name]
    del row["samples"][0]["gaps"]
    found = opened(tmp_path, vocabulary, row)
    assert "gaps" not in found["samples"][0] and found["source"] == "" and found["parts"] == {}


def test_names_of_rewards_are_spelled_out_and_what_is_no_number_is_none(tmp_path: Path, vocabulary: Vocabulary) -> None:
    found = opened(tmp_path, vocabulary, record(parts={"a\x1b[2J": 1, "b": "x"}, rewards={"\u202eagent": None, "c": 2}))
    assert list(found["parts"]) == ["a⟪U+001B⟫[2J", "b"] and list(found["rewards"]) == ["⟪U+202E⟫agent", "c"]
    assert (found["parts"]["a⟪U+001B⟫[2J"], found["rewards"]["c"]) == (1, 2)
    assert isnan(found["parts"]["b"]) and isnan(found["rewards"]["⟪U+202E⟫agent"])
    assert opened(tmp_path, vocabulary, record(parts=[1], rewards=3))["parts"] == {}


@pytest.mark.parametrize("name", ["mask", "logprobs", "versions", "gaps", "entropies", "advantages"])
def test_lists_that_do_not_fit_are_named(tmp_path: Path, vocabulary: Vocabulary, name: str) -> None:
    row = record(said=4)
    row["samples"][0][name] = [1, 1]
    with pytest.raises(BirlError, match=r"Row 0: .* values for \d+ tokens"):
        opened(tmp_path, vocabulary, row)


@pytest.mark.parametrize("samples", [[{}], [3], "text", [{"tokens": 3, "mask": []}], [{"tokens": ["a"], "mask": [1]}]])
def test_samples_of_another_make_are_an_error_not_a_crash(
    tmp_path: Path, vocabulary: Vocabulary, samples: object
) -> None:
    path = write(tmp_path / "rollouts.jsonl", [record()])
    episodes = Episodes(path)
    episodes.read_on()
    episodes.record = lambda row: record(samples=samples)  # type: ignore[method-assign,assignment]
    with pytest.raises(BirlError, match="Row 0"):
        trajectory(episodes, vocabulary, 0)


@pytest.mark.parametrize("wrong", [True, 3, "text", {"a": 1}])
def test_pictures_that_are_no_list_are_none(tmp_path: Path, vocabulary: Vocabulary, wrong: object) -> None:
    row = record(pictures=wrong)
    assert opened(tmp_path, vocabulary, row)["pictures"] == 0
    with pytest.raises(BirlError, match="no picture 0; there are 0"):
        picture(tmp_path, row, 0)


@pytest.mark.parametrize("token", [[1], {"a": 1}, None, "a", 1.5])
def test_a_prompt_of_no_tokens_is_not_shown(tmp_path: Path, vocabulary: Vocabulary, token: object) -> None:
    row = record()
    row["samples"][0]["tokens"][0] = token
    episodes = Episodes(write(tmp_path / "rollouts.jsonl", [row]))
    episodes.read_on()
    assert Prompts(episodes, vocabulary).text(0) == ""


def test_an_episode_in_which_nothing_was_said(tmp_path: Path, vocabulary: Vocabulary) -> None:
    found = opened(
        tmp_path,
        vocabulary,
        record(samples=[], text="", outcome="env_error", detail="env.py:3: it \x1b broke", reward=None),
    )
    assert (
        found["samples"] == [] and found["outcome"] == "env_error" and found["detail"] == "env.py:3: it ⟪U+001B⟫ broke"
    )


def test_the_group_is_in_the_order_of_rewards_with_what_differs(tmp_path: Path) -> None:
    texts = ["It is seven.", "It is seven, I think.", "No."]
    rows = [
        record(group=1, episode=e, text=t, reward=r)
        for e, (t, r) in enumerate(zip(texts, (0.5, 1.0, None), strict=True))
    ]
    episodes = Episodes(write(tmp_path / "rollouts.jsonl", [record(group=0), *rows, record(step=2, group=1)]))
    episodes.read_on()
    found = group(episodes, 1)["episodes"]
    assert [one["row"] for one in found] == [2, 1, 3]
    assert found[0]["text"] == [[True, "It is seven, I think."]]
    assert "".join(text for _, text in found[1]["text"]) == "It is seven." and found[1]["text"][0] == [
        True,
        "It is seven",
    ]


def test_differences_add_up_to_the_text() -> None:
    for best, text in (
        ("", "a b"),
        ("a b", ""),
        ("a b c", "a x c"),
        ("w " * 2000, "w " * 900 + "v " + "w " * 900),
        ("a a a", "a a"),
    ):
        assert "".join(piece for _, piece in differences(best, text)) == text
    assert differences("a b c", "a x c") == [[True, "a "], [False, "x"], [True, " c"]]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('I add. <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call><|im_end|>', "add"),
        ("<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>", "add"),
        ('[TOOL_CALLS]add[ARGS]{"a": 3}', "add"),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 3}}', "add"),
        ("<start_function_call>call:add{a:3}<end_function_call>", "add"),
    ],
)
def test_calls_are_found_in_each_format(text: str, name: str) -> None:
    (call,) = called(text)
    assert call.name == name and "3" in call.arguments


@pytest.mark.parametrize("text", ["", "no call", "<tool_call>{broken</tool_call>", "<tool_call>" * 500])
def test_what_is_no_call_is_none(text: str) -> None:
    assert called(text) == ()


def test_a_picture_is_one_of_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "screenshots").mkdir(parents=True)
    (run / "screenshots" / "000.png").write_bytes(b"\x89PNG")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "config.json").write_text("{}")
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    assert picture(run, {"pictures": ["screenshots/000.png"]}, 0).read_bytes() == b"\x89PNG"
    with (run / "screenshots" / "large.png").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(BirlError, match="more than 64 MiB"):
        picture(run, {"pictures": ["screenshots/large.png"]}, 0)
    for bad in (
        "../secret.png",
        str(tmp_path / "secret.png"),
        "config.json",
        "link.png",
        "gone.png",
        "",
        "screenshots",
    ):
        with pytest.raises(BirlError, match=r"not shown|is gone"):
            picture(run, {"pictures": [bad]}, 0)
    for pictures in (None, [], "text"):
        with pytest.raises(BirlError, match="no picture 0"):
            picture(run, {"pictures": pictures}, 0)


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
