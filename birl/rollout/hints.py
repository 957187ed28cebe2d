"""Prompts with a hint: what the answer's judge knows and the policy does not, for a teacher that sees it.

    text       "A right answer is {answer}." -> what stands in its braces: a column of the row, or
    {sibling}  a right answer of the same group, never the answer's own
    {feedback} what a reward function logged for this answer: log_extra("feedback", texts)

The first text of which everything is there stands behind the prompt's last message of the user, or before a prompt that
is plain text; an answer without any has no hint.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from birl.data.tasks import answer_text
from birl.errors import BirlError
from birl.rollout.session import Translator
from birl.types import Conversation, Group, Sample, Task

NAME = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """`context`: tokens that the teacher can read; a hint that is too long for it is left out."""

    texts: Sequence[str]
    chat: Translator
    context: int
    prompts: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def of(self, sample: Sample, group: Group, episode: int) -> Sample:
        """The sample with its `hinted` prompt, where it has a hint. Raises `BirlError` for a name that is no column,
        and where the conversation does not begin with the row's prompt, which the hint belongs to."""
        hint = next((h for text in self.texts if (h := self.filled(text, group, episode))), "")
        if not hint:
            return sample
        first, task = int(sample.mask.argmax()), group.task
        own = self.render(task, "")
        if sample.tokens[: len(own)].tolist() != list(own) or len(own) > first:
            raise BirlError(
                f"algorithm.hint: the conversation of {task.id} does not begin with the row's prompt, so there is no "
                "place for a hint. Use an environment that begins with it, without tools, as env.kind=single_turn."
            )
        hinted = np.concatenate([self.render(task, hint), sample.tokens[len(own) : first]])
        fits = len(hinted) + len(sample.tokens) - first <= self.context
        return replace(sample, hinted=hinted) if fits else sample

    def filled(self, text: str, group: Group, episode: int) -> str:
        """A text with what its names stand for; empty where something is missing."""
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
                    raise BirlError(
                        f"algorithm.hint={text}: {group.task.id} has no column {name!r}, only {', '.join(columns)}."
                    )
            if value is None or not str(value).strip():
                return ""
            values[name] = str(value)
        return NAME.sub(lambda match: values[match[1]], text)

    def render(self, task: Task, hint: str) -> tuple[int, ...]:
        """Kept until another task comes, as the answers of a group often have one hint."""
        if (key := (task.id, hint)) not in self.prompts:
            if self.prompts and next(iter(self.prompts))[0] != task.id:
                self.prompts.clear()
            self.prompts[key] = self.chat.render(told(task.prompt, hint) if hint else task.prompt)
        return self.prompts[key]


def told(prompt: Conversation, hint: str) -> Conversation:
    """A prompt with a hint."""
    if isinstance(prompt, str):
        return f"{hint}\n\n{prompt}"
    last = max((i for i, m in enumerate(prompt) if m.role == "user"), default=len(prompt) - 1)
    message = replace(prompt[last], content=f"{prompt[last].content}\n\n{hint}")
    return (*prompt[:last], message, *prompt[last + 1 :])


def sibling(group: Group, episode: int, chat: Translator) -> str | None:
    """The text of the next right answer of the group, without its thinking: one with a score of at least 1."""
    n = len(group.trajectories)
    for other in (group.trajectories[(episode + k) % n] for k in range(1, n)):
        if other.outcome.scored and other.turns and other.score >= 1:
            turn = other.turns[-1]
            return chat.parse(turn.completion.tokens.tolist(), prompt=turn.prompt.tolist()).content
    return None
