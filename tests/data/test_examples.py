"""Rows -> sequences: what is learned is what the right one said, its end token included, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from birl.config import schema
from birl.data.examples import Example, load_examples
from birl.errors import BirlError
from birl.text.chat import Chat
from birl.types import Message
from tests.text import families
from tests.tiny import tiny_tokenizer

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "The answer is 7."},
]


def chat(template: bool = True) -> Chat:
    return Chat(tiny_tokenizer() if template else tiny_tokenizer(template=None))


def texts(rows: list[dict[str, Any]], limit: int = 512, **config: Any) -> list[Example]:
    template = config.pop("template", True)
    return list(load_examples(schema.Texts(**config), "train", chat(template), limit, given=rows)[0])


def pairs(rows: list[dict[str, Any]], limit: int = 512, kind: Any = schema.RankedPairs, **config: Any) -> list[Example]:
    return list(load_examples(kind(**config), "train", chat(), limit, given=rows)[0])


def learned(example: Example, side: int = 0) -> list[str]:
    """The stretches that are learned, as text."""
    tokens, found, last = example.sequences[side], [], -2
    for i in [i for i, m in enumerate(tokens.mask) if m]:
        if i != last + 1:
            found.append([])
        found[-1].append(tokens.ids[i])
        last = i
    return [chat().decode(part) for part in found]


def whole(example: Example, side: int = 0) -> str:
    return chat().decode(list(example.sequences[side].ids))


def test_every_answer_of_a_conversation_is_learned_with_its_end() -> None:
    example = texts([{"messages": TALK}])[0]
    assert learned(example) == ["Hello.<|im_end|>", "The answer is 7.<|im_end|>"]
    rendered = str(chat().tokenizer.apply_chat_template(TALK, tokenize=False))
    assert whole(example) == rendered


def test_other_roles_and_everything() -> None:
    row = {"messages": TALK}
    both = learned(texts([row], train_on=["user", "assistant"])[0])
    assert both[0] == "<|im_start|>user\nHi<|im_end|>\n" and both[1] == "Hello.<|im_end|>" and len(both) == 4
    everything = texts([row], train_on=["all"])[0].sequences[0]
    assert list(everything.mask) == [0] + [1] * (len(everything) - 1)


def test_neighbours_in_a_prompt_cost_no_answer() -> None:
    """Two results of tools, say, are one stretch of tokens; the first answer was taken for the second of them."""
    asked = [{"role": r, "content": r} for r in ("user", "assistant", "tool", "tool")]
    row = {
        "prompt": asked,
        "completion": [{"role": r, "content": f"my {r}"} for r in ("assistant", "user", "assistant")],
    }
    assert learned(texts([row], train_on=["assistant", "tool"])[0]) == ["my assistant<|im_end|>"] * 2
    row = {
        "prompt": [TALK[0] | {"role": "system"}, TALK[0]],
        "completion": [{"role": "assistant", "content": "Hello."}],
    }
    assert learned(texts([row], train_on=["system", "user", "assistant"])[0]) == ["Hello.<|im_end|>"]


def test_prompt_and_response_are_what_a_rollout_would_have_been() -> None:
    example = texts([{"prompt": "What is 3 + 4?", "response": "7"}])[0]
    prompt = chat().render((Message(role="user", content="What is 3 + 4?"),))
    assert tuple(example.sequences[0].ids[: len(prompt)]) == prompt
    assert learned(example) == ["7<|im_end|>"]
    after = texts([{"messages": TALK[:4], "answer": "7"}])[0]
    assert learned(after) == ["7<|im_end|>"]  # earlier answers are part of the prompt


def test_of_a_prompt_nothing_is_learned_where_no_header_parts_it_from_the_answer() -> None:
    row = {"prompt": "Hi", "response": "Hello."}
    mistral = families.chat("mistral")
    config = schema.Texts(train_on=["user", "assistant"])
    (example,) = load_examples(config, "train", mistral, 512, given=[row])[0]
    ids = [i for i, m in zip(example.sequences[0].ids, example.sequences[0].mask, strict=True) if m]
    assert mistral.decode(ids).strip() == "Hello.</s>"


@pytest.mark.parametrize(
    "left_out", [{"weight": 0}, {"train": False}, {"training": False}], ids=lambda d: next(iter(d))
)
def test_a_message_that_is_not_to_be_learned_is_not_learned_in_silence(left_out: dict[str, Any]) -> None:
    """OpenAI's and axolotl's ways to leave one out."""
    assert texts([{"messages": [TALK[1], TALK[2] | dict.fromkeys(left_out, True)]}])
    with pytest.raises(BirlError, match=rf"row 1: messages\[1\]\.{next(iter(left_out))} is .*, which is not supported"):
        texts([{"messages": [TALK[1], TALK[2] | left_out]}])


@pytest.mark.parametrize("field", ["function_call", "reasoning_content", "reasoning", "thinking"])
def test_what_a_message_says_beside_its_content_is_not_lost_in_silence(field: str) -> None:
    talk = [TALK[1], {**TALK[2], field: "Hm."}]
    with pytest.raises(BirlError, match=rf"row 1: messages\[1\]\.{field} is not supported"):
        texts([{"messages": talk}])
    assert texts([{"messages": [TALK[1], {**TALK[2], field: None}]}])[0].sequences  # as datasets fills it in


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [CALL], "content": None},
        {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}], "content": ""},
        {"tool_calls": [CALL["function"]], "content": []},
    ],
)
def test_calls_are_learned_as_the_template_writes_them(said: dict[str, Any]) -> None:
    """An assistant that only calls needs no content; what the tool answers is not learned."""
    talk = [TALK[3], {"role": "assistant", **said}, {"role": "tool", "content": "7"}, TALK[4]]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
    (example,) = texts([{"messages": talk}])
    assert learned(example) == [call, "The answer is 7.<|im_end|>"] and "7\n</tool_response>" in whole(example)
    (example,) = pairs([{"prompt": talk[:3], "chosen": talk[3:], "rejected": [{"role": "assistant", "content": "8"}]}])
    assert "<tool_call>" in whole(example) and learned(example) == ["The answer is 7.<|im_end|>"]


def test_parts_that_are_all_text_are_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo.", "image": None}]
    (example,) = texts([{"messages": [TALK[1], {"role": "assistant", "content": parts}]}])
    assert learned(example) == ["Hello.<|im_end|>"]


def test_a_template_that_leaves_out_a_message_is_refused() -> None:
    silent = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    silent += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(BirlError, match="leaves out messages of role system"):
        load_examples(schema.Texts(), "train", Chat(tiny_tokenizer(template=silent)), 512, given=[{"messages": TALK}])


def test_raw_text() -> None:
    example = texts([{"text": "The sum of two."}])[0]
    assert (
        whole(example) == "The sum of two.<|im_end|>"
        and sum(example.sequences[0].mask) == len(example.sequences[0]) - 1
    )
    plain = texts([{"prompt": "The sum", "response": " of two."}], apply_chat_template=False)[0]
    assert whole(plain) == "The sum of two.<|im_end|>" and learned(plain) == [" of two.<|im_end|>"]
    untemplated = texts([{"prompt": "The sum", "response": " of two."}], template=False)[0]
    assert untemplated.sequences == plain.sequences


def test_system_prompt() -> None:
    assert "Be brief." in whole(texts([{"prompt": "Hi", "response": "Hello"}], system_prompt="Be brief.")[0])
    assert "Be brief." not in whole(texts([{"messages": TALK}], system_prompt="Be brief.")[0])


def test_long_rows_are_dropped_or_cut_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "Hi", "response": "Hello"}, {"prompt": "Hi", "response": "word " * 60}]
    assert len(texts(rows, limit=100)) == 1
    assert "dropped 1 of 2 rows, those of more than 100 tokens" in capsys.readouterr().out
    cut = texts(rows, limit=100, too_long="truncate")
    assert len(cut) == 2 and len(cut[1].sequences[0]) == 100
    assert "cut 1 of 2" in capsys.readouterr().out
    assert len(texts([*rows, {"prompt": "word " * 60, "response": "Hello"}], limit=100, too_long="truncate")) == 2
    assert "cut 1 and dropped 1 of 3 rows" in capsys.readouterr().out  # nothing to train is left of the last
    with pytest.raises(BirlError, match=r"every row has more than 5 tokens.*model\.max_length"):
        texts(rows, limit=5)


PAIR_FORMS = {
    "prompt": {"prompt": "Capital of China?", "chosen": "Beijing.", "rejected": "Shanghai."},
    "messages": {
        "messages": [{"role": "user", "content": "Capital of China?"}],
        "chosen": "Beijing.",
        "rejected": "Shanghai.",
    },
    "conversations": {
        side: [{"role": "user", "content": "Capital of China?"}, {"role": "assistant", "content": answer}]
        for side, answer in (("chosen", "Beijing."), ("rejected", "Shanghai."))
    },
    "prompt and messages": {
        "prompt": [{"role": "user", "content": "Capital of China?"}],
        "chosen": [{"role": "assistant", "content": "Beijing."}],
        "rejected": [{"role": "assistant", "content": "Shanghai."}],
    },
}
PAIR_FORMS["UltraFeedback"] = PAIR_FORMS["conversations"] | {
    "prompt": "Capital of China?",
    "messages": PAIR_FORMS["conversations"]["chosen"],
}


@pytest.mark.parametrize("form", PAIR_FORMS)
def test_every_form_of_a_pair_is_the_same_pair(form: str) -> None:
    example, first = pairs([PAIR_FORMS[form]])[0], pairs([PAIR_FORMS["prompt"]])[0]
    assert learned(example) == ["Beijing.<|im_end|>"] and learned(example, 1) == ["Shanghai.<|im_end|>"]
    assert example.sequences == first.sequences


def test_a_conversation_that_has_the_question_is_whole() -> None:
    """Also behind a system message that the prompt lacks, and with other blanks around it."""
    bare = PAIR_FORMS["conversations"]
    led = {side: [TALK[0], *bare[side]] for side in ("chosen", "rejected")}
    rendered = str(chat().tokenizer.apply_chat_template(led["chosen"], tokenize=False))
    for row in ({"prompt": "Capital of China?\n", **led}, {"prompt": led["chosen"][:2], **bare}):
        assert whole(pairs([row])[0]) == rendered


def test_of_two_conversations_only_what_differs_is_judged() -> None:
    chosen = [*TALK[1:4], {"role": "assistant", "content": "It is 7."}]
    rejected = [*TALK[1:4], {"role": "assistant", "content": "It is 8."}]
    example = pairs([{"chosen": chosen, "rejected": rejected}])[0]
    assert learned(example) == ["It is 7.<|im_end|>"] and learned(example, 1) == ["It is 8.<|im_end|>"]


def test_margins_and_labels() -> None:
    row = PAIR_FORMS["prompt"]
    assert pairs([row | {"gap": 2}], margin_column="gap")[0].margin == 2.0
    votes = [{"prompt": "Hi", "answer": "Hello", "good": good} for good in (True, "no", 1)]
    found = pairs(votes, kind=schema.LabelledPairs, chosen_column="answer", label_column="good")
    assert [e.good for e in found] == [True, False, True] and all(len(e.sequences) == 1 for e in found)


def spoken_(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_the_forms_of_trl_for_texts() -> None:
    """https://huggingface.co/docs/trl/dataset_formats: language modelling, prompt-completion, standard and spoken."""
    asked, said = spoken_("Capital of China?"), [{"role": "assistant", "content": "Beijing."}]
    rendered = str(chat().tokenizer.apply_chat_template([*asked, *said], tokenize=False))
    for row in (
        {"messages": [*asked, *said]},
        {"prompt": asked, "completion": said},
        {"prompt": asked, "completion": "Beijing."},
    ):
        example = texts([row])[0]
        assert whole(example) == rendered and learned(example) == ["Beijing.<|im_end|>"]
    several = {"prompt": spoken_("Hi", "Hello.", "2 + 2?"), "completion": [*said, *spoken_("And?", "That is it.")]}
    assert learned(texts([several])[0]) == ["Beijing.<|im_end|>", "That is it.<|im_end|>"]
    assert learned(texts([{"text": "The sky is blue."}], train_on=["all"])[0])
    with pytest.raises(BirlError, match=r"row 1: completion\[0\] has role; a message is"):
        texts([{"prompt": asked, "completion": [{"role": "assistant"}]}])


