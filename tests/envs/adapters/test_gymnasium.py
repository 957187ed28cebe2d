"""What the model sees, what counts as an action, and Gymnasium's own rewards."""

import asyncio
import sys
from pathlib import Path

import gymnasium
import pytest

from birl.rollout.episode import run_episode
from birl.rollout.session import Limits
from birl.types import Outcome
from tests.envs.adapters.play import mistake, play, task, without, world
from tests.rollout.scripted import Scripted, session

FROZEN = {"id": "FrozenLake-v1", "parameters": ["is_slippery=false"]}
NAMES = ["left", "down", "right", "up"]
WAY = ["down", "down", "right", "right", "down", "right"]

TOY = '''
import io
import gymnasium
from gymnasium.spaces import Text

class Echo(gymnasium.Env):
    """Say the word backwards; two attempts."""
    observation_space, action_space = Text(20), Text(20)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.left = "".join(self.np_random.choice(list("abcd"), 4)), 2
        return self.word, {}
    def step(self, action):
        self.left -= 1
        right = action == self.word[::-1]
        return self.word, float(right), right, self.left == 0, {}
    closed = 0
    def close(self):
        Echo.closed += 1

class Odd(Echo):
    """Many choices, and an observation with names of other alphabets; drawn into a file."""
    metadata = {"render_modes": ["ansi"]}
    action_space = gymnasium.spaces.Discrete(10**6, start=-5)
    observation_space = gymnasium.spaces.Dict({"name": Text(20)})
    def __init__(self, render_mode=None): self.render_mode = render_mode
    def reset(self, seed=None, options=None): return {"name": "größe 漢"}, {}
    def render(self): return io.StringIO("board")

gymnasium.register("Echo-v0", Echo)
gymnasium.register("Odd-v0", Odd)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "echo_toy:Echo-v0"


def row(seed: int) -> dict[str, object]:
    return {"prompt": "x", "seed": seed}


def test_a_lake_is_crossed() -> None:
    made = world("gymnasium", **FROZEN, actions=NAMES)
    first, found = play(made, row(0), *WAY)
    assert first == "[S]FFF\nFHFH\nFFFH\nHFFG\nAnswer with one of: left, down, right, up."
    assert "SFFF\n[F]HFH" in found[0].messages[0].content
    assert [f.reward for f in found] == [0, 0, 0, 0, 0, 1] and [f.done for f in found] == [False] * 5 + [True]
    assert play(made, row(0), "down", "right")[1][-1].done  # a hole


@pytest.mark.parametrize(("id", "parameters"), [("Taxi-v4", []), ("Blackjack-v1", ["sab=true"]), ("FrozenLake-v1", [])])
def test_rewards_are_the_packages_and_seeds_are_kept(id: str, parameters: list[str]) -> None:
    made = world("gymnasium", id=id, parameters=parameters)
    for seed in range(3):
        own = gymnasium.make(id, **{"sab": True} if parameters else {})
        own.reset(seed=seed)
        expected = []
        while len(expected) < 5 and not (expected and expected[-1][1]):
            _, reward, terminated, truncated, _ = own.step(1)
            expected.append((reward, terminated or truncated))
        played = [play(made, row(seed), *["1"] * len(expected)) for _ in range(2)]
        assert [(f.reward, f.done) for f in played[0][1]] == expected
        assert played[0] == played[1]


def test_a_time_limit_truncates_and_an_end_of_the_task_does_not() -> None:
    made = world("gymnasium", id="FrozenLake-v1", parameters=["is_slippery=false", "max_episode_steps=2"])
    for way, cut in (("11", True), ("12", False)):  # on the ice; a hole, at the limit
        last = play(made, row(0), *way)[1][-1]
        assert (last.done, last.truncated) == (True, cut)
    found = asyncio.run(run_episode(made.open(task(row(0))), session(Scripted(["1", "1", "1"]), Limits(turns=5))))
    assert (found.outcome, len(found.turns)) == (Outcome.TRUNCATED, 2)


def test_names_of_actions_are_read_as_replies_are() -> None:
    """A name with a full stop or blanks could not be said."""
    made = world("gymnasium", **FROZEN, actions=["Left.", " down", "right", "UP"])
    assert [f.info for f in play(made, row(0), "left", "Down.", "up.")[1]] == [{"invalid": 0.0}] * 3


def test_blackjack_is_told_as_a_value() -> None:
    own = gymnasium.make("Blackjack-v1")
    (player, dealer, ace), _ = own.reset(seed=3)
    first, _ = play(world("gymnasium", id="Blackjack-v1", actions=["stick", "hit"]), row(3))
    assert first == f"[{player}, {dealer}, {ace}]\nAnswer with one of: stick, hit."


def test_the_passenger_of_a_taxi_can_be_seen() -> None:
    first, _ = play(world("gymnasium", id="Taxi-v4"), row(3))
    assert "(" in first and "{" in first and "[ ]" in first and "\x1b" not in first


@pytest.mark.parametrize("text", ["4", "-1", "I go 1", "", "one", "99999999999999999999"])
def test_a_reply_that_is_no_action_moves_nothing(text: str) -> None:
    made = world("gymnasium", **FROZEN, invalid_reward="-0.5")
    _, found = play(made, row(0), text, "1.")
    assert (found[0].reward, found[0].done, found[0].info) == (-0.5, False, {"invalid": 1.0})
    assert found[0].messages[0].content == "That is no action. Answer with one of: 0, 1, 2, 3."
    assert found[1].info == {"invalid": 0.0} and "[F]HFH" in found[1].messages[0].content


def test_odd_spaces(toy: str) -> None:
    """A million choices were listed, letters escaped, and a drawing in a StringIO, which Gymnasium allows, an error."""
    id = toy.replace("Echo", "Odd")
    many = "Answer with a number from -5 to 999994."
    assert play(world("gymnasium", id=id), row(0))[0] == f"board\n{many}"
    assert play(world("gymnasium", id=id, see="value"), row(0))[0] == f'{{"name": "größe 漢"}}\n{many}'


def test_text_in_and_text_out(toy: str) -> None:
    made = world("gymnasium", id=toy, instructions="Say it backwards.")
    told, word = play(made, row(1))[0].split("\n")
    assert told == "Say it backwards." and word == play(made, row(1))[0].split("\n")[1]
    before = sys.modules["echo_toy"].Echo.closed
    _, found = play(made, row(1), "a b", word, word[::-1])
    assert [(f.reward, f.done) for f in found] == [(0.0, False), (0.0, False), (1.0, True)]
    assert sys.modules["echo_toy"].Echo.closed == before + 1


def test_mistakes_are_told(toy: str) -> None:
    assert "Did you mean FrozenLake-v1" in mistake("gymnasium", id="FrozenLak-v1")
    assert "provides versioned environments" in mistake("gymnasium", id="FrozenLake-v7")
    assert "No module named 'nowhere'" in mistake("gymnasium", id="nowhere:Echo-v0")
    assert "neither text nor a few choices" in mistake("gymnasium", id="MountainCarContinuous-v0")
    assert "unexpected keyword argument 'x'" in mistake("gymnasium", parameters=["x=3"])
    for names in (["a", "b"], [*NAMES, "up"], ["a", "b", "c", "A."]):
        assert "has the actions Discrete(4), each once" in mistake("gymnasium", actions=names)
    assert "must be auto | value." in mistake("gymnasium", id=toy, see="ansi")
    assert "pip install 'birl[gymnasium]'" in without("gymnasium", "gymnasium")
