"""Rows that cannot fit: neither rendered nor encoded, beyond what is kept of those that are cut."""

from collections.abc import Callable
from typing import Any

import pytest

from birl.config import schema
from birl.data.examples import load_examples
from birl.data.sequences import Encoder
from birl.text.bounds import CHARACTERS
from birl.text.chat import Chat
from tests.tiny import tiny_tokenizer

LIMIT = 100  # tokens
GIANT = "word " * 20_000


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


#: schema, a row that fits, one that cannot, whether something of that can be learned
ROWS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any], bool]] = {
    "text": (schema.Texts, {"text": "Hi"}, {"text": GIANT}, True),
    "prompt": (schema.Texts, {"prompt": "a", "response": "b"}, {"prompt": GIANT, "response": "x"}, False),
    "response": (schema.Texts, {"prompt": "a", "response": "b"}, {"prompt": "a", "response": GIANT}, True),
    "answer": (schema.Texts, {"messages": said("a", "b")}, {"messages": said("a", GIANT, "c", "d")}, True),
    "question": (schema.Texts, {"messages": said("a", "b")}, {"messages": said("a", "b", GIANT, "d")}, True),
    "first": (schema.Texts, {"messages": said("a", "b")}, {"messages": said(GIANT, "d")}, False),
    "many": (schema.Texts, {"messages": said("a", "b")}, {"messages": said("a", "b") * 1000}, True),
    "spoken": (
        schema.Texts,
        {"prompt": said("a"), "completion": said("", "b")[1:]},
        {"prompt": said("a"), "completion": said("", GIANT)[1:]},
        True,
    ),
    **{
        name: (schema.RankedPairs, {"prompt": "a", "chosen": "b", "rejected": "c"}, row, kept)
        for name, row, kept in (
            ("chosen", {"prompt": "a", "chosen": GIANT, "rejected": "c"}, True),
            ("asked", {"prompt": GIANT, "chosen": "b", "rejected": "c"}, False),
            ("no prompt", {"prompt": None, "chosen": GIANT + "a", "rejected": GIANT + "b"}, False),
            ("the same", {"prompt": "a", "chosen": GIANT + "a", "rejected": GIANT + "b"}, False),
        )
    },
    "label": (
        schema.LabelledPairs,
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": GIANT, "label": False},
        True,
    ),
}


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("form", ROWS)
def test_what_cannot_fit_is_not_encoded(form: str, template: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fits, giant, kept = ROWS[form]
    if not template and any(isinstance(value, list) for value in giant.values()):
        return  # messages need a template
    chat = Chat(tiny_tokenizer() if template else tiny_tokenizer(template=None))
    lengths: list[int] = []

    def watched(work: Callable[..., Any], seen: Callable[[Any, Any], str]) -> Callable[..., Any]:
        def run(self: Chat, text: Any, *args: Any, **named: Any) -> Any:
            found = work(self, text, *args, **named)
            lengths.append(len(seen(text, found)))
            return found

        return run

    monkeypatch.setattr(Chat, "encode", watched(Chat.encode, lambda text, ids: text))
    monkeypatch.setattr(Chat, "_text", watched(Chat._text, lambda messages, text: text))
    for too_long in ("drop", "truncate"):
        (found,) = load_examples(kind(too_long=too_long), "train", chat, LIMIT, given=[fits, giant])
        assert len(found) == 1 + (kept and too_long == "truncate")
        assert max(lengths) < CHARACTERS * LIMIT * 2


@pytest.mark.parametrize("roles", [["assistant"], ["user", "assistant"], ["all"]])
@pytest.mark.parametrize("template", [True, False])
def test_what_is_cut_begins_as_the_whole_does(template: bool, roles: list[str]) -> None:
    chat = Chat(tiny_tokenizer() if template else tiny_tokenizer(template=None))
    config = schema.Texts(train_on=roles, too_long="truncate")
    short, long = (Encoder(chat, config, limit) for limit in (LIMIT, 10**6))
    for prompt, answer in (("a", GIANT), (GIANT[:300], GIANT[:5000]), ("a", "<|im_end|>" + GIANT)):
        (ids, mask), whole = short.answered(prompt, answer, roles), long.answered(prompt, answer, roles)
        assert len(ids) > LIMIT and (ids[:LIMIT], mask[:LIMIT]) == (whole[0][:LIMIT], whole[1][:LIMIT])
    assert short.text(GIANT)[0][:LIMIT] == long.text(GIANT)[0][:LIMIT]
