"""Two players, one model: each is trained on its own turns, with its own reward.

    birl rl env=examples/self_play.py:Nim env.sticks=7 rollout.max_tokens=4 model.max_length=512

Nim: take one, two or three sticks; the player who takes the last one wins. An invalid move loses.
"""

import re
from dataclasses import dataclass

from birl.types import Message, Task

PLAYERS = ("first", "second")


class Nim:
    @dataclass
    class Config:
        sticks: int = 7
        """Sticks on the table."""
        count: int = 200
        """Training tasks."""

    @staticmethod
    def tasks(config, split):
        return [{"prompt": f"{config.sticks} sticks"}] * (config.count if split == "train" else 20)

    def __init__(self, task: Task, config: Config):
        self.sticks = config.sticks

    async def run(self, model) -> dict[str, float]:
        history = dict.fromkeys(PLAYERS, ())
        for turn in range(2 * self.sticks):
            me, other = PLAYERS[turn % 2], PLAYERS[1 - turn % 2]
            text = f"{self.sticks} sticks are left. Take 1, 2 or 3. Who takes the last one wins. Say the number."
            history[me] += (Message(role="user", content=text),)
            reply = await model.ask(history[me], agent=me)
            history[me] += (reply,)
            move = re.fullmatch(r"\s*([123])\.?\s*", reply.content)
            if move is None or int(move[1]) > self.sticks:
                return {me: -1.0, other: 0.0}  # no winner
            self.sticks -= int(move[1])
            if self.sticks == 0:
                return {me: 1.0, other: -1.0}
        raise AssertionError("every move takes a stick")

    async def close(self):
        pass
