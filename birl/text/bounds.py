"""Detects conversations that cannot fit into a context before they are rendered or tokenized."""

from dataclasses import replace
from typing import TypeVar

from birl.types import Conversation, Message

C = TypeVar("C", str, tuple[Message, ...])

#: largest plausible mean length of a token over a text
CHARACTERS = 64
#: characters of a prompt, or bytes of a request; longer ones are rendered outside of the event loop
LONG = 1 << 16


def characters(conversation: Conversation) -> int:
    if isinstance(conversation, str):
        return len(conversation)
    texts = (t for m in conversation for t in (m.content, m.thinking, *(call.arguments for call in m.tool_calls)))
    return sum(map(len, texts))


def takes_long(conversation: Conversation, url: str) -> bool:
    """Whether to render outside of the event loop: a long text, or pictures over HTTP (others: order matters)."""
    seen = url and not isinstance(conversation, str) and any(message.pictures for message in conversation)
    return bool(seen) or characters(conversation) > LONG


def cannot_fit(conversation: Conversation, tokens: int) -> bool:
    """Whether a conversation has more characters than so many tokens can hold; known without tokenizing it."""
    many = not isinstance(conversation, str) and len(conversation) > tokens
    return many or characters(conversation) > CHARACTERS * tokens


def beginning(conversation: C, tokens: int) -> C:
    """The beginning of a conversation that cannot fit: at most as many characters as so many tokens can hold."""
    room = CHARACTERS * tokens
    if isinstance(conversation, str):
        return conversation[:room]
    kept: list[Message] = []
    for message in conversation[: tokens + 1]:
        kept.append(replace(message, content=message.content[:room]))
        room -= len(message.content)
        if room < 0:
            break
    return tuple(kept)  # pyright: ignore
