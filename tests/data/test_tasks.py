"""Tasks of rows: the formats that are in use, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset, DatasetDict

from birl.config.schema import Data
from birl.data.rows import given
from birl.data.tasks import Tasks, answer_text, filter_by_length, load_tasks, overlap, prompt_text, split_validation
from birl.errors import BirlError
from birl.types import Message, Task

USER = Message(role="user", content="What is the capital of China?")


def tasks(rows: list[dict[str, Any]], chat: bool = True, **config: Any) -> Tasks:
    return load_tasks(Data(**config), "train", chat=chat, given=rows)[0]


def task(row: dict[str, Any], chat: bool = True, **config: Any) -> Task:
    return tasks([row], chat, **config)[0]


def refused(row: dict[str, Any], chat: bool = True, **config: Any) -> str:
    with pytest.raises(BirlError) as error:
        task(row, chat, **config)
    return str(error.value)


def test_raw_text() -> None:
    """RL2's raw text: continued as it is by a base model, a user message where there is a template."""
    row = {"prompt": "The capital of China is", "extra_info": {"answer": "Beijing"}}
    assert task(row, chat=False).prompt == "The capital of China is"
    assert task(row, apply_chat_template=False).prompt == "The capital of China is"
    assert task(row).prompt == (Message(role="user", content="The capital of China is"),)
    assert task(row).answer == "Beijing"
    assert task(row).columns == {"extra_info": {"answer": "Beijing"}}


def test_messages() -> None:
    """RL2's messages."""
    row = {"messages": [{"role": "user", "content": USER.content}], "extra_info": {"answer": "Beijing"}}
    assert task(row).prompt == (USER,)
    assert task(row, apply_chat_template=False).prompt == (USER,)
    assert task(row).answer == "Beijing"


def test_prompt_and_further_columns() -> None:
    """MRL and TRL: everything but the prompt goes to the reward functions."""
    row = {"prompt": "Sort a list.", "ground_truths": ["a", "b"], "metadata": {"level": 3}}
    assert task(row).columns == {"ground_truths": ["a", "b"], "metadata": {"level": 3}}
    assert task(row).answer is None


def test_ground_truth_and_extra_info() -> None:
    """EasyRL: the prompt is a conversation, extra_info says where the row is from and how many answers it wants."""
    row = {
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": USER.content}],
        "ground_truth": r"\frac{1}{2}",
        "extra_info": {"data_source": "aime", "pass@k": 4},
    }
    made = task(row)
    assert made.prompt == (Message(role="system", content="Think."), USER)
    assert made.answer == r"\frac{1}{2}" and made.source == "aime"
    assert made.columns["extra_info"]["pass@k"] == 4


def test_pass_at_k_survives_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"{k}?", "ground_truth": "1", "extra_info": {"data_source": "a", "pass@k": k}} for k in (1, 8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "valid.parquet")
    loaded = load_tasks(Data(validation=[str(tmp_path / "valid.parquet")]), "validation", chat=True)[0]
    assert [t.columns["extra_info"]["pass@k"] for t in loaded] == [1, 8]
    assert loaded[1].id == "valid.parquet:1"


def test_reward_model_of_verl() -> None:
    row = {"prompt": "1?", "data_source": "gsm", "reward_model": {"style": "rule", "ground_truth": "7"}}
    assert task(row).answer == "7" and task(row).source == "gsm"


def test_gsm8k(tmp_path: Path) -> None:
    lines = [
        {"question": "Natalia sold clips to 48 friends. How many?", "answer": "She sold 48/2=<<48/2=24>>24.\n#### 72"},
        {"question": "How much is the house?", "answer": "It is $1,000+$234.\n#### 1,234"},
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loaded = load_tasks(Data(train=[str(path)]), "train", chat=True)[0]
    assert [t.answer for t in loaded] == ["72", "1234"]
    assert [t.columns for t in loaded] == [{"answer": line["answer"]} for line in lines]
    assert loaded[0].id == "train.jsonl:0" and loaded[0].source == "train"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (7.0, "7"),
        (0.5, "0.5"),
        (True, "True"),
        (" x ", "x"),
        ("a #### -1,234,567.5 ", "-1234567.5"),
        ("#### (1,2)", "(1,2)"),
        ("1,234", "1,234"),
        ("## Heading\n#### Part\nbody", "## Heading\n#### Part\nbody"),
        ({"target": 98, "numbers": [4, 9]}, '{"target": 98, "numbers": [4, 9]}'),
        (None, ""),
        (float("nan"), ""),
        ([], ""),
    ],
)
def test_answer_text(value: Any, text: str) -> None:
    assert answer_text(value) == text


