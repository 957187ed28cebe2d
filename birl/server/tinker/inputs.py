"""Parses a client's model input: chunks of token ids and images, in JSON or protobuf -> one row of ids.

An image has as many tokens as the model's own processor makes of it: placeholders (`text/pictures.py`), and marks that
the processor adds between them (SmolVLM). Marks of the chat's format (Qwen's) are the client's tokens.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.server.tinker import wire
from birl.text.pictures import Pictures
from birl.types import Picture

BLIND = "This model takes text alone: it has no vision tower that birl knows (docs/pictures.md)."
NO_AUDIO = "audio is not offered by this server."
NO_POINTERS = "image_asset_pointer is not offered: nothing is fetched for a request. Send the file in an ImageChunk."
FORMATS = {"png": "image/png", "jpeg": "image/jpeg"}


@dataclass(frozen=True, slots=True)
class Reader:
    """Parses inputs. `vocabulary`: of the model; `context`: longest sequence [tokens]; `pictures`: None: no vision."""

    vocabulary: int
    context: int
    pictures: Pictures | None = None

    def within(self, ids: np.ndarray, what: str) -> np.ndarray:
        """Return `ids`. Raises `BirlError` if one is outside of the vocabulary."""
        wrong = (ids < 0) | (ids >= self.vocabulary)
        if wrong.any():
            raise BirlError(f"{what}: {int(ids[wrong][0])} is no token; the model has {self.vocabulary}.")
        return ids

    def of_wire(self, chunks: Iterable[wire.Value], what: str, room: wire.Room) -> "Row":
        """The row of a datum's Chunk messages."""
        row = Row(self, what)
        for chunk in chunks:
            for kind, value in wire.fields(wire.raw(chunk), room):
                parts = dict(wire.fields(wire.raw(value), room))
                if kind == 1:
                    row.text(wire.array(parts.get(1, b""), np.dtype("<i4"), what))
                elif kind == 2:
                    if 4 in parts:
                        raise BirlError(f"{what}: override_dimensions is not offered: send the picture in its size.")
                    expected = wire.signed(parts[3]) if 3 in parts else None
                    row.picture(wire.raw(parts.get(1, b"")), wire.text(parts.get(2, b""), 100), expected)
                else:
                    raise BirlError(f"{what}: {NO_AUDIO}")
        return row

    def of_json(self, chunks: Any, what: str) -> "Row":
        if not isinstance(chunks, list):
            raise BirlError(f"{what}.chunks must be a list.")
        row = Row(self, what)
        for chunk in chunks:
            if not isinstance(chunk, Mapping):
                raise BirlError(f"{what}.chunks must be an object.")
            kind = chunk.get("type", "encoded_text")
            if kind == "encoded_text":
                tokens = chunk.get("tokens")
                if not isinstance(tokens, list) or not all(type(t) is int and abs(t) < 2**62 for t in tokens):
                    raise BirlError(f"{what}: tokens must be a list of token ids.")
                row.text(np.array(tokens, np.int64))
            elif kind == "image":
                expected = chunk.get("expected_tokens")
                if expected is not None and type(expected) is not int:
                    raise BirlError(f"{what}: expected_tokens must be a whole number.")
                row.picture(decoded(chunk.get("data"), what), chunk.get("format"), expected)
            else:
                raise BirlError(f"{what}: {NO_POINTERS if kind == 'image_asset_pointer' else NO_AUDIO}")
        return row


@dataclass(slots=True)
class Row:
    """The row read so far. `pictures` must be kept as long as their tokens are used."""

    reader: Reader
    what: str
    count: int = 0
    parts: list[np.ndarray] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """Token ids [T] int64."""
        return np.concatenate(self.parts).astype(np.int64) if self.parts else np.empty(0, np.int64)

    def text(self, ids: np.ndarray) -> None:
        """Add token ids. Raises `BirlError`."""
        self._add(self.reader.within(ids, self.what))

    def picture(self, data: bytes, format: Any, expected: int | None) -> None:
        """Add an image. Raises `BirlError` for another format, beyond the limits, or if its number of tokens is not
        `expected`."""
        seen, what = self.reader.pictures, self.what
        if seen is None:
            raise BirlError(f"{what}: {BLIND}")
        if len(self.pictures) >= seen.bounds.count:
            raise BirlError(f"{what}: has more than {seen.bounds.count} pictures (model.max_pictures of the server).")
        one = Picture.of(data)
        if format not in FORMATS or one.media_type != FORMATS[format]:
            raise BirlError(f"{what}: a picture's format is {str(format)[:20]!r}, and its file is {one.media_type}: "
                            "send png or jpeg.")  # fmt: skip
        one = seen.held(one)
        try:
            ids = np.array(seen.encode(seen.token, iter([one])), np.int64)
        except BirlError as error:
            raise BirlError(f"{what}: {error}") from error
        if expected is not None and expected != len(ids):
            raise BirlError(
                f"{what}: a picture has {len(ids)} tokens for this model, and expected_tokens says {expected}: count "
                "them with the model's own image processor, or leave expected_tokens out."
            )
        self.pictures.append(one)
        self._add(ids)

    def _add(self, ids: np.ndarray) -> None:
        self.count += len(ids)
        self.parts.append(ids)
        if self.count > self.reader.context:  # before more images are decoded
            raise BirlError(f"{self.what}: has {self.count} tokens or more; a sequence has 1 to {self.reader.context}.")


def decoded(data: Any, what: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BirlError(f"{what}: a picture's data must be a text in base64.") from None
