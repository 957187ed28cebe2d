"""Text that grows: what is shown early is the beginning of what is shown at the end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from birl.text.thinking import TAGS, Growing, split, unfinished
from birl.text.visible import Visible
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = frozenset({2})


def visible(stop: tuple[str, ...] = (), *fences: str) -> Visible:
    return Visible(TOKENIZER, END, stop, fences)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def test_characters_come_whole() -> None:
    shown = visible()
    parts = [shown.feed([token]) for token in ids("né 🎲!")]
    assert "".join(parts) == shown.whole() == "né 🎲!" and "\ufffd" not in "".join(parts) and "🎲" in parts


def test_the_end_token_is_not_shown_unless_more_follows() -> None:
    shown = visible()
    assert shown.feed([*ids("ab"), 2]) == "ab" and shown.whole() == "ab"
    assert shown.feed(ids("c")) == "<|im_end|>c" and shown.whole() == "ab<|im_end|>c"


def test_nothing_of_a_stop_string_is_shown() -> None:
    shown = visible(("</answer>", "zzz"))
    parts = [shown.feed([token]) for token in ids("a < b </answers </answer> more")]
    assert "".join(parts) == "a < b </answers " == shown.whole()
    shown = visible(("</answer>",))
    parts = [shown.feed([token]) for token in ids("a </answ")]
    assert "".join(parts) == "a " and shown.whole() == "a </answ"
    shown = visible(("b<|im_end|>",))
    assert shown.feed([*ids("a b"), 2]) == "a " and shown.whole() == "a "
    shown = visible(("e", "|"))  # the end token's own text is no text of the answer
    assert shown.feed([*ids("a b"), 2]) == "a b" == shown.whole()


def test_what_is_fenced_waits() -> None:
    shown = visible((), "<python_tag>", "<tool_call>")
    parts = [shown.feed([token]) for token in ids('I look. \n<tool_call>{"name": 1}')]
    assert "".join(parts) == "I look." and shown.whole().endswith('<tool_call>{"name": 1}')


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    stop=st.lists(st.text("ab <|\n", min_size=1, max_size=4), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    fence=st.sampled_from(["", "<tool_call>", "e"]),
)
def test_what_was_shown_is_never_taken_back(tokens: list[int], stop: list[str], sizes: list[int], fence: str) -> None:
    """Any tokens, incomplete characters and end tokens among them, in pieces of any size."""
    shown, once, said, place = visible(tuple(stop), *filter(None, [fence])), visible(tuple(stop)), "", 0
    for size in sizes:
        said += shown.feed(tokens[place : place + size])
        assert shown.whole().startswith(said) and len(said) == shown.sent
        place += size
        if any(s in TOKENIZER.decode(tokens[:place], skip_special_tokens=False) for s in stop):
            break  # the engine stops here
    once.feed(tokens[:place])
    assert shown.whole() == once.whole()
    assert not any(s in said for s in stop)
    if not stop:
        while tokens[:place] and tokens[:place][-1] in END:
            tokens = tokens[: len(tokens[:place]) - 1]
        assert once.whole() == TOKENIZER.decode(tokens[:place], skip_special_tokens=False)


def test_unfinished() -> None:
    assert (
        unfinished("abc", ("cde", "bcx")) == 2 and unfinished("abc", ("abc", "x")) == 0 and unfinished("", ("a",)) == 0
    )


PIECES = st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", "\n", " ", "a", "<", "[THINK]", "[/THINK]"])


@settings(deadline=None, max_examples=200)
@given(pieces=st.lists(PIECES, max_size=12), opened=st.booleans(), tags=st.sampled_from([None, *TAGS]))
def test_growing_thoughts_are_the_beginning_of_what_they_become(pieces: list[str], opened: bool, tags) -> None:
    growing, told = Growing(tags, opened), ["", ""]
    whole = "".join(pieces)
    thinking, content, _ = split(whole, tags, opened)
    for piece in pieces:
        told = [before + new for before, new in zip(told, growing.feed(piece), strict=True)]
        assert (thinking or "").startswith(told[0]) and content.startswith(told[1]) and told == growing.told


def test_thoughts_are_told_as_they_come() -> None:
    growing = Growing(TAGS[0], opened=True)
    assert [growing.feed(piece) for piece in ("\n3", " + 4\n", "</thi", "nk>\n\n", "7")] == [
        *(("3", ""), (" + 4", ""), ("", ""), ("", ""), ("", "7"))
    ]