def test_an_infinite_answer_is_refused() -> None:
    """As JSON has 1e400."""
    with pytest.raises(BirlError, match="row 1: `answer` is an infinite number"):
        tasks([{"prompt": "p", "answer": 1e400}])[0]


def test_which_column_is_found_first() -> None:
    row = {
        "messages": [{"role": "user", "content": "m"}],
        "prompt": "p",
        "question": "q",
        "solution": "s",
        "answer": "a",
    }
    assert prompt_text(task(row)) == "user: m"
    assert task(row).answer == "a" and task(row).columns == {
        "prompt": "p",
        "question": "q",
        "solution": "s",
        "answer": "a",
    }
    assert task(row, prompt_column="question", answer_column="solution").answer == "s"
    assert prompt_text(task(row, prompt_column="question")) == "user: q"


def test_dotted_columns() -> None:
    row = {"data": {"ask": "1?", "gold": 7}}
    made = task(row, prompt_column="data.ask", answer_column="data.gold")
    assert prompt_text(made) == "user: 1?" and made.answer == "7" and made.columns == row


def test_wrong_columns() -> None:
    message = refused({"text": "x", "label": 1})
    assert "It has the columns text, label." in message and "data.prompt_column" in message
    message = refused({"prompt": "x", "label": 1}, answer_column="lable")
    assert "data.answer_column=lable" in message and "Did you mean data.answer_column=label?" in message
    assert "has no such column" in refused({"prompt": "x", "info": {"a": 1}}, answer_column="info.b")


def test_system_prompt() -> None:
    system = Message(role="system", content="Be brief.")
    assert task({"prompt": USER.content}, system_prompt="Be brief.").prompt == (system, USER)
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]
    first = task({"messages": own}, system_prompt="Be brief.").prompt[0]
    assert isinstance(first, Message) and first.content == "Mine."
    assert "no chat template" in refused({"prompt": "x"}, chat=False, system_prompt="Be brief.")
    assert "apply_chat_template=false" in refused({"prompt": "x"}, system_prompt="Be brief.", apply_chat_template=False)


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (None, "`prompt` is empty"),
        ("", "prompt is empty"),
        (" \n", "prompt is empty"),
        ([], "`prompt` is empty"),
        (json.dumps([{"role": "user", "content": "Hi"}]), "`prompt` is a list of messages written as text"),
        (" " + str([{"content": "Hi", "role": "user"}]), "`prompt` is a list of messages written as text"),
        (7, "prompt is a number"),
        ({"role": "user"}, "prompt is an object"),
        (["hi"], "prompt[0] is a str"),
        ([{"role": "user", "content": None}], "prompt[0].content is null"),
        ([{"role": "bot", "content": "x"}], "prompt[0].role is 'bot'"),
        ([{"role": "bot", "content": "x"}], "Did you mean assistant?"),
        ([{"role": "human", "content": "x"}], "Did you mean user?"),
        ([{"role": "usr", "content": "x"}], "Did you mean user?"),
        ([{"role": "user", "content": ["x"]}], "prompt[0].content[0] is a str"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
            "content[1] is a picture, and there are none left beside the message",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "prompt[0].content[0].text is null"),
        ([{"role": "user"}], "prompt[0] has role; a message is"),
        ([{"role": "user", "tool_calls": [{"name": "f"}]}], "prompt[0].tool_calls is for assistant messages only"),
        ([{"role": "assistant", "tool_calls": "f"}], "prompt[0].tool_calls is a str, it needs a list"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "arguments of f are not an object"),
        ([{"role": "user", "content": " "}], "prompt[0].content is empty"),
        ([{"from": "human", "value": "x"}], "prompt[0] has from, value"),
        ([{"role": 1, "content": "x"}], "prompt[0].role is a number"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "7"}],
            "prompt[0].tool_calls[0] names no function",
        ),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ends with an assistant message"),
    ],
)
def test_bad_prompt_names_row_and_field(tmp_path: Path, prompt: Any, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine"}\n' + json.dumps({"prompt": prompt}) + "\n")
    loaded = load_tasks(Data(train=[str(path)]), "train", chat=True)[0]
    assert loaded[0].prompt
    with pytest.raises(BirlError) as error:
        loaded[1]
    assert str(error.value).startswith(f"{path}, row 2: ") and what in str(error.value)


@pytest.mark.parametrize("answer", [None, "", "  ", float("nan"), pandas.NA, pandas.NaT])
def test_row_without_an_answer(answer: Any) -> None:
    loaded = tasks([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}])
    with pytest.raises(BirlError, match=r"train, row 2: `answer` is empty.*data\.answer_column"):
        loaded[1]


