"""A Gymnasium environment with text observations and actions, and the command that trains a model in it.

birl rl env=gymnasium env.id=examples/gym_text.py:Backwards-v0 env.max_turns=3 model.max_length=512
"""

import string

import gymnasium
from gymnasium.spaces import Text

LETTERS = "abcdefgh"


class Backwards(gymnasium.Env):
    """Say a word backwards. Three attempts; each letter at its place gives a part of the reward."""

    observation_space = Text(200, charset=string.printable)
    action_space = Text(50, charset=string.printable)

    def __init__(self, length: int = 3):
        self.length = length

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list(LETTERS), self.length))
        self.left = 3
        return f"Write {self.word} backwards. Only the word.", {}

    def step(self, action):
        self.left -= 1
        gold = self.word[::-1]
        right = sum(a == b for a, b in zip(action.strip(), gold, strict=False)) / len(gold)
        solved = action.strip() == gold
        seen = f"{right:.0%} of the letters stand right. Try again."
        reward = 1.0 if solved else right / 2 if self.left == 0 else 0.0
        return seen, reward, solved, self.left == 0, {}


gymnasium.register("Backwards-v0", Backwards)