def test_the_forms_of_trl_for_preferences() -> None:
    """Explicit and implicit prompts, standard and spoken: the same sequences."""
    asked, blue, green = spoken_("What is it?"), spoken_("", "It is blue.")[1:], spoken_("", "It is green.")[1:]
    both = [{"prompt": asked, "chosen": blue, "rejected": green}, {"chosen": asked + blue, "rejected": asked + green}]
    for row in both:
        example = pairs([row])[0]
        assert learned(example) == ["It is blue.<|im_end|>"] and learned(example, 1) == ["It is green.<|im_end|>"]
    implicit = pairs([{"chosen": "The sky is blue.", "rejected": "The sky is green."}])[0]
    explicit = pairs([{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}])[0]
    assert implicit.sequences == explicit.sequences and learned(implicit) == [" blue.<|im_end|>"]
    with pytest.raises(BirlError, match="an answer without a prompt"):
        pairs([{"chosen": "Blue.", "rejected": "Green."}])


def test_the_forms_of_trl_for_labelled_answers_need_no_key() -> None:
    rows = [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": spoken_("Hi"), "completion": spoken_("", "Go.")[1:], "label": False},
    ]
    for row in rows:
        (found,) = pairs([row], kind=schema.LabelledPairs)
        assert found.good is row["label"] and len(found.sequences) == 1
    pair = pairs([PAIR_FORMS["prompt"] | {"label": True}], kind=schema.LabelledPairs)[0]
    assert len(pair.sequences) == 2  # a further column


def test_training_and_validation_have_no_id_in_common(tmp_path: Path) -> None:
    """Files of the same name in two folders: precomputed references are kept by id."""
    files = [tmp_path / which / "pairs.jsonl" for which in ("train", "validation")]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps(PAIR_FORMS["prompt"]))
    config = schema.RankedPairs(train=[str(files[0])], validation=[str(files[1])])
    (one,), (other,) = (load_examples(config, which, chat(), 512)[0] for which in ("train", "validation"))
    assert one.sequences == other.sequences and one.id != other.id


def test_an_end_token_inside_an_answer_does_not_hide_the_rest() -> None:
    """What a user pastes may hold the text of a special token; the answer ends where the template ends it."""
    talk = [TALK[1], {"role": "assistant", "content": "It is <|im_end|> they say."}]
    assert learned(texts([{"messages": talk}])[0]) == ["It is <|im_end|> they say.<|im_end|>"]