def test_a_column_named_role_in_a_prompt_is_no_conversation() -> None:
    text = '[{"role": "director", "name": "Ada"}] Who is it?'
    assert task({"prompt": text}).prompt == (Message(role="user", content=text),)


def test_the_input_of_an_instruction_is_not_left_out() -> None:
    row = {"instruction": "Translate.", "output": "Hallo"}
    assert task({**row, "input": ""}, prompt_column="instruction").prompt
    assert "`input` would be ignored" in refused({**row, "input": "Hello"}, prompt_column="instruction")


@pytest.mark.parametrize("column", ["answer", "right"])
def test_answers_of_csv_that_look_like_booleans_stay_as_they_are_written(tmp_path: Path, column: str) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,{column},held\nIs it?,TRUE,true\nAnd this?,false,false\n")
    data = Data(train=[f"{tmp_path}/a.csv"], answer_column="right" if column == "right" else "")
    (one, two) = load_tasks(data, "train", chat=True)[0]
    assert (one.answer, one.columns["held"], two.answer, two.columns["held"]) == ("TRUE", True, "false", False)


def test_tools_of_a_row_are_not_left_out() -> None:
    """An environment may read the column; where there is none, nothing writes it into the prompt."""
    rows = [{"prompt": "a"}, {"prompt": "b", "tools": [{"type": "function"}]}]
    assert len([*load_tasks(Data(), "train", chat=True, given=rows)[0]]) == 2
    alone = load_tasks(Data(), "train", chat=True, given=rows, alone=True)[0]
    assert alone[0].prompt
    with pytest.raises(BirlError, match=r"train, row 2: `tools` would be ignored.*An environment can have tools"):
        alone[1]


def test_splits_are_not_mixed_into_the_training_set() -> None:
    """A DatasetDict is a dict of rows: training took the test split as well."""
    rows = [{"prompt": "a"}]
    assert len(load_tasks(Data(), "train", chat=True, given={"easy": rows, "hard": rows})) == 2
    both = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows))  # pyright: ignore
    for which in ("train", "validation"):
        with pytest.raises(BirlError, match=rf"{which}: it has the splits train, test\. Pass one"):
            load_tasks(Data(), which, chat=True, given=both)


def test_messages_without_a_template() -> None:
    assert "model.chat_template" in refused({"messages": [{"role": "user", "content": "x"}]}, chat=False)


def write(path: Path, prompts: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return str(path)


def test_sources_limits_and_splits(tmp_path: Path) -> None:
    for name, n in (("train", 5), ("validation", 4), ("test", 3)):
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(n)])
    both = Data(train=[str(tmp_path)], validation=[str(tmp_path)], max_samples=2, max_validation_samples=3)
    assert [t.id for t in load_tasks(both, "train", chat=True)[0]] == ["train.jsonl:0", "train.jsonl:1"]
    assert [t.id for t in load_tasks(both, "validation", chat=True)[0]][-1] == "validation.jsonl:2"
    named = Data(train=[str(tmp_path)], validation=[str(tmp_path)], split="test", validation_data_split="train")
    assert len(load_tasks(named, "train", chat=True)[0]) == 3
    assert len(load_tasks(named, "validation", chat=True)[0]) == 5
    assert load_tasks(Data(), "validation", chat=True) == []


