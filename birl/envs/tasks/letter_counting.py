"""How often a letter occurs in a word. One turn."""

import random
from dataclasses import dataclass

from birl.envs.tasks.answer import number
from birl.envs.tasks.dictionary import WORDS
from birl.envs.tasks.rows import Drawn, Row, answered, at_least, drawn
from birl.types import Conversation, Feedback, Message, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterCounting:
    """The reward is 1 where the last number of the answer, in digits or as a word, is the count, else 0."""

    @dataclass(kw_only=True)
    class Config(Drawn):
        longest: int = 12
        """Longest word [letters]."""
        absent: float = 0.1
        """Share of questions about a letter that the word does not have [0 to 1]."""
        spelled: bool = False
        """Whether the word is shown letter by letter too. Tokens hide letters, and few small models can spell."""
        rows: int = 300
        """Training tasks."""
        validation_rows: int = 100
        """Held-out tasks. No word is in both."""

        def __post_init__(self) -> None:
            self.check(
                "letter_counting",
                longest=at_least(self.longest, 5),
                absent="" if 0 <= self.absent <= 1 else f"is {self.absent:g}, must be from 0 to 1",
            )

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        """Letters that occur once and letters that occur more often are about as many: otherwise three answers in four
        would be 1, and a model would learn to say that."""
        words = [word for word in WORDS if len(word) <= config.longest]
        once = [(word, letter) for word in words for letter in sorted(set(word)) if word.count(letter) == 1]
        often = [(word, letter) for word in words for letter in sorted(set(word)) if word.count(letter) > 1]

        def draw(rng: random.Random) -> tuple[str, Row]:
            if rng.random() < config.absent:
                word = rng.choice(words)
                letter = rng.choice(sorted(set(LETTERS) - set(word)))
            else:
                word, letter = rng.choice(rng.choice((once, often, often)))  # the few are soon drawn twice
            shown = f"{word} ({' '.join(word)})" if config.spelled else word
            prompt = f"How many times does the letter {letter} occur in the word {shown}?"
            row = {"prompt": prompt, "answer": str(word.count(letter)), "word": word, "letter": letter}
            return word, {**row, "data_source": "letter_counting"}

        return drawn(draw, config, split, "letter_counting")

    def __init__(self, task: Task) -> None:
        self.task = task

    async def start(self) -> Conversation:
        return self.task.prompt

    async def step(self, reply: Message) -> Feedback:
        return Feedback(reward=float(number(reply.content, words=True) == int(answered(self.task))))

    async def close(self) -> None:
        pass
