"""TextArena's games for one player, or with one model as all players, each trained with that player's reward.

birl rl env=textarena env.id=GuessTheNumber-v0 env.max_turns=12
birl rl env=textarena_self_play env.id=TicTacToe-v0 env.max_turns=20

TextArena's observation wrappers repeat all earlier messages in every turn. Here a player receives only new messages, so
the turns of an episode stay one token sequence. Its action wrappers are applied unchanged.
"""

import re
from dataclasses import dataclass
from typing import Any

from birl.envs.adapters.package import OwnRandom, Seeded, imported, seed_of, seeds, unknown
from birl.envs.calls import called
from birl.errors import BirlError, TooLong
from birl.types import Feedback, Message, Model, Task

KIND = "textarena"


@dataclass(kw_only=True)
class Keys(Seeded):
    id: str = "GuessTheNumber-v0"
    """TextArena's name of the game."""


class Game:
    """One game, with separate random numbers."""

    def __init__(self, id: str, players: int, seed: int) -> None:
        self.random = OwnRandom(seed)
        with self.random:
            self.env = imported(KIND, KIND).make(id)
            self.env.reset(num_players=players, seed=seed)

    def seen(self) -> tuple[int, str]:
        """The current player, and the messages that it has not seen yet, without its own."""
        inner = self.env
        while isinstance(inner, imported(KIND, KIND).Wrapper):
            inner = inner.env
        me, news = inner.get_observation()
        return me, "\n".join(text if who == -1 else f"[Player {who}] {text}" for who, text, _ in news if who != me)

    def act(self, text: str) -> bool:
        with self.random:
            done, _ = self.env.step(action=text)
        return bool(done)

    def rewards(self) -> dict[int, float]:
        rewards, _ = self.env.close()
        if rewards is None:
            raise RuntimeError("the game is over and has no rewards")
        return {int(who): float(reward) for who, reward in rewards.items()}


def check(config: Keys, players: int, hint: str) -> None:
    """Raise `BirlError` if the game is not supported."""
    arena = imported(KIND, KIND)
    known = imported("textarena.envs.registration", KIND).ENV_REGISTRY
    if config.id not in known:
        raise unknown("env.id", config.id, known)
    try:
        game = arena.make(config.id)
    except (Exception, SystemExit) as error:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
        told = next((line.strip(" .") for line in lines if line.strip(" *")), "")
        raise BirlError(
            f"env.id={config.id} cannot be played here: {type(error).__name__}: {told}. docs/adapters.md lists what "
            "such games need."
        ) from error
    try:
        with OwnRandom(0):
            game.reset(num_players=players, seed=0)
    except AssertionError as error:
        raise BirlError(f"env.id={config.id}: {error}. {hint}") from error


class Arena:
    """Base of both: their tasks are seeds. A game is data; its `close` returns the rewards."""

    @staticmethod
    def tasks(config: Keys, split: str) -> list[dict[str, Any]]:
        return seeds(config, config.id, split)

    def __init__(self, task: Task, config: Any) -> None:
        self.config, self.seed = config, seed_of(task)

    async def close(self) -> None:
        pass


class TextArena(Arena):
    Config = Keys

    @staticmethod
    def shared(config: Config) -> None:
        check(config, 1, "For several players: env=textarena_self_play env.players=2.")

    def start(self) -> tuple[Message, ...]:
        self.game = Game(self.config.id, 1, self.seed)
        return (Message(role="user", content=self.game.seen()[1]),)

    def step(self, reply: Message) -> Feedback:
        if self.game.act(reply.content):
            return Feedback(reward=self.game.rewards()[0], done=True)
        return Feedback(messages=(Message(role="user", content=self.game.seen()[1]),), done=False)


class SelfPlay(Arena):
    """A game that is truncated is a draw, worth 0 to each player, as in TextArena at its own limit."""

    @dataclass(kw_only=True)
    class Config(Keys):
        id: str = "TicTacToe-v0"
        """Game id in TextArena."""
        players: int = 2
        """Number of players."""

    @staticmethod
    def shared(config: Config) -> None:
        check(config, config.players, "Set env.players, or for one player: env=textarena.")

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