def test_ids_are_unique_across_sources(tmp_path: Path) -> None:
    paths = [write(tmp_path / folder / "train.jsonl", ["x"]) for folder in ("sums", "products")]
    loaded = load_tasks(Data(train=paths), "train", chat=True)
    assert [t[0].id for t in loaded] == ["sums/train.jsonl:0", "products/train.jsonl:0"]
    twice = load_tasks(Data(train=paths[:1] * 2), "train", chat=True)
    assert len({t[0].id for t in twice}) == 2


@pytest.mark.parametrize(
    ("sources", "first"),
    [
        (["both"], ["math/train.jsonl:0", "words/train.jsonl:0"]),  # two files of a name in one folder
        (["a", "b"], ["0:train-1.jsonl:0", "0:train-2.jsonl:0", "1:train-2.jsonl:0"]),  # not the first of both
        (["a", "sums/train-2.jsonl"], ["train-1.jsonl:0", "train-2.jsonl:0", "sums/train-2.jsonl:0"]),
    ],
)
def test_ids_are_unique_within_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], first: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("both/math/train", "both/words/train", "a/train-1", "a/train-2", "b/train-2", "sums/train-2"):
        write(Path(f"{file}.jsonl"), ["x", "y"])
    ids = [task.id for source in load_tasks(Data(train=sources), "train", chat=True) for task in source]
    assert [i for i in ids if i.endswith(":0")] == first and len(set(ids)) == len(ids)


def test_tasks_are_a_sequence() -> None:
    loaded = tasks([{"prompt": str(i)} for i in range(5)])
    assert [t.id for t in loaded[1:3]] == ["train:1", "train:2"]
    assert [t.id for t in loaded.select([4, 0])] == ["train:4", "train:0"]
    assert loaded[-1].id == "train:4" and len(list(loaded)) == 5
    with pytest.raises(IndexError):
        loaded[5]


def test_filter_by_length() -> None:
    loaded = tasks([{"prompt": "x" * n} for n in (5, 1, 9, 3)])
    kept, dropped = filter_by_length(loaded, lambda t: len(t.prompt[0].content), 4)  # type: ignore[union-attr]
    assert [t.id for t in kept] == ["train:1", "train:3"] and dropped == 2
    assert filter_by_length(kept, lambda t: 99, 4)[1] == 2


def test_overlap() -> None:
    train = tasks([{"prompt": p} for p in ("a", "b", "c")])
    held = tasks([{"prompt": p} for p in ("b ", "x", "b", "c\n")])
    assert overlap(train, held) == 3 and overlap(train, []) == 0


@pytest.mark.parametrize("seed", range(5))
def test_split_keeps_equal_prompts_together(seed: int) -> None:
    rng = random.Random(seed)
    sources = [tasks([{"prompt": str(rng.randrange(60))} for _ in range(n)]) for n in (100, 40)]
    train, held = split_validation(sources, 0.2, seed)
    sides = [{prompt_text(t) for s in side for t in s} for side in (train, held)]
    assert not sides[0] & sides[1]
    assert sum(map(len, train)) + sum(map(len, held)) == 140
    assert 20 <= sum(map(len, held)) <= 40
    assert [t.id for s in held for t in s] == [t.id for s in split_validation(sources, 0.2, seed)[1] for t in s]


def test_split_is_exact_without_duplicates_and_depends_on_the_seed() -> None:
    source = tasks([{"prompt": str(i)} for i in range(50)])
    picks = []
    for seed in (0, 1):
        train, held = split_validation([source], 0.1, seed)
        assert (len(train[0]), len(held[0])) == (45, 5)
        assert sorted(t.id for t in [*train[0], *held[0]]) == sorted(t.id for t in source)
        picks.append([t.id for t in held[0]])
    assert picks[0] != picks[1]


def test_split_of_too_little() -> None:
    source = tasks([{"prompt": str(i)} for i in range(4)])
    with pytest.raises(BirlError, match="less than one row"):
        split_validation([source], 0.01, 0)
    with pytest.raises(BirlError, match="leaves no training row"):
        split_validation([source], 1.0, 0)


def test_given_limit() -> None:
    assert len(tasks([{"prompt": "a"}] * 5, max_samples=2)) == 2
    assert len(given([{"prompt": "a"}] * 5, "train")) == 5
