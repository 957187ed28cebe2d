"""Gymnasium environments whose actions are text or a few choices, for a model that reads and writes.

birl rl env=gymnasium env.id=FrozenLake-v1 env.parameters=[is_slippery=false] env.actions=[left,down,right,up]
"""

import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birl.envs.adapters.package import Seeded, arguments, imported, seed_of, seeds, unknown
from birl.errors import BirlError, first_line, no_file
from birl.named import from_file
from birl.types import Feedback, Message, Task

KIND = "gymnasium"
LISTED = 64  # most choices that a question lists
COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium:
    @dataclass(kw_only=True)
    class Config(Seeded):
        id: str = "FrozenLake-v1"
        """Environment id in Gymnasium; my_package:MyEnv-v0 and my_file.py:MyEnv-v0 import the module first."""
        parameters: list[str] = field(default_factory=list[str])
        """Further arguments of `gymnasium.make`: [is_slippery=false]."""
        actions: list[str] = field(default_factory=list[str])
        """Names of the discrete actions, in order. Empty: their numbers."""
        instructions: str = ""
        """Text before the first observation."""
        see: str = "auto"
        """Observation for the model: ansi (the environment's text rendering) | value (the observation itself) | auto
        (ansi if the environment can render text and the observation is not text)."""
        invalid_reward: float = 0.0
        """Reward of a reply that is not a valid action; the state stays the same, and the model gets a message."""

    @staticmethod
    def shared(config: Config) -> bool:
        """Whether it is rendered as text. Raises `BirlError` if a model cannot play it."""
        gymnasium, env = imported("gymnasium", KIND), made(config.id, config.parameters, False)
        text, discrete = gymnasium.spaces.Text, gymnasium.spaces.Discrete
        env.close()
        if not isinstance(env.action_space, text | discrete):
            raise BirlError(f"env.id={config.id}: its actions are {env.action_space}, neither text nor a few choices.")
        counts = {len(config.actions), len(set(map(said, config.actions)))}
        if config.actions and counts != {getattr(env.action_space, "n", 0)}:
            raise BirlError(f"env.actions={config.actions}: {config.id} has the actions {env.action_space}, each once.")
        draws = "ansi" in env.metadata.get("render_modes", ())
        if config.see not in ("auto", "ansi", "value") or (config.see == "ansi" and not draws):
            raise BirlError(f"env.see={config.see}: must be auto | value{' | ansi' if draws else ''}.")
        return config.see == "ansi" or (config.see == "auto" and draws and not isinstance(env.observation_space, text))

    @staticmethod
    def tasks(config: Config, split: str) -> list[dict[str, Any]]:
        return seeds(config, config.id, split)

    def __init__(self, task: Task, config: Config, shared: bool) -> None:
        self.config, self.seed, self.drawn = config, seed_of(task), shared
        self.env: Any = None

    def start(self) -> tuple[Message, ...]:
        self.env = made(self.config.id, self.config.parameters, self.drawn)
        seen, _ = self.env.reset(seed=self.seed)
        asked = [self.config.instructions, self.shown(seen), self.question()]
        return (Message(role="user", content="\n".join(filter(None, asked))),)

    def step(self, reply: Message) -> Feedback:
        action = self.action(reply.content)
        if action is None:
            text = f"That is no action. {self.question() or 'Say it in another way.'}"
            again = (Message(role="user", content=text),)
            return Feedback(messages=again, reward=self.config.invalid_reward, info={"invalid": 1.0}, done=False)
        seen, reward, terminated, truncated, _ = self.env.step(action)
        done = bool(terminated or truncated)
        messages = () if done else (Message(role="user", content=self.shown(seen)),)
        cut, info = done and not terminated, {"invalid": 0.0}
        return Feedback(messages=messages, reward=float(reward), info=info, done=done, truncated=cut)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def question(self) -> str:
        space = self.env.action_space
        if not hasattr(space, "n"):
            return ""
        first, last = int(space.start), int(space.start) + int(space.n) - 1
        if not self.config.actions and space.n > LISTED:
            return f"Answer with a number from {first} to {last}."
        names = self.config.actions or [str(i) for i in range(first, last + 1)]
        return f"Answer with one of: {', '.join(names)}."

    def action(self, text: str) -> Any:
        """The action of a reply; None if it has none. A choice must be the whole reply: sentences are not searched."""
        space = self.env.action_space
        if not hasattr(space, "n"):
            return text if space.contains(text) else None
        choice, names = said(text), list(map(said, self.config.actions))
        if names:
            return int(space.start) + names.index(choice) if choice in names else None
        result = int(choice) if re.fullmatch(r"-?\d{1,9}", choice) else None
        return result if result is not None and space.contains(result) else None

    def shown(self, seen: Any) -> str:
        if self.drawn:
            drawing = self.env.render()
            return plain(drawing.getvalue() if isinstance(drawing, io.StringIO) else drawing)
        return seen if isinstance(seen, str) else json.dumps(seen, default=value, ensure_ascii=False)


def said(text: str) -> str:
    """A reply, or the name of an action, in lower case without outer blanks and full stops."""
    return text.strip().strip(".").strip().lower()


def value(thing: Any) -> Any:
    """Convert NumPy's numbers and arrays to JSON's."""
    return thing.tolist() if hasattr(thing, "tolist") else str(thing)


def made(id: str, parameters: list[str], drawn: bool) -> Any:
    """Make the environment. Raises `BirlError` if it does not exist."""
    gymnasium, mode = imported("gymnasium", KIND), {"render_mode": "ansi"} if drawn else {}
    place, _, name = id.rpartition(":")
    own = place.endswith(".py")
    if own and not Path(place).is_file():
        raise BirlError(f"env.id={id}: {no_file(place)}")
    try:
        if own:
            from_file(Path(place))
        return gymnasium.make(name if own else id, **mode, **arguments(parameters))
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
        raise unknown("env.id", id, gymnasium.registry) from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        told = first_line(error)
        raise BirlError(f"env.id={id} env.parameters={parameters}: {told}") from error


def plain(drawing: str) -> str:
    """Remove the colours of a rendering. Their meaning is written in brackets: [ ] for a coloured background, which is
    the player's place, { } for a coloured letter, and ( ) if it is blue: Taxi's passenger."""

    def bracketed(match: re.Match[str]) -> str:
        codes = match[1].split(";")
        if any(code.startswith(("4", "10")) for code in codes):
            return f"[{match[2]}]"
        return f"({match[2]})" if "34" in codes else f"{{{match[2]}}}"

    return COLOURED.sub(bracketed, drawing).strip("\n")
