"""The episodes of a simulation, drawn once: all splits and all values of max_staleness get the same ones."""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from birl.plan.scenario import Episodes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BLOCK = 1024  # groups that are drawn together, so that group i does not depend on how many are drawn


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive groups. `tokens` [groups, episodes, turns]: tokens of answers, 0 after the last turn; `wait` [as
    tokens]: seconds after the turn; `reward` [groups, episodes]: seconds from the last token to the reward."""

    tokens: NDArray[np.int32]
    wait: NDArray[np.float32]
    reward: NDArray[np.float32]


@dataclass(slots=True)
class Draws:
    episodes: Episodes
    group_size: int
    seed: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)

    def block(self, number: int) -> Block:
        if number not in self.blocks:
            self.blocks[number] = self._draw(np.random.default_rng([self.seed, number]))
        return self.blocks[number]

    def groups(self, numbers: Ints) -> Block:
        """The groups with these numbers, from 0."""
        blocks, within = np.divmod(numbers, BLOCK)
        if not len(numbers):
            blocks, within = np.zeros(1, np.int64), np.zeros(0, np.int64)
        parts = {int(b): self.block(int(b)) for b in np.unique(blocks)}
        if len(parts) == 1:
            (only,) = parts.values()
            return Block(tokens=only.tokens[within], wait=only.wait[within], reward=only.reward[within])
        place = np.searchsorted(np.array(list(parts)), blocks) * BLOCK + within
        tokens, wait, reward = (
            np.concatenate([getattr(p, name) for p in parts.values()])[place] for name in ("tokens", "wait", "reward")
        )
        return Block(tokens=tokens, wait=wait, reward=reward)

    def _draw(self, random: np.random.Generator) -> Block:
        its, low, high = self.episodes, *self.episodes.turns
        shape = (BLOCK, self.group_size, int(high))
        turns = random.integers(int(low), int(high) + 1, shape[:2])
        live = np.arange(shape[2]) < turns[:, :, None]
        tokens = self._lengths(random, shape) * live
        # there is no wait for an environment after the last turn
        wait = random.uniform(*its.wait, shape) * (np.arange(shape[2]) < turns[:, :, None] - 1)
        reward = random.uniform(*its.reward, shape[:2])
        return Block(tokens=tokens.astype(np.int32), wait=wait.astype(np.float32), reward=reward.astype(np.float32))

    def _lengths(self, random: np.random.Generator, shape: tuple[int, ...]) -> Ints:
        its = self.episodes
        if its.tokens:
            sizes = np.array([len(row) for row in its.tokens])
            flat = np.concatenate([np.array(row) for row in its.tokens])
            start = np.cumsum(sizes) - sizes
            row = random.integers(0, len(sizes), shape[0])
            if sizes.max() == 1:  # a flat list: every answer is drawn independently
                row = random.integers(0, len(sizes), shape)
                return flat[row]
            within = (random.random(shape) * sizes[row][:, None, None]).astype(np.int64)
            return flat[start[row][:, None, None] + within]
        if its.sigma == 0:
            return np.full(shape, min(round(its.mean), its.max) or 1)
        drawn = random.lognormal(math.log(its.mean) - its.sigma**2 / 2, its.sigma, shape)
        return np.clip(np.rint(drawn), 1, its.max).astype(np.int64)
