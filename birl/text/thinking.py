"""What a model says to itself before it answers, set apart from the answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from birl.types import Message, ToolCall

#: how templates mark it: DeepSeek R1, Qwen 3 and most others; Magistral
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply. `thinking` is None where it has no thinking at all, which an empty block is not; `closed`: the thinking
    came to its end."""

    thinking: str | None = None
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    closed: bool = True

    def message(self) -> Message:
        return Message(role="assistant", content=self.content, thinking=self.thinking or "", tool_calls=self.calls)


def tags_of(template: str) -> tuple[str, str] | None:
    """Those that a chat template knows."""
    return next((tags for tags in TAGS if tags[1] in template), None)


def split(text: str, tags: tuple[str, str] | None, opened: bool = False) -> tuple[str | None, str, bool]:
    """Thinking, what comes behind it, and whether the thinking ended. `opened`: the prompt began it already. A tag
    elsewhere is text."""
    if tags is None:
        return None, text, True
    start = text.lstrip()
    if not opened and not start.startswith(tags[0]):
        return None, text, True
    thought, close, rest = (text if opened else start[len(tags[0]) :]).partition(tags[1])
    return thought.strip("\n"), rest.lstrip("\n"), bool(close)


class Growing:
    """`split` of a text while it grows: `feed` gives what is certain of the thinking and of what comes behind it. All
    that it gave is a beginning of what `split` gives of the whole."""

    def __init__(self, tags: tuple[str, str] | None, opened: bool = False) -> None:
        self.tags, self.opened = tags, opened
        self.text = ""
        self.told = ["", ""]

    def feed(self, text: str) -> tuple[str, str]:
        self.text += text
        result = self._certain()
        new = tuple(now[len(before) :] for now, before in zip(result, self.told, strict=True))
        self.told = [max(now, before, key=len) for now, before in zip(result, self.told, strict=True)]
        return new[0], new[1]

    def _certain(self) -> tuple[str, str]:
        if self.tags is None:
            return "", self.text
        start = self.text.lstrip()
        if not self.opened and self.tags[0].startswith(start):
            return "", ""  # it may yet begin to think
        thinking, rest, closed = split(self.text, self.tags, self.opened)
        if thinking is None or closed:
            return thinking or "", rest
        inside = self.text if self.opened else start[len(self.tags[0]) :]
        return inside[: len(inside) - unfinished(inside, self.tags[1:])].strip("\n"), ""


def unfinished(text: str, wanted: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `wanted`."""
    return max((n for s in wanted for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n])), default=0)
