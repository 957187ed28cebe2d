"""What a tiny run did (`Seen`), and what tests of keys look at in it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birl.learner import checkpoint, step_folders
from birl.learner.store import Store
from birl.types import Group, Trajectory


@dataclass
class Seen:
    """What a run did, as far as a witness may look."""

    config: Any
    parts: Any = None
    threads: int = 0
    everything: list[tuple[int, Group]] = field(default_factory=list)
    decoded_at_once: int = 0
    guesses: int = 0
    passes: int = 0
    watchdog: float = 0.0
    printed: str = ""
    run: Path = Path()
    summary: dict[str, Any] = field(default_factory=dict)
    weights: str = ""

    @property
    def groups(self) -> list[Group]:
        return self._of(lambda seed: seed == self.config.seed)

    @property
    def validated(self) -> list[Group]:
        return self._of(lambda seed: seed != self.config.seed)

    def _of(self, wanted: Callable[[int], bool]) -> list[Group]:
        return sorted((g for seed, g in self.everything if wanted(seed)), key=lambda g: (g.start_version, g.index))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / name).read_bytes().splitlines()]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.lines("metrics.jsonl")


def last(name: str) -> Callable[[Any], Any]:
    return lambda s: s.metrics[-1].get(name)


def advantages(s: Seen) -> list[float | None]:
    return [record["advantage"] for record in s.lines("rollouts.jsonl")]


def texts(groups: list[Group], s: Seen) -> list[str]:
    chat = s.parts.rollout.chat
    return [chat.decode(t.turns[-1].completion.ids) for g in groups for t in g.trajectories if t.turns]


def answers(s: Seen) -> list[str]:
    return texts(s.groups, s)


def reads_calls(s: Seen) -> bool:
    """Does it take Llama's calls for calls?"""
    chat, tool = s.parts.rollout.chat, {"type": "function", "function": {"name": "add"}}
    return bool(chat.parse(chat.encode('{"name": "add", "parameters": {}}'), [tool]).tool_calls)


def first_prompt(s: Seen) -> str:
    return s.parts.rollout.chat.decode(s.groups[0].trajectories[0].turns[0].prompt.tolist())


def lengths(groups: list[Group]) -> list[int]:
    return [len(t.turns[-1].completion.ids) for g in groups for t in g.trajectories if t.turns]


def tasks(s: Seen) -> list[str]:
    return [g.task.id for g in s.groups]


def rewards(groups: list[Group]) -> list[float]:
    return [t.reward for g in groups for t in g.trajectories]


def reward_names(s: Seen) -> set[str]:
    return {name for g in s.groups for t in g.trajectories for name in t.parts}


def rows(s: Seen) -> int:
    return sum(map(len, s.parts.train))


def weights(s: Seen) -> str:
    return s.weights


def rates(s: Any) -> list[float]:
    return [round(m["lr"], 6) for m in s.metrics]


def stored(s: Seen) -> bool:
    return bool(Store(f"memory://every/{s.run.name}").steps())


def told_tracker(name: str) -> Callable[[Seen], str]:
    def mode(s: Seen) -> str:
        asked = s.run / f"{name}.asked"
        return asked.read_text() if asked.exists() else ""

    return mode


def played(s: Seen) -> list[Trajectory]:
    return [t for g in s.groups for t in g.trajectories]


def turns(s: Seen) -> set[int]:
    """Numbers of turns of the episodes."""
    return {len(t.turns) for t in played(s)}


def in_the_league(s: Seen) -> int:
    """Versions in the checkpoint."""
    newest = step_folders.latest(s.run / "checkpoints")
    assert newest is not None
    return len({name.split(".")[1] for name in checkpoint.read_tensors(newest, "league.")})


def saved(s: Any) -> list[str]:
    return sorted(path.name for path in (s.run / "checkpoints").iterdir())
