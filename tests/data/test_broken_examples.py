"""Rows of SFT, preferences and votes that are wrong are named, with the fix."""

from pathlib import Path
from typing import Any

import pytest

from birl.config import schema
from birl.data.examples import load_examples
from birl.data.tasks import load_tasks
from birl.errors import BirlError
from tests.data.test_examples import PAIR_FORMS, TALK, chat, pairs, texts, whole

BROKEN = {
    "no answer": ({"prompt": "Hi", "other": "x"}, "`prompt` has no answer"),
    "empty": ({"prompt": "Hi", "response": " "}, "response is empty"),
    "number": ({"prompt": 3, "response": "x"}, "prompt is a number"),
    "silent": ({"messages": TALK[:2]}, "no message of assistant"),
    "first": ({"messages": TALK[2:]}, "begins with an assistant message"),
    "columns": ({"a": "b"}, "no column messages"),
    "mixed": ({"messages": None, "prompt": "Hi", "response": "x"}, "has no `messages`, which other rows have"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "content is a number"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_row_is_named(case: str) -> None:
    row, message = BROKEN[case]
    with pytest.raises(BirlError, match=message) as error:
        texts([row])
    assert case == "columns" or "row 1" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "add"}}]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("completions", ["3 + 4", "= 7"]),
    ],
)
def test_a_column_that_would_be_left_out_is_refused(name: str, value: object) -> None:
    """TRL's and Alpaca's formats: what the model would not see is not passed over in silence; an empty value says
    nothing."""
    for read, row in ((texts, {"prompt": "Hi", "response": "x"}), (pairs, PAIR_FORMS["prompt"])):
        with pytest.raises(BirlError, match=rf"row 2.*`{name}` would be ignored"):
            read([{**row, name: None}, {**row, name: value}])


def test_the_input_of_an_instruction_is_not_left_out() -> None:
    with pytest.raises(BirlError, match="row 2: `input` would be ignored"):
        row = {"instruction": "Translate.", "output": "Hallo"}
        texts([{**row, "input": ""}, {**row, "input": "Hello"}], prompt_column="instruction")


BROKEN_PAIRS = {
    "messages": (
        {**PAIR_FORMS["prompt"], "chosen": str([{"content": "a", "role": "assistant"}])},
        "`chosen` is a list of messages written as text",
    ),
    "same": ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "are the same"),
    "missing": ({"prompt": "Hi", "chosen": "a"}, r"data\.rejected_column=rejected: .* has no such column"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "an answer without a prompt"),
    "question": ({"chosen": TALK[1:2], "rejected": TALK[1:3]}, "the answer to judge is missing"),
    "margin": ({**PAIR_FORMS["prompt"], "margin": "big"}, "needs to be a number"),
}


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_pair_is_named(case: str) -> None:
    row, message = BROKEN_PAIRS[case]
    with pytest.raises(BirlError, match=message):
        pairs([row], margin_column="margin" if case == "margin" else "")


KTO_ROW = {"prompt": "Hi", "completion": "x", "label": False}


@pytest.mark.parametrize(
    ("read", "row", "said"),
    [
        ("sft", PAIR_FORMS["prompt"], r"`birl dpo` and `birl rm`.*data\.answer_column=chosen"),
        ("sft", PAIR_FORMS["conversations"], "`birl dpo` and `birl rm`"),
        ("sft", KTO_ROW, r"`birl dpo preference\.loss=kto`.*data\.answer_column=completion"),
        ("sft", {"prompt": "Hi"}, "row 1.*`birl rl`"),
        ("dpo", {"prompt": "Hi", "completion": "x"}, "`birl sft`"),
        ("dpo", {"text": "Hi"}, "`birl sft`"),
        ("dpo", {"prompt": "Hi"}, "`birl rl`"),
        ("dpo", {"messages": TALK}, "Conversations are for `birl sft` and `birl rl`"),
        ("sft", {"prompt": "Hi", "completions": ["x"], "labels": [True]}, r"steps are not supported\.$"),
        ("rm", KTO_ROW, r"`birl dpo preference\.loss=kto`"),
        ("rl", {"text": "Hi"}, "`birl sft`"),
        ("rl", PAIR_FORMS["conversations"], "`birl dpo` and `birl rm`"),
        ("rl", {"messages": TALK}, "row 1.*`birl sft`"),
    ],
)
def test_rows_for_another_command_name_it(read: str, row: dict[str, Any], said: str) -> None:
    with pytest.raises(BirlError, match=said):
        if read == "sft":
            texts([row])
        elif read == "rl":
            load_tasks(schema.Data(), "train", chat=True, given=[row])[0][0]
        else:
            pairs([row], kind=schema.LabelledPairs if read == "dpo" else schema.RankedPairs)


@pytest.mark.parametrize("quote", ["", '"'])
def test_numbers_of_csv_are_text_as_they_are_written(tmp_path: Path, quote: str) -> None:
    """CSV has no types: SFT, reward models and DPO learn 7.50 and 1e3, not 7.5 and 1000.0."""

    def file(name: str, *rows: str) -> list[str]:
        lines = [",".join(f"{quote}{cell}{quote}" for cell in row.split(",")) for row in rows]
        (tmp_path / name).write_text("\n".join([*lines, ""]))
        return [str(tmp_path / name)]

    train = file("t.csv", "prompt,answer", "3,7.50", "4,1e3", "5,+7")
    (found,) = load_examples(schema.Texts(train=train), "train", chat(), 512)
    assert [whole(e).count(t) for e, t in zip(found, ("7.50", "1e3", "+7"), strict=True)] == [1, 1, 1]
    train = file("p.csv", "prompt,chosen,rejected,margin", "3,7.50,8,0.5", "4,1e3,9,2")
    (found,) = load_examples(schema.RankedPairs(train=train, margin_column="margin"), "train", chat(), 512)
    assert [e.margin for e in found] == [0.5, 2.0] and "7.50" in whole(found[0])
    prompts = load_tasks(schema.Data(train=file("r.csv", "prompt,answer", "3.10,7", "4,8")), "train", chat=True)[0]
    assert prompts[0].prompt[0].content == "3.10"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a\ud800"},
        {"prompt": "a", "response": "\udfff"},
        {"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, TALK[2]]},
    ],
)
def test_half_a_character_of_a_programs_rows_is_told_with_its_row(row: dict[str, Any]) -> None:
    """No tokenizer takes it; a file cannot hold it."""
    good = {key: "abc" if isinstance(value, str) else TALK for key, value in row.items()}
    with pytest.raises(BirlError, match=r"row 2.*half a surrogate pair"):
        texts([good, row])
