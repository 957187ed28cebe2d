"""Prompts with a hint, privileged context that the teacher sees and the policy does not.

    text       "A right answer is {answer}.", whose names in braces are columns of the row, or
    {sibling}  a right answer of the same group, of several turns all of them; never the answer itself
    {feedback} what a reward function logged for this answer: log_extra("feedback", texts)

The first text whose names all have a value is put after the last user message of the row's prompt, or before a prompt
that is plain text. An answer for which no text has all values has no hint.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from birl.data.tasks import answer_text
from birl.data.trees import common
from birl.errors import BirlError
from birl.types import Conversation, Group, Message, Sample, Task

if TYPE_CHECKING:
    from birl.text.chat import Chat

NAME = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """`context`: of the teacher [tokens]; a hint that does not fit is left out."""

    texts: Sequence[str]
    chat: "Chat"
    context: int
    prompts: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def of(self, sample: Sample, group: Group, episode: int) -> Sample:
        """The sample with its `hinted` prompt, if it has a hint. Raises `BirlError` for a name that is no column, and
        if the first prompt of the conversation does not contain the row's."""
        hint = next((h for text in self.texts if (h := self.filled(text, group, episode))), "")
        if not hint:
            return sample
        first = int(sample.mask.argmax())
        hinted = self.placed(group.task, hint, sample.tokens[:first])
        if hinted is None:
            raise BirlError(
                f"algorithm.hint: the conversation of {group.task.place} does not begin with the row's prompt, so "
                "the hint cannot be added. Use an environment whose first user message is the row's."
            )
        fits = len(hinted) + len(sample.tokens) - first <= self.context
        return replace(sample, hinted=hinted) if fits else sample

    def placed(self, task: Task, hint: str, prompt: np.ndarray) -> np.ndarray | None:
        """`prompt` with the hint. It begins with the row's prompt, or ends with the row's last message after other text
        (a description of tools). Else None."""
        plain, hinted = (np.array(self.render(task, text), np.int32) for text in ("", hint))
        if np.array_equal(prompt[: len(plain)], plain):
            return np.concatenate([hinted, prompt[len(plain) :]])
        if isinstance(task.prompt, str):
            return None
        empty = np.array(self.chat.render(asking(task.prompt, lambda _: "")), np.int32)
        last = len(plain) - common(plain, empty)  # from the content on
        same = common(plain, hinted)
        if last == 0 or not np.array_equal(prompt[-last:], plain[-last:]):
            return None
        return np.concatenate([prompt[: len(prompt) - len(plain) + same], hinted[same:]])

    def filled(self, text: str, group: Group, episode: int) -> str:
        """A text with the values of its names; empty if a value is missing."""
        columns = {"answer": (answer := group.task.answer), **group.task.columns}
        if answer is not None and answer_text(columns["answer"]) != answer:  # else whole, as a solution of GSM8K
            columns["answer"] = answer
        values: dict[str, str] = {}
        for name in NAME.findall(text):
            match name:
                case "sibling":
                    value = sibling(group, episode, self.chat)
                case "feedback":
                    value = group.trajectories[episode].extra.get(name)
                case _ if name in columns:
                    value = columns[name]
                case _:
                    place, known = group.task.place, ", ".join(columns)
                    raise BirlError(f"algorithm.hint={text}: {place} has no column {name!r}, only {known}.")
            if value is None or not str(value).strip():
                return ""
            values[name] = str(value)
        return NAME.sub(lambda match: values[match[1]], text)

    def render(self, task: Task, hint: str) -> tuple[int, ...]:
        """The row's prompt with a hint, as ids. Cached for one task, whose answers often have the same hint."""
        if (key := (task.id, hint)) not in self.prompts:
            if self.prompts and next(iter(self.prompts))[0] != task.id:
                self.prompts.clear()
            self.prompts[key] = self.chat.render(told(task.prompt, hint) if hint else task.prompt)
        return self.prompts[key]


def told(prompt: Conversation, hint: str) -> Conversation:
    """A prompt with a hint."""
    if isinstance(prompt, str):
        return f"{hint}\n\n{prompt}"
    return asking(prompt, lambda content: f"{content}\n\n{hint}")


def asking(prompt: tuple[Message, ...], changed: Callable[[str], str]) -> tuple[Message, ...]:
    """The prompt with another content of the user's last message."""
    last = max((i for i, m in enumerate(prompt) if m.role == "user"), default=len(prompt) - 1)
    return (*prompt[:last], replace(prompt[last], content=changed(prompt[last].content)), *prompt[last + 1 :])


def sibling(group: Group, episode: int, chat: "Chat") -> str | None:
    """Text of the first other right answer of the group (score at least 1): of all its turns, without thinking. It is
    the same for almost all answers, so the teacher computes their prompt once."""
    for number, other in enumerate(group.trajectories):
        if number != episode and other.outcome.scored and other.turns and other.score >= 1:
            turns = [(t.completion.tokens.tolist(), t.prompt.tolist()) for t in other.turns]
            return "\n".join(chat.parse(answer, prompt=prompt).content for answer, prompt in turns)
    return None
