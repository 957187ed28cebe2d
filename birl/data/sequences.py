"""Texts and conversations -> ids, and which of them are learned. What cannot fit is neither rendered nor encoded: it is
known by its characters."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from birl.config import schema
from birl.errors import BirlError
from birl.text.bounds import beginning, cannot_fit
from birl.text.pictures import FIRST, is_picture
from birl.types import Conversation, Message, Sample

if TYPE_CHECKING:
    from birl.text.chat import Chat

C = TypeVar("C", str, tuple[Message, ...])
Encoded = tuple[tuple[int, ...], tuple[bool, ...]]
"""The ids of a sequence, and for each whether it is learned."""


class Unfit(Exception):
    """A sequence has more tokens than the limit, or nothing within it that is to be learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One sequence in little memory: ids, and for each whether it is learned."""

    ids: array
    mask: bytes

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, group: int, advantage: float = 1.0) -> Sample:
        n = len(self.ids)
        return Sample(
            tokens=np.array(self.ids, np.int32),
            mask=np.frombuffer(self.mask, np.bool_),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, -1, np.int32),
            advantage=advantage,
            group=group,
            episode=0,
        )


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes at most what `limit` tokens need, and one more. Raises `Unfit` for what is known to have more, unless
    data.too_long=truncate."""

    chat: "Chat"
    config: schema.Files
    limit: int

    @property
    def cuts(self) -> bool:
        return getattr(self.config, "too_long", "") == "truncate"

    def text(self, whole: str) -> Encoded:
        """All of a text, and the token that ends it."""
        text = self._bounded(whole)
        ids = (*self.chat.render(text), *self._end(text == whole))
        return ids, (False, *(True,) * (len(ids) - 1))

    def answered(self, prompt: str | tuple[Message, ...], answer: str, roles: Sequence[str]) -> Encoded:
        """A prompt and its answer, which is learned together with the token that ends it."""
        asked = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        reply = Message(role="assistant", content=answer)
        if isinstance(prompt, str) and not (self.chat.has_template and self.config.apply_chat_template):
            if self.config.system_prompt:
                raise BirlError("data.system_prompt is set, but raw text has no place for it.")
            talk = (*asked, reply)
            heard = self._bounded(talk)
            before, own = self.chat.render(heard[0].content), self.chat.encode("".join(m.content for m in heard[1:]))
            own = (*own, *self._end(heard == talk))
            return (*before, *own), (*("all" in roles,) * len(before), *(True,) * len(own))
        alone = "all" not in roles
        return self.spoken((*self.led(asked), reply), ["assistant"] if alone else roles, "", last=alone)

    def spoken(self, talk: Sequence[Message], roles: Sequence[str], where: str, last: bool = False) -> Encoded:
        """A conversation; `last`: only what its last message says is learned."""
        if talk[0].role == "assistant" and "assistant" in roles:
            raise BirlError(
                f"{where}: the conversation begins with the assistant, so nothing comes before what it says."
            )
        heard = self._bounded(tuple(talk))
        if len(heard) < len(talk) and (last or not ("all" in roles or any(m.role in roles for m in heard))):
            raise Unfit
        ids, mask = self.chat.conversation(heard, roles, self.limit)
        return (ids, _last_stretch(mask)) if last else (ids, mask)

    def led(self, talk: Sequence[Message]) -> tuple[Message, ...]:
        """Behind data.system_prompt, unless there is a system message."""
        if self.config.system_prompt and talk[0].role != "system":
            return (Message(role="system", content=self.config.system_prompt), *talk)
        return tuple(talk)

    def tokens(self, encoded: Encoded, where: str, roles: Sequence[str]) -> Tokens:
        """Raises `BirlError` where nothing is to be learned."""
        ids, mask = encoded
        mask = (False, *mask[1:])  # nothing comes before the first token that it could be predicted from
        if is_picture(max(ids, default=0)):  # what stands for a picture is no word
            mask = tuple(m and not is_picture(token) for token, m in zip(ids, mask, strict=True))
            ids, mask = self._before_cut_picture(ids, mask)
        if len(ids) > self.limit and not (self.cuts and any(mask[: self.limit])):
            raise Unfit
        if not any(mask):
            raise BirlError(f"{where}: no message of {', '.join(roles)}, so there is nothing to learn. Remove the row.")
        return Tokens(ids=array("i", ids), mask=bytes(mask))

    def _before_cut_picture(self, ids: tuple[int, ...], mask: tuple[bool, ...]) -> Encoded:
        """A sequence that is cut ends before a picture of which the limit would leave a part."""
        if len(ids) <= self.limit or self.chat.pictures is None:
            return ids, mask
        firsts = (s.places[0] for s in self.chat.pictures.spans(ids) if s.places[0] < self.limit <= s.places[-1])
        end = min(firsts, default=len(ids))
        return ids[:end], mask[:end]

    def fits(self, conversation: Conversation) -> bool:
        return not cannot_fit(conversation, self.limit)

    def _bounded(self, conversation: C) -> C:
        if self.fits(conversation):
            return conversation
        if not self.cuts:
            raise Unfit
        return beginning(conversation, self.limit)

    def _end(self, whole: bool) -> tuple[int, ...]:
        return (self.chat.end,) if whole else ()


def only_what_differs(sides: list[Encoded]) -> list[Encoded]:
    """Answers that both conversations begin with are their prompt: they are the same, so nothing is preferred."""
    (a, _), (b, _) = sides
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    result = []
    for ids, mask in sides:
        start = same
        while start > 0 and mask[start - 1] and start <= len(mask):  # to the beginning of the answer that differs
            start -= 1
        result.append((ids, tuple(m and i >= start for i, m in enumerate(mask))))
    return result


def _last_stretch(mask: tuple[bool, ...]) -> tuple[bool, ...]:
    end = max((i for i, m in enumerate(mask) if m), default=0)
    start = end
    while start > 0 and mask[start - 1]:
        start -= 1
    return tuple(m and start <= i for i, m in enumerate(mask))


def scored(tokens: Tokens, group: int) -> Sample:
    """A sequence whose score is asked for: it is read where the token behind the last one would be predicted. That
    token only marks the place; nothing attends to it."""
    sample = tokens.sample(group)
    n = len(sample.tokens)
    return replace(
        sample,
        tokens=np.append(sample.tokens, sample.tokens[-1]),
        mask=np.arange(n + 1) == n,
        logprobs=np.append(sample.logprobs, np.float32(0)),
        versions=np.append(sample.versions, np.int32(-1)),
    )


def observations(sample: Sample) -> np.ndarray:
    """Places of the tokens that came between what the model wrote, [O]: an environment's, a tool's or another agent's,
    with what the chat template puts around them. Placeholders of pictures are no words."""
    return np.flatnonzero(np.logical_or.accumulate(sample.mask) & ~sample.mask & (sample.tokens < FIRST))
