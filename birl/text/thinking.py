"""Separates a model's thinking (reasoning) from its answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from birl.types import Message, ToolCall

#: thinking tags: DeepSeek R1, Qwen 3 and most others; Magistral; Gemma 4
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A parsed reply. `thinking` is None without thinking, which an empty block is not; `closed`: the thinking has
    ended."""

    thinking: str | None = None
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    closed: bool = True

    def message(self) -> Message:
        return Message(role="assistant", content=self.content, thinking=self.thinking or "", tool_calls=self.calls)


def tags_of(template: str) -> tuple[str, str] | None:
    """The thinking tags of a chat template; None if it has none."""
    return next((tags for tags in TAGS if tags[1] in template), None)


def split(text: str, tags: tuple[str, str] | None, opened: bool = False) -> tuple[str | None, str, bool]:
    """Split a reply into the thinking, the rest, and whether the thinking ended. `opened`: the prompt has opened it. A
    tag elsewhere is text."""
    if tags is None:
        return None, text, True
    start = text.lstrip()
    if not opened and not start.startswith(tags[0]):
        return None, text, True
    thought, close, rest = (text if opened else start[len(tags[0]) :]).partition(tags[1])
    return thought.strip("\n"), rest.lstrip("\n"), bool(close)


class Growing:
    """Incremental `split` of a growing text: `feed` returns the new certain parts of thinking and rest. Their
    concatenations are always prefixes of the result of `split` for the whole text."""

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
            return "", ""  # the thinking may still begin
        thinking, rest, closed = split(self.text, self.tags, self.opened)
        if thinking is None or closed:
            return thinking or "", rest
        inside = self.text if self.opened else start[len(self.tags[0]) :]
        return inside[: len(inside) - unfinished(inside, self.tags[1:])].strip("\n"), ""


def unfinished(text: str, wanted: Iterable[str]) -> int:
    """Number of characters at the end of `text` that may begin one of `wanted`."""
    return max((n for s in wanted for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n])), default=0)
