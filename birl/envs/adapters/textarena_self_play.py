"""TextArena with one model as all players; each player's turns are trained with that player's reward.

birl rl env=textarena_self_play env.id=TicTacToe-v0 env.max_turns=20

A game that a limit cuts is a draw, worth 0 to each player, as TextArena has it where a game's own limit is reached.
"""

from dataclasses import dataclass
from typing import Any

from birl.envs.adapters.package import seed_of, seeds
from birl.envs.adapters.textarena import Game, Keys, check
from birl.envs.calls import called
from birl.errors import TooLong
from birl.types import Message, Model, Task


class SelfPlay:
    @dataclass(kw_only=True)
    class Config(Keys):
        id: str = "TicTacToe-v0"
        """TextArena's name of the game."""
        players: int = 2
        """How many play."""

    @staticmethod
    def shared(config: Config) -> None:
        check(config, config.players, "Set env.players, or for one player: env=textarena.")

    @staticmethod
    def tasks(config: Config, split: str) -> list[dict[str, Any]]:
        return seeds(config, config.id, split)

    def __init__(self, task: Task, config: Config) -> None:
        self.config, self.seed = config, seed_of(task)

    async def run(self, model: Model) -> dict[str, float]:
        game: Game = await called(Game, self.config.id, self.config.players, self.seed)
        talks: dict[int, tuple[Message, ...]] = dict.fromkeys(range(self.config.players), ())
        rewards, done = dict.fromkeys(talks, 0.0), False
        while not done:
            me, text = game.seen()
            talks[me] += (Message(role="user", content=text),)
            try:
                reply = await model.ask(talks[me], agent=f"player_{me}")
            except TooLong:
                if all(len(talk) < 2 for talk in talks.values()):  # no move was made that could have a reward
                    raise
                break
            talks[me] += (reply,)
            done = await called(game.act, reply.content)
        if done:
            rewards = game.rewards()
        return {f"player_{who}": reward for who, reward in rewards.items()}

    async def close(self) -> None:
        pass
