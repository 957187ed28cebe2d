"""Parse messages, and the parts of their content, in the formats of OpenAI, Anthropic and transformers.

    {"type": "text", "text": ...}                                        also input_text, output_text, and refusal
    {"type": "image_url", "image_url": {"url": ...}}                     also input_image
    {"type": "image", "source": {"type": "base64", "data": ...}}         or {"type": "url", "url": ...}
    {"type": "image", "image": ...}                                      or its bytes, base64, path or url; or nothing:
                                                                         the next of the pictures beside the message

A URL may contain the picture itself (data:image/png;base64,...), or name a file or a web address, if that is allowed.
"""

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from birl.errors import BirlError, first_line
from birl.hub import addressed
from birl.regular import open_regular
from birl.types import PLACE, Conversation, Message, Picture, ToolCall

TEXTS = ("text", "input_text", "output_text")
IMAGES = ("image", "image_url", "input_image")
KEYS = ("image", "image_url", "bytes", "base64", "data", "url", "path", "source")
MOST = 64 * 2**20  # largest file [bytes], regardless of a model's own limits
SECONDS = 20.0  # timeout of a download


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Sources from which pictures may be loaded, beside the message itself. `folder`: of files, relative paths are
    within it; None: no files. `hosts`: names of hosts for downloads; `offline`: download later, not now."""

    folder: Path | None = None
    hosts: tuple[str, ...] = ()
    offline: bool = False

    def picture(self, given: Any) -> Picture:
        """Load a picture from bytes, a PIL image, text (data URL, address, path or base64), or an object with one of
        `KEYS`. Raises `BirlError`."""
        if isinstance(given, Picture):
            return given
        if isinstance(given, bytes | bytearray):
            return Picture.of(bytes(given))
        if isinstance(given, Mapping):
            key = next((key for key in KEYS if given.get(key) is not None), None)
            if key is None:
                raise BirlError(f"is a picture without any of {', '.join(KEYS)}")
            return self.picture(given[key])
        if hasattr(given, "save") and hasattr(given, "convert"):
            return Picture.of(png(given))
        if not isinstance(given, str) or not given:
            raise BirlError(f"is a {type(given).__name__}, and no picture")
        return Picture.of(self._read(given))

    def _read(self, text: str) -> bytes:
        if text.startswith("data:"):
            head, _, data = text.partition(",")
            if not head.endswith(";base64"):
                raise BirlError("is a data URL that is not base64")
            return decoded(data)
        if addressed(text):
            return self._downloaded(text)
        if self.folder is not None and (text.startswith("file://") or (len(text) < 1024 and self._is_file(text))):
            return self._file(text.removeprefix("file://"))
        if len(text) < 1024 and ("." in text or text.startswith(("/", "file:"))):
            allowed = f": {self.folder / text} is not there" if self.folder is not None else ", which is not read here"
            raise BirlError(f"names the file {text[:200]!r}{allowed}. Give its bytes as base64")
        return decoded(text)

    def _is_file(self, text: str) -> bool:
        try:
            return (self.folder or Path()).joinpath(text).is_file()
        except OSError:
            return False

    def _file(self, name: str) -> bytes:
        path = (self.folder or Path()) / name
        try:
            with open_regular(path) as file:
                data = file.read(MOST + 1)
        except OSError as error:
            raise BirlError(f"names a file that cannot be read: {path}: {error.strerror or error}") from error
        return bounded(data)

    def _downloaded(self, url: str) -> bytes:
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            raise BirlError(f"is no address: {url[:200]!r}. Correct it, or give its bytes as base64") from None
        if host not in self.hosts:
            raise BirlError(
                f"is at {host!r}, from which pictures are not downloaded. Give its bytes as base64, or name the host "
                "(model.picture_hosts)"
            )
        if self.offline:
            return b""
        return downloaded(url)


@lru_cache(64)
def downloaded(url: str) -> bytes:
    """Download a file. Raises `BirlError`, also for a redirection, which could lead to another host."""
    import httpx

    try:
        with httpx.stream("GET", url, timeout=SECONDS, follow_redirects=False) as answer:
            answer.raise_for_status()
            data = b""
            for piece in answer.iter_bytes():
                data = bounded(data + piece)
        return data
    except httpx.HTTPError as error:
        raise BirlError(f"cannot be downloaded from {url[:200]}: {first_line(error)}") from error


def content(parts: Sequence[Any], finder: Finder, beside: Iterator[Picture] | None = None) -> tuple[str, list[Picture]]:
    """Text with `PLACE` for each picture, and the pictures. `beside`: pictures of parts that do not contain one. Raises
    `BirlError` with a message that continues the name of the field."""
    texts: list[str] = []
    pictures: list[Picture] = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal" and isinstance(part.get("refusal"), str):  # an earlier message of the assistant
            texts.append(part["refusal"])
        elif kind in IMAGES:
            texts.append(PLACE)
            pictures.append(_named(f"[{i}]", lambda part=part: _shown(part, finder, beside)))
        else:
            shown = kind if kind is not None else type(part).__name__
            raise BirlError(f"[{i}] has a part of type {shown!r:.80}; the model reads text and pictures")
    if pictures and sum(PLACE in text for text in texts) != len(pictures):
        raise BirlError(f" has the character U+{ord(PLACE):X} beside pictures, which stands for one. Remove it")
    return "".join(texts), pictures


def _shown(part: Mapping[str, Any], finder: Finder, beside: Iterator[Picture] | None) -> Picture:
    if not any(part.get(key) is not None for key in KEYS) and beside is not None:
        if (result := next(beside, None)) is None:
            raise BirlError("is a picture, and there are none left beside the message (column `images`)")
        return result
    return finder.picture({key: value for key, value in part.items() if key != "type"})


def _named(where: str, read: Callable[[], Picture]) -> Picture:
    try:
        return read()
    except BirlError as error:
        raise BirlError(f"{where} {error}") from error


def decoded(text: str) -> bytes:
    """Decode base64. Raises `BirlError`."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BirlError(f"is no base64 ({first_line(error)}), nor the address of a picture") from error


