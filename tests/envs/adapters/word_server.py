"""A small OpenEnv server: guess the word that the seed chose."""

import argparse
import random

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

WORDS = ("ash", "birch", "cedar", "elm")


class Guess(Action):
    word: str


class Said(Observation):
    text: str = ""
    guesses: int = 0


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.word, self.guesses = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Said:
        self.word, self.guesses = random.Random(seed).choice(WORDS), 0
        return Said(text=f"One of: {', '.join(WORDS)}")

    def step(self, action: Guess, timeout_s: float | None = None) -> Said:
        self.guesses += 1
        if action.word == "crash":
            raise ValueError("the server fell over")
        if action.word == "silence":
            return Said(text="over", done=True, guesses=self.guesses)
        right = action.word.strip() == self.word
        return Said(
            text="Right." if right else "No.",
            guesses=self.guesses,
            reward=1.0 if right else -0.25,
            done=right or self.guesses == 3,
        )

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--sessions", type=int, default=8)
    given = parser.parse_args()
    app = create_app(Words, Guess, Said, env_name="words", max_concurrent_envs=given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")
