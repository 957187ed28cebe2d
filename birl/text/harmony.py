"""GPT-OSS's reply: messages on channels. analysis is thinking, final is the answer, commentary to functions.NAME is a
call, and other commentary is said to the user before a call."""

import re

from birl.text.calls import Tools, made, past, value
from birl.text.thinking import ParsedReply
from birl.types import ToolCall

MESSAGE = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?:\s*to=([^\s<]+))?\s*<\|channel\|>(analysis|commentary|final)(?:\s+to=([^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\s*(json|code)?\s*<\|message\|>(.*?)(<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def parts(text: str, tools: Tools) -> ParsedReply:
    """What is on no channel, or no valid call, is content as it stands."""
    thinking: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    place, closed = 0, True
    while place < len(text) and (result := MESSAGE.match(text, place)):
        to, channel, body = result[1] or result[3], result[2], result[5]
        place = result.end()
        if to:
            call = _call(to, body) if tools and channel != "final" else None
            calls += [call] if call else []
            content += [] if call else [result[0]]
        elif channel == "analysis":
            thinking.append(body)
            closed = bool(result[6])
        else:
            content.append(body)
    content += [text[place:]] if text[place:] else []
    return ParsedReply(
        thinking="\n\n".join(thinking) if thinking else None,
        content="".join(content),
        calls=tuple(calls),
        closed=closed,
    )


def _call(to: str, body: str) -> ToolCall | None:
    if not to.startswith("functions."):
        return None
    data, end = value(body, 0)
    return made(to.removeprefix("functions."), data) if past(body, end) == len(body) else None
