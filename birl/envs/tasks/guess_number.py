"""Find a number by asking: each guess is answered with higher or lower. Several turns, and the first alone is luck."""

import random
import re
from dataclasses import dataclass, replace

from birl.config.schema.kinds import Amount, Count, Whole
from birl.envs.tasks.rows import Drawn, Row, answered, user_message
from birl.errors import BirlError
from birl.types import Conversation, Feedback, Message, Task

GUESS = "\nGuess: "  # continued by a model without a chat template
INTEGER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


class GuessNumber:
    """The reward is 1 for the right guess, which ends the episode, and `-wasted` for a guess that contradicts earlier
    hints or is no number, in its own turn. The score is 1 if the number was guessed, else 0."""

    @dataclass(kw_only=True)
    class Config(Drawn):
        low: Whole = 1
        """Smallest number."""
        high: int = 16
        """Largest number."""
        turns: Count = 5
        """Maximum number of guesses; must suffice for bisection. env.max_turns limits it, too."""
        wasted: Amount = 0.1
        """Penalty of a guess that contradicts earlier hints or is not a number."""
        example: bool = True
        """Show an example game first, so that a small model answers with only a number from the start."""
        remind: bool = True
        """List the remaining numbers in each answer."""
        rows: Count = 240
        """Training tasks."""
        validation_rows: Whole = 40
        """Held-out tasks, spread evenly over the range."""

        def __post_init__(self) -> None:
            size = self.high - self.low + 1
            if size < 4:
                raise BirlError(f"env.high={self.high}: must be at least env.low + 3.")
            if size.bit_length() > self.turns:
                raise BirlError(f"env.turns={self.turns}: too few to find one of {size} numbers by halving.")

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        """Any number may be in both splits: a policy that learned that some never occur would be right. The held-out
        ones are spread evenly over the range."""
        rng, n = random.Random(f"guess_number/{split}/{config.seed}"), config.size(split)
        size = config.high - config.low + 1
        secrets = [config.low + (i * size // n if split == "validation" else rng.randrange(size)) for i in range(n)]
        prompt = f"Guess my number from {config.low} to {config.high}."
        return [{"prompt": prompt, "answer": str(secret), "data_source": "guess_number"} for secret in secrets]

    def gold(self, task: Task) -> list[str]:
        """Bisect the remaining range."""
        low, high, secret, guesses = self.config.low, self.config.high, int(answered(task)), []
        while not guesses or guesses[-1] != secret:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if secret > guesses[-1] else (low, guesses[-1] - 1)
        return [str(n) for n in guesses]

    def __init__(self, task: Task, config: Config) -> None:
        self.task, self.config = task, config
        self.secret = int(answered(task))
        self.low, self.high, self.turn = config.low, config.high, 0

    async def start(self) -> Conversation:
        prompt = self.task.prompt
        if isinstance(prompt, str):
            return f"{prompt}{GUESS}"
        if not self.config.example:
            return prompt
        *before, asked = prompt
        return (*before, *self._example(asked.content), replace(asked, content=f"Right. {asked.content}"))

    def _example(self, asked: str) -> tuple[Message, ...]:
        """A game that ends with its second guess, up to that."""
        low, high = self.config.low, self.config.high
        first = (low + high) // 2
        told = self._told("Higher.", first + 1, high)
        talk = (("user", asked), ("assistant", str(first)), ("user", told), ("assistant", str((first + 1 + high) // 2)))
        return tuple(Message(role=role, content=content) for role, content in talk)

    async def step(self, reply: Message) -> Feedback:
        self.turn += 1
        result = INTEGER.findall(reply.content)
        guess = int(result[-1]) if result else None
        if guess == self.secret:
            return Feedback(reward=1.0, score=1.0, info={"guess_number/guesses": float(self.turn)})
        wasted = guess is None or not self.low <= guess <= self.high
        hint = self._hint(guess)
        return Feedback(
            messages=user_message(hint if not isinstance(self.task.prompt, str) else f"\n{hint}{GUESS}"),
            reward=-self.config.wasted if wasted else 0.0,
            score=0.0,
            done=self.turn >= self.config.turns,
        )

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            hint = "Say a number."
        elif guess < self.secret:
            hint, self.low = "Higher.", max(self.low, guess + 1)
        else:
            hint, self.high = "Lower.", min(self.high, guess - 1)
        return self._told(hint, self.low, self.high)

    def _told(self, hint: str, low: int, high: int) -> str:
        left = f"Guess from {low} to {high}." if low < high else f"Guess {low}."
        return f"{hint} {left}" if self.config.remind else hint

    async def close(self) -> None:
        pass
