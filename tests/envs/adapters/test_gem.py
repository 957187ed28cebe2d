"""Rewards are GEM's own, games are reproducible, and a game that is left alone holds up nobody."""

import asyncio
import random

import numpy as np
import pytest

from birl.envs.calls import called
from birl.errors import BirlError
from tests.envs.adapters.play import installed, mistake, opened, play, reply, task, told, without, world

gem = installed("gem")
EASY = "game:GuessTheNumber-v0-easy"


def guess(number: int) -> str:
    return f"\\boxed{{{number}}}"


def secret(seed: int) -> int:
    env = gem.make(EASY)
    env.reset(seed=seed)
    return env.game_number


def test_rewards_are_gems() -> None:
    made = world("gem", task=EASY)
    assert made.rows is not None
    for row in made.rows("train")[:4]:
        number = secret(row["seed"])
        own = gem.make(EASY)
        own.reset(seed=row["seed"])
        wrong = number % 10 + 1
        expected = [own.step(guess(n)) for n in (wrong, 99, number)]
        first, found = play(made, row, guess(wrong), guess(99), guess(number))
        assert [f.reward for f in found] == [e[1] for e in expected] and found[-1].reward == 1.0
        assert [f.done for f in found] == [False, False, True]
        assert all(e[0] in f.messages[0].content for e, f in zip(expected, found, strict=True))
        assert first.endswith("Enter your next guess.")
        assert play(made, row, "no guess")[1][0].reward == own.step("no guess")[1] < 0


def test_games_are_reproducible_when_others_are_played_meanwhile() -> None:
    """Mines are laid at the first move, from the global generator."""
    made = world("gem", task="game:Minesweeper-v0-easy")

    async def several(seeds: list[int]) -> list[str]:
        row = {"prompt": "x"}
        played = [told(made.open(task({**row, "seed": s})), ["\\boxed{reveal 0 0}"]) for s in seeds]
        return [found[0].messages[0].content for _, found in await asyncio.gather(*played)]

    alone = [asyncio.run(several([s]))[0] for s in (1, 2, 3, 4)]
    assert asyncio.run(several([1, 2, 3, 4, 1, 2, 3, 4])) == alone * 2


def test_the_global_generators_stay_as_they_are() -> None:
    made = world("gem", task=EASY)
    random.seed(3)
    np.random.seed(3)
    expected = random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore
    play(made, {"prompt": "x", "seed": 7}, guess(1), guess(2))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected  # pyright: ignore


def test_unfinished_games_hold_up_nobody() -> None:
    """RL2's adapter has 16 environments, each locked until its game is over: a limit of turns locks them for good."""
    made = world("gem", task=EASY)

    async def many() -> int:
        left = [opened(made, {"prompt": "x", "seed": i}) for i in range(100)]
        for env in left:
            await called(env.start)
            await called(env.step, reply(guess(99)))
        return len(left)

    assert asyncio.run(asyncio.wait_for(many(), 20)) == 100
    assert play(made, {"prompt": "x", "seed": 1}, guess(secret(1)))[1][0].reward == 1.0


def test_it_is_closed() -> None:
    made = world("gem", task=EASY)
    env = opened(made, {"prompt": "x", "seed": 1})
    asyncio.run(called(env.start))
    closed = []
    env.env.close = lambda: closed.append(True)
    asyncio.run(called(env.close))
    assert closed == [True]


def test_mistakes_are_told() -> None:
    assert f"Did you mean {EASY}" in mistake("gem", task="game:GuessTheNumber-v0-eazy")
    assert "pip install 'birl[gem]' && pip install --no-deps gem-llm" in without("gem", "gem")
    with pytest.raises(BirlError, match="column `seed` must be a whole number"):
        world("gem").open(task({"prompt": "x"}))
