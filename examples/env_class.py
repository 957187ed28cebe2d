"""An environment with its own keys: the model asks for hints, or answers.

birl rl env=examples/env_class.py:Hints env.colors=[red,blue,green] env.cost=0.2 model.max_length=512
"""

from dataclasses import dataclass, field
from random import Random

from birl.types import Feedback, Message, Task


class Hints:
    @dataclass
    class Config:
        colors: list[str] = field(default_factory=lambda: ["red", "blue", "green", "black"])
        """Possible secrets."""
        cost: float = 0.1
        """Subtracted from the reward for each hint."""
        count: int = 200
        """Training tasks."""

    @staticmethod
    def tasks(config, split):
        """Rows as a data file would have them; without it, data.train names one."""
        random = Random(split)
        count = config.count if split == "train" else 20
        return [{"prompt": "secret", "answer": random.choice(config.colors)} for _ in range(count)]

    def __init__(self, task: Task, config: Config):
        self.secret, self.config = task.answer, config
        self.left = [c for c in config.colors if c != self.secret]
        self.hints = 0

    def start(self):  # plain functions run in a thread, async ones in the event loop
        text = f"I think of one of: {', '.join(self.config.colors)}. Say 'hint', or the color."
        return (Message(role="user", content=text),)

    def step(self, reply: Message) -> Feedback:
        guess = reply.content.strip().lower().rstrip(".")
        if guess == "hint" and self.left:
            self.hints += 1
            hint = Message(role="user", content=f"It is not {self.left.pop()}.")
            return Feedback(messages=(hint,), reward=-self.config.cost, score=0.0, done=False)
        right = float(guess == self.secret)
        return Feedback(reward=right, score=right, info={"hints": self.hints}, done=True)

    def close(self):
        pass
