"""Texts and conversations -> ids and loss mask. Those that cannot fit, by their number of characters, are neither
rendered nor encoded."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from birl.config import schema
from birl.errors import BirlError
from birl.text.bounds import beginning, cannot_fit
from birl.text.pictures import FIRST, is_picture
from birl.types import Conversation, Group, Message, Sample

if TYPE_CHECKING:
    from birl.text.chat import Chat

C = TypeVar("C", str, tuple[Message, ...])
Encoded = tuple[tuple[int, ...], tuple[bool, ...]]
"""The ids of a sequence, and its loss mask."""


class Unfit(Exception):
    """A sequence has more tokens than the limit, or no trained token within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One sequence in compact form: ids and loss mask."""

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
    """Encodes texts and conversations of at most `limit` tokens. Raises `Unfit` for those that are known to have more,
    unless data.too_long=truncate."""

    chat: "Chat"
    config: schema.Files
    limit: int

    @property
    def cuts(self) -> bool:
        return getattr(self.config, "too_long", "") == "truncate"

    def text(self, whole: str) -> Encoded:
        """Encode a text and its end token; all of it is trained."""
        text = self._bounded(whole)
        ids = (*self.chat.render(text), *self._end(text == whole))
        return ids, (False, *(True,) * (len(ids) - 1))

    def answered(self, prompt: str | tuple[Message, ...], answer: str, roles: Sequence[str]) -> Encoded:
        """Encode a prompt and its answer; the answer is trained with its end token."""
        asked = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        reply = Message(role="assistant", content=answer)
        if isinstance(prompt, str) and not (self.chat.has_template and self.config.apply_chat_template):
            if self.config.system_prompt:
                raise BirlError("data.system_prompt is set, but raw text has no system message.")
            talk = (*asked, reply)
            heard = self._bounded(talk)
            before, own = self.chat.render(heard[0].content), self.chat.encode("".join(m.content for m in heard[1:]))
            own = (*own, *self._end(heard == talk))
            return (*before, *own), (*("all" in roles,) * len(before), *(True,) * len(own))
        alone = "all" not in roles
        return self.spoken((*self.led(asked), reply), ["assistant"] if alone else roles, "", last=alone)

    def spoken(self, talk: Sequence[Message], roles: Sequence[str], where: str, last: bool = False) -> Encoded:
        """Encode a conversation; `last`: only its last message is trained."""
        if talk[0].role == "assistant" and "assistant" in roles:
            raise BirlError(f"{where}: the conversation begins with an assistant message, so it has no prompt.")
        heard = self._bounded(tuple(talk))
        if len(heard) < len(talk) and (last or not ("all" in roles or any(m.role in roles for m in heard))):
            raise Unfit
        ids, mask = self.chat.conversation(heard, roles, self.limit)
        return (ids, _last_stretch(mask)) if last else (ids, mask)

    def led(self, talk: Sequence[Message]) -> tuple[Message, ...]:
        """Prepend data.system_prompt, unless there is a system message."""
        if self.config.system_prompt and talk[0].role != "system":
            return (Message(role="system", content=self.config.system_prompt), *talk)
        return tuple(talk)

    def tokens(self, encoded: Encoded, where: str, roles: Sequence[str]) -> Tokens:
        """Return the compact form. Raises `BirlError` if no token is trained."""
        ids, mask = encoded
        mask = (False, *mask[1:])  # the first token has no context to be predicted from
        if is_picture(max(ids, default=0)):  # placeholders of pictures are not trained
            mask = tuple(m and not is_picture(token) for token, m in zip(ids, mask, strict=True))
            ids, mask = self._before_cut_picture(ids, mask)
        if len(ids) > self.limit and not (self.cuts and any(mask[: self.limit])):
            raise Unfit
        if not any(mask):
            raise BirlError(f"{where}: no message of {', '.join(roles)}, so there is nothing to train. Remove the row.")
        return Tokens(ids=array("i", ids), mask=bytes(mask))

    def _before_cut_picture(self, ids: tuple[int, ...], mask: tuple[bool, ...]) -> Encoded:
        """Cut a sequence before a picture that the limit would split."""
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
    """Mask answers in the common prefix of both conversations: they are equal, so neither is preferred."""
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
    """Sample for scoring a sequence: the score is read from the state after its last token. The appended token only
    marks that place; nothing attends to it."""
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
    """Places [O] of the tokens after the first answer that the model did not sample: an environment's, a tool's or
    another agent's, with the chat template's around them; without placeholders of pictures."""
    return np.flatnonzero(np.logical_or.accumulate(sample.mask) & ~sample.mask & (sample.tokens < FIRST))


def empty_samples(episodes: Sequence[tuple[Group, int]]) -> list[Sample]:
    """One for each episode in which the model generated no token: it counts in the denominator as an answer."""
    result = []
    for group, episode in episodes:
        turns = group.trajectories[episode].turns
        if not any(len(turn.completion.tokens) for turn in turns):
            prompt = turns[0].prompt
            sample = Tokens(ids=array("i", prompt), mask=bytes(len(prompt))).sample(group.index, advantage=0.0)
            result.append(replace(sample, episode=episode, policy=turns[0].policy))
    return result


def pairs(samples: Sequence[Sample]) -> list[Sample]:
    """The chosen and the rejected answer of each group in which both are trained: if one is masked or has no tokens,
    there is no pair. Raises `BirlError` if an answer is several samples."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        if sample.advantage != 0:
            groups.setdefault((sample.policy, sample.group), []).append(sample)
    if any(len(own) > len({cast(float, s.advantage) > 0 for s in own}) for own in groups.values()):
        raise BirlError(
            "algorithm=online_dpo: compares one whole answer with another, but an episode has several agents, or turns "
            "whose prompt does not begin with the turn before; take another algorithm, e.g. algorithm=rloo."
        )
    return [s for own in groups.values() if len(own) == 2 for s in own]
