"""GEM (gem-llm): games and problems by name, with rewards for every turn.

birl rl env=gem env.task=game:GuessTheNumber-v0-easy env.max_turns=4

Each episode has a separate environment; there is no pool. GEM's games draw from the global random generators, so each
call gets its own (`OwnRandom`).
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from birl.envs.adapters.package import OwnRandom, Seeded, arguments, imported, seed_of, seeds, unknown
from birl.types import Feedback, Message, Task

KIND = "gem"


class Gem:
    @dataclass(kw_only=True)
    class Config(Seeded):
        task: str = "game:GuessTheNumber-v0-easy"
        """Environment name in GEM."""
        parameters: list[str] = field(default_factory=list[str])
        """Further arguments of `gem.make`: [max_turns=5]."""

    @staticmethod
    def shared(config: Config) -> None:
        """Check that the environment exists."""
        imported("gem", KIND)
        known = imported("gem.envs.registration", KIND).ENV_REGISTRY
        if config.task not in known:
            raise unknown("env.task", config.task, known)

    @staticmethod
    def tasks(config: Config, split: str) -> list[dict[str, Any]]:
        return seeds(config, config.task, split)

    def __init__(self, task: Task, config: Config) -> None:
        self.config, self.seed = config, seed_of(task)
        self.random = OwnRandom(self.seed)
        self.env: Any = None

    def start(self) -> tuple[Message, ...]:
        with self.random:
            self.env = imported("gem", KIND).make(self.config.task, **arguments(self.config.parameters))
            seen, info = self.env.reset(seed=self.seed)
        return (message_of(seen, info),)

    def step(self, reply: Message) -> Feedback:
        # Problems that are not games judge code or mathematics, which may take long, and draw no random numbers.
        game = self.config.task.startswith("game:")
        with self.random if game else nullcontext():
            seen, reward, terminated, truncated, info = self.env.step(reply.content)
        done, told = bool(terminated or truncated), (message_of(seen, info),)
        return Feedback(messages=told, reward=float(reward), done=done, truncated=done and not terminated)

    def close(self) -> None:
        getattr(self.env, "close", lambda: None)()


def message_of(seen: str, info: dict[str, Any]) -> Message:
    """An observation with GEM's prefix and suffix."""
    parts = (str(info.get("prefix", "")), str(seen), str(info.get("suffix", "")))
    return Message(role="user", content="\n".join(p.strip("\n") for p in parts if p))
