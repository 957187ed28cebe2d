"""Rewards are TextArena's own, for one player and for two; what a player is told goes on where it was."""

import asyncio
import random

import pytest
import textarena

from birl.envs.adapters.package import OwnRandom
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits, Session
from birl.types import Outcome, SamplingParams
from tests.envs.adapters.play import Script, mistake, play, task, without, world
from tests.rollout.scripted import CHAT, Scripted


def secret(seed: int) -> int:
    env = textarena.make("GuessTheNumber-v0-raw")
    with OwnRandom(seed):
        env.reset(num_players=1, seed=seed)
    return env.game_number


def test_rewards_are_the_packages() -> None:
    made = world("textarena")
    assert made.rows is not None
    for row in made.rows("train")[:3]:
        number = secret(row["seed"])
        wrong = number % 20 + 1
        first, found = play(made, row, f"[{wrong}]", f"[{number}]")
        assert first.startswith("You are Player 0. You are playing Guess The Number.")
        hint = "lower" if wrong > number else "higher"
        assert found[0].messages[0].content == f"The target number is {hint}." and not found[0].done
        assert (found[1].reward, found[1].done) == (1.0, True)
        own = textarena.make("GuessTheNumber-v0-raw")
        with OwnRandom(row["seed"]):
            own.reset(num_players=1, seed=row["seed"])
        done = [own.step(text)[0] for text in (f"[{wrong}]", "no", "no")]
        _, found = play(made, row, f"[{wrong}]", "no", "no")
        assert [f.done for f in found] == done == [False, False, True]
        assert found[-1].reward == own.close()[0][0] < 1.0


def test_games_are_reproducible_and_leave_the_global_generator_alone() -> None:
    made = world("textarena", id="FrozenLake-v0-random")
    random.seed(3)
    before = random.getstate()
    first = play(made, {"prompt": "x", "seed": 5}, "[up]", "[right]")
    assert random.getstate() == before
    assert first == play(made, {"prompt": "x", "seed": 5}, "[up]", "[right]")
    assert first != play(made, {"prompt": "x", "seed": 6}, "[up]", "[right]")


def test_two_players_have_rewards_of_their_own() -> None:
    made = world("textarena_self_play", id="TicTacToe-v0")
    script = Script(player_0=["[0]", "[1]", "[2]"], player_1=["[4]", "[5]"])
    found = asyncio.run(made.open(task({"prompt": "x", "seed": 1})).run(script))  # pyright: ignore
    assert found == {"player_0": 1.0, "player_1": -1.0} and made.agent
    others = [m.content for m in script.said["player_1"] if m.role == "user"]
    assert "[Player 0] [0]" in others[0] and all("[Player 1]" not in text for text in others)


def test_an_invalid_move_loses() -> None:
    made = world("textarena_self_play", id="TicTacToe-v0")
    script = Script(player_0=["[0]", "no", "no"], player_1=["[4]"])
    found = asyncio.run(made.open(task({"prompt": "x", "seed": 1})).run(script))  # pyright: ignore
    assert found == {"player_0": -1.0, "player_1": 1.0}
    assert "attempted an invalid move" in script.said["player_0"][-2].content


@pytest.mark.parametrize("turns", [1, 3])
def test_a_game_that_is_cut_is_a_draw(turns: int) -> None:
    lines = iter(["[0]", "[4]", "[1]"])
    limits = Limits(turns=turns)
    session = Session(Scripted(lambda _: next(lines)), CHAT, SamplingParams(max_tokens=20), limits, lambda turn: turn)
    game = world("textarena_self_play", id="TicTacToe-v0").open(task({"prompt": "x", "seed": 1}))
    found = asyncio.run(run_episode(game, session))
    assert (found.outcome, found.reward, len(found.turns)) == (Outcome.TRUNCATED, 0.0, turns), found.detail
    assert found.rewards == dict.fromkeys(["player_0", "player_1"][:turns], 0.0) and "env.max_turns" in found.detail


def test_a_game_without_a_first_answer_has_no_reward() -> None:
    session = Session(Scripted([]), CHAT, SamplingParams(max_tokens=20), Limits(tokens=4), lambda turn: turn)
    game = world("textarena_self_play", id="TicTacToe-v0").open(task({"prompt": "x", "seed": 1}))
    found = asyncio.run(run_episode(game, session))
    assert found.outcome is Outcome.ENV_ERROR and "leaves no room" in found.detail


@pytest.mark.parametrize("id", ["KuhnPoker-v0-short", "Nim-v0", "IteratedPrisonersDilemma-v0", "Briscola-v0"])
def test_many_games_of_two_can_be_opened(id: str) -> None:
    assert world("textarena_self_play", id=id).agent


def test_mistakes_are_told() -> None:
    assert "Did you mean GuessTheNumber-v0" in mistake("textarena", id="GuessNumber-v0")
    assert "has to be 1, received 2" in mistake("textarena_self_play", id="GuessTheNumber-v0")
    assert "env=textarena_self_play env.players=2" in mistake("textarena", id="TicTacToe-v0")
    assert "OpenRouter API key not found" in mistake("textarena", id="GuessWho-v0")
    assert "pip install 'birl[textarena]'" in without("textarena", "textarena")