def bounded(data: bytes) -> bytes:
    if len(data) > MOST:
        raise BirlError(f"is a file of more than {MOST >> 20} MiB")
    return data


def png(image: Any) -> bytes:
    """Encode a PIL image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def checked(conversation: Any) -> Conversation:
    """A conversation from a user's code, as text or messages. Raises `BirlError`."""
    if isinstance(conversation, str) and conversation:
        return conversation
    if isinstance(conversation, list | tuple) and conversation:
        messages = [m if isinstance(m, Message) else message(m) for m in conversation]
        if all(m is not None for m in messages):
            return tuple(m for m in messages if m is not None)
    raise BirlError(
        f"The model's input is {conversation!r:.100}; it must be text, or messages such as "
        '(birl.types.Message(role="user", content="Hi"),) or [{"role": "user", "content": "Hi"}].'
    )


def message(given: Any) -> Message | None:
    """A message in OpenAI's form; None if it is not one."""
    if not isinstance(given, Mapping):
        return None
    text = {name: given.get(name) or "" for name in ("role", "content", "name", "tool_call_id")}
    pictures: list[Picture] = []
    if isinstance(text["content"], list):
        try:
            text["content"], pictures = content(text["content"], Finder(folder=Path()))
        except BirlError as error:
            raise BirlError(f"The model is asked with messages whose content{error}.") from error
    calls = given.get("tool_calls") or ()
    try:
        result = tuple(
            ToolCall(name=c["function"]["name"], arguments=c["function"]["arguments"], id=c.get("id") or "")
            for c in calls
        )
    except (KeyError, TypeError, AttributeError):
        return None
    parts = (*text.values(), *(part for call in result for part in (call.name, call.arguments, call.id)))
    empty = given.get("content") is None and not result and text["role"] != "assistant"
    if not text["role"] or not all(isinstance(part, str) for part in parts) or empty:
        return None
    return Message(**text, tool_calls=result, pictures=tuple(pictures))
