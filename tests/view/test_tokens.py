import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from birl.errors import BirlError
from birl.view.tokens import Vocabulary, characters
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return Vocabulary(folder)


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False).input_ids


def joined(shown: list) -> str:
    return "".join(s if isinstance(s, str) else "".join(p for p in s if isinstance(p, str)) for s in shown)


def test_each_token_is_its_text(vocabulary: Vocabulary) -> None:
    tokens = ids("What is 3 + 4?<|im_end|>")
    assert joined(vocabulary.shown(tokens)) == "What is 3 + 4?<|im_end|>"
    assert vocabulary.special(tokens[-1]) and not vocabulary.special(tokens[0])
    assert vocabulary.text(tokens) == "What is 3 + 4?<|im_end|>"


def test_a_character_in_several_tokens_is_shown_as_bytes(vocabulary: Vocabulary) -> None:
    shown = vocabulary.shown(ids("a🙂b"))
    assert shown == ["a", [["F0", "🙂"]], [["9F", "🙂"]], [["99", "🙂"]], [["82", "🙂"]], "b"]


def test_a_long_text_of_parts_takes_no_time(vocabulary: Vocabulary) -> None:
    tokens, start = ids("🙂") * 4000, time.monotonic()
    shown = vocabulary.shown(tokens)
    assert shown[-1] == [["82", "🙂"]] and len(shown) == 16_000 and time.monotonic() - start < 50


def test_bytes_of_no_character_are_bytes_of_nothing(vocabulary: Vocabulary) -> None:
    half = ids("🙂")[:2]
    assert vocabulary.shown([*half, *ids("x")]) == [[["F0", ""]], [["9F", ""]], "x"]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]), max_size=40))
def test_nothing_is_lost_and_nothing_is_made_up(text: str) -> None:
    folder = Path(_folder())
    vocabulary = Vocabulary(folder)
    tokens = ids(text)
    assert vocabulary.text(tokens) == tiny_tokenizer().decode(tokens)
    data = b""
    for piece in vocabulary.shown(tokens):
        for part in [piece] if isinstance(piece, str) else piece:
            data += part.encode() if isinstance(part, str) else bytes.fromhex(part[0])
    assert data == text.encode()


_MADE: list[str] = []


def _folder() -> str:
    if not _MADE:
        import tempfile

        _MADE.append(tempfile.mkdtemp())
        tiny_tokenizer().save_pretrained(_MADE[0])
    return _MADE[0]


@given(st.binary(max_size=30))
def test_characters_are_those_of_the_decoder(data: bytes) -> None:
    found = list(characters(data))
    assert [at for at, _, _ in found] == [0, *(end for _, end, _ in found)][: len(found)]
    assert all(data[at:end].decode() == char for at, end, char in found if char)
    try:
        assert "".join(char for _, _, char in found) == data.decode()
    except UnicodeDecodeError:
        assert any(not char for _, _, char in found)


def test_control_characters_are_spelled_out(vocabulary: Vocabulary) -> None:
    assert joined(vocabulary.shown(ids("a\x1b[2Jb\n\tc"))) == "a⟪U+001B⟫[2Jb\n\tc"


def test_bytes_and_pieces_of_other_tokenizers(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁Hello": 1, "▁": 2, "<0xF0>": 3, "<0x9F>": 4, "<0x99>": 5, "<0x82>": 6, "é": 7}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    shown = Vocabulary(tmp_path).shown([1, 2, 3, 4, 5, 6, 7, 8])
    assert shown[:2] == [" Hello", " "] and shown[2] == [["F0", "🙂"]] and shown[6:] == ["é", "</s>"]


def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path)
    assert not vocabulary.known and vocabulary.shown([5, 12]) == ["#5", "#12"]


def test_ids_that_no_token_has(vocabulary: Vocabulary) -> None:
    assert vocabulary.shown([10**6, -1, 2**40]) == [f"#{10**6}", "#-1", f"#{2**40}"]
    assert vocabulary.shown([2**30, 2**31 - 1]) == ["▦", "▦"]  # of a picture


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"model": {"type": "BPE"}}), '{"added_tokens": 3}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BirlError, match=r"tokenizer.json cannot be read .* Rename it"):
        Vocabulary(tmp_path).shown([1])
