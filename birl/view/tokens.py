"""Token ids -> readable text of each, by the run's own tokenizer (`model/` in the run folder).

A token may be a part of a character: an emoji is often two or three tokens. Such a part is shown as bytes, with the
whole character, and never as a wrong character.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import read_text
from birl.text.pictures import is_picture
from birl.visible import visible

#: text of a token; or, if it has parts of characters, its pieces: text, or (bytes in hex, the whole character)
Shown = str | list[Any]
BYTE = len("<0x00>")
PART = "▦"  # placeholder token of a picture


def _byte_of() -> dict[str, int]:
    """Byte-level BPE maps each byte to a printable character; bytes that are printable are mapped to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF = _byte_of()


class Vocabulary:
    """The tokenizer of a run. Without a `tokenizer.json` a token is shown as its number.

    Example: Vocabulary(Path("runs/demo/model")).shown([45, 2]) == ["7", "<|im_end|>"]
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "tokenizer.json"

    @cached_property
    def _read(self) -> tuple[Any, dict[int, str], set[str]]:
        """The tokenizer, its special tokens, and the kinds of its decoders. Raises `BirlError`."""
        from tokenizers import Tokenizer

        if not self.path.is_file():
            return None, {}, set()
        try:
            text = read_text(self.path)
            written = json.loads(text)
            added = {int(token["id"]): str(token["content"]) for token in written.get("added_tokens") or ()}
            return Tokenizer.from_str(text), added, set(_kinds(written.get("decoder")))
        except Exception as error:  # the tokenizers library has no own error type
            raise BirlError(
                f"{self.path} cannot be read ({error}). Rename it to see the tokens as numbers, or copy the model's "
                "tokenizer.json there."
            ) from error

    @property
    def known(self) -> bool:
        return self._read[0] is not None

    def special(self, token: int) -> bool:
        """Whether it is a special token, such as the end of a turn, whatever its text is."""
        return token in self._read[1]

    def bytes_of(self, token: int) -> bytes:
        tokenizer, added, kinds = self._read
        if is_picture(token):
            return PART.encode()
        if token in added:
            return added[token].encode("utf-8", "replace")
        piece = None if tokenizer is None or not 0 <= token < 2**31 else tokenizer.id_to_token(token)
        if piece is None:
            return f"#{token}".encode()
        if "ByteLevel" in kinds:
            return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in piece)
        if "ByteFallback" in kinds and len(piece) == BYTE and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        if "WordPiece" in kinds:
            return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
        return piece.replace("▁", " ").encode("utf-8", "replace")

    def text(self, tokens: Sequence[int]) -> str:
        """Text of all tokens; invalid bytes become U+FFFD."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def shown(self, tokens: Sequence[int]) -> list[Shown]:
        """Display text of each token. Control characters are escaped."""
        data = [self.bytes_of(token) for token in tokens]
        result: list[Shown] = []
        for n, whole in enumerate(_alone(data)):
            result.append(visible(data[n].decode()) if whole else [])
        _split(data, result)
        return result


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _kinds(inner)


def _alone(data: Sequence[bytes]) -> Iterator[bool]:
    """Whether each token consists of whole characters."""
    for piece in data:
        try:
            piece.decode()
            yield True
        except UnicodeDecodeError:
            yield False


def _split(data: Sequence[bytes], shown: list[Shown]) -> None:
    """Fill in the tokens with parts of characters, one sequence of neighbours at a time."""
    for is_part, run in groupby(range(len(data)), lambda n: shown[n] == []):
        if is_part:
            tokens = list(run)
            for n, pieces in zip(tokens, _pieces([data[n] for n in tokens]), strict=True):
                shown[n] = pieces


def _pieces(data: Sequence[bytes]) -> list[list[Any]]:
    """Pieces of each token of a sequence: whole characters as text, parts as (bytes in hex, the whole character)."""
    whole, ends = b"".join(data), list(accumulate(map(len, data)))
    result: list[list[Any]] = [[] for _ in data]
    n = 0
    for first, last, char in characters(whole):
        at = first
        while at < last:
            while ends[n] <= at:
                n += 1
            end = min(last, ends[n])
            if char and (at, end) == (first, last):
                result[n].append(visible(char))
            else:
                result[n].append([whole[at:end].hex(" ").upper(), visible(char)])
            at = end
    return result


def characters(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(start, end, character) of each character; "" for an invalid byte.

    Example: list(characters(b"a\\xc3\\xa9\\xff")) == [(0, 1, "a"), (1, 3, "é"), (3, 4, "")]
    """
    at = 0
    while at < len(data):
        lead = data[at]
        size = 1 if lead < 0x80 else 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4
        try:
            char = data[at : at + size].decode()
        except UnicodeDecodeError:
            size, char = 1, ""
        yield at, at + size, char
        at += size
