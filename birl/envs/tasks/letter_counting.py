"""How often a letter occurs in a word. One turn."""

import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from birl.config.schema.kinds import Count, Share, Whole
from birl.envs.single_turn import SingleTurn
from birl.envs.tasks.dictionary import WORDS
from birl.envs.tasks.rows import Drawn, Row, answered, drawn, number
from birl.types import Feedback, Message

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterCounting(SingleTurn):
    """The reward is 1 if the last number of the answer, in digits or as a word, is the count, else 0."""

    @dataclass(kw_only=True)
    class Config(Drawn):
        longest: Annotated[int, Field(ge=5)] = 12
        """Longest word [letters]."""
        absent: Share = 0.1
        """Share of questions about a letter that is not in the word."""
        spelled: bool = False
        """Also show the word letter by letter. Tokens hide letters, and few small models can spell."""
        rows: Count = 300
        """Training tasks."""
        validation_rows: Whole = 100
        """Held-out tasks. No word is in both splits."""

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        """Letters that occur once and letters that occur more often are about equally frequent: otherwise three answers
        in four would be 1, which a model would learn to say."""
        words = [word for word in WORDS if len(word) <= config.longest]
        once = [(word, letter) for word in words for letter in sorted(set(word)) if word.count(letter) == 1]
        often = [(word, letter) for word in words for letter in sorted(set(word)) if word.count(letter) > 1]

        def draw(rng: random.Random) -> tuple[str, Row]:
            if rng.random() < config.absent:
                word = rng.choice(words)
                letter = rng.choice(sorted(set(LETTERS) - set(word)))
            else:
                word, letter = rng.choice(rng.choice((once, often, often)))  # the few words are soon drawn twice
            shown = f"{word} ({' '.join(word)})" if config.spelled else word
            prompt = f"How many times does the letter {letter} occur in the word {shown}?"
            row = {"prompt": prompt, "answer": str(word.count(letter)), "word": word, "letter": letter}
            return word, {**row, "data_source": "letter_counting"}

        return drawn(draw, config, split, "letter_counting")

    async def step(self, reply: Message) -> Feedback:
        return Feedback(reward=float(number(reply.content, words=True) == int(answered(self.task))))
