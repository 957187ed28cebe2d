"""What a name stands for, and what is told where it stands for nothing that can be used."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from birl.config.schema import Env as Keys
from birl.envs.functions import StepFunction
from birl.envs.open import check_world, open_world
from birl.envs.single_turn import SingleTurn
from birl.errors import BirlError
from birl.types import Message, Task

WORLD = """
from dataclasses import dataclass, field
from typing import Annotated, Literal
from pydantic import Field

class Shared:
    closed = False
    def close(self):
        self.closed = True

class Full:
    @dataclass
    class Config:
        low: int = 1
        '''Least number [apples].'''
        names: list[str] = field(default_factory=list)
        strict: bool = False
    @staticmethod
    def tasks(config, split):
        return [{"prompt": f"{split} {config.low}", "answer": "1"}]
    @classmethod
    def shared(cls, config):
        return Shared()
    def __init__(self, task, config, shared):
        self.task, self.config, self.shared = task, config, shared
    def start(self): return "x"
    def step(self, reply): return None
    def close(self): pass

class Bare:
    def __init__(self, task): self.task = task
    async def run(self, model): return 1.0
    async def close(self): pass

class Demanding(Bare):
    def __init__(self, task, database): pass

class Plain(Bare):
    class Config:
        low: int = 1

class Undecided(Bare):
    @dataclass
    class Config:
        low: int

class Untyped(Bare):
    @dataclass
    class Config:
        low: object = 1

class Ranged(Bare):
    @dataclass
    class Config:
        low: Annotated[int, Field(ge=1)] = 1
        pace: Literal["fast", "slow"] = "fast"

class Uncalled(Bare):
    @dataclass
    class Config:
        low: "Unknown" = 1

class Checked(Bare):
    @dataclass
    class Config:
        low: int = 1
        error: str = "ValueError"
        def __post_init__(self):
            if self.low > 5:
                raise {"ValueError": ValueError, "KeyError": KeyError}[self.error]("low is above 5")

class Leaves(Bare):
    @staticmethod
    def tasks(config, split):
        raise SystemExit(0)

class Nothing: pass
class Resets(Nothing):
    def reset(self, **row): return "Hi"
    def step(self, reply): return None

def step(state, action, extra_info, *, bonus=0.5): return {"reward": bonus, "done": True}
def agent(task, base_url, *, tries=3): return tries
def strange(task, weather): return 1.0
def unready(task, *, key): return 1.0
"""

TASK = Task(id="t", prompt=(Message(role="user", content="Hi"),), columns={"extra_info": {"a": 1}})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(WORLD)

    def made(name: str, **options: Any) -> Any:
        return asyncio.run(open_world(Keys(kind=name, options=options), lambda prompt: "<text>"))

    return made


def test_a_class_has_its_own_typed_keys_tasks_and_shared_things(world: Any) -> None:
    made = world("world.py:Full", low="7", names="[a,b]", strict="true")
    env = made.open(TASK)
    assert (env.config.low, env.config.names, env.config.strict) == (7, ["a", "b"], True)
    assert env.task is TASK and env.shared is made.open(TASK).shared is made.shared
    assert made.rows("train") == [{"prompt": "train 7", "answer": "1"}] and made.turns
    asyncio.run(made.close())
    assert made.shared.closed


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("world.py:Full", {"lwo": "7"}, r"env\.lwo=7: there is no such key\. Did you mean env\.low\?"),
        ("world.py:Full", {"low": "seven"}, r"env\.low=seven: low takes a whole number .*apples"),
        ("world.py:Full", {"strict": "perhaps", "low": "x"}, r"(?s)strict takes true or false.*low takes"),
        ("world.py:Bare", {"low": "1"}, r"env\.low=1: there is no such key\. It has: none"),
        ("world.py:Nothing", {}, "class Nothing is neither an environment, with the methods start and step, nor"),
        ("world.py:Resets", {}, "it has step alone; what TRL and Gymnasium call reset is start here"),
        ("world.py:Demanding", {}, "asks for 'database'"),
        ("world.py:Fulll", {}, r"has no function Fulll\. Did you mean Full\? It has: "),
        ("wrold.py:Full", {}, r"there is no file wrold\.py in .*\. Did you mean world\.py\?"),
        ("not_a_package:Full", {}, "not_a_package cannot be imported"),
        ("world.py:strange", {}, "its parameter 'weather' cannot be given"),
        ("world.py:unready", {}, "key needs a default"),
        ("world.py:Plain", {}, r"Plain\.Config is no dataclass: put @dataclass above it"),
        ("world.py:Undecided", {}, r"own key low needs a default, in Undecided\.Config"),
        ("world.py:Untyped", {}, r"env\.low: cannot be read from a text\. A key is a number"),
        ("world.py:Uncalled", {}, r"env\.low: cannot be read from a text"),
        ("world.py:Ranged", {"low": "0", "pace": "slwo"}, r"env\.low=0: must be at least 1\.\n.*slwo.*mean slow\?"),
        ("world.py:Checked", {"low": "7"}, r"^env: Checked\.Config refuses its keys: low is above 5$"),
        ("world.py:Checked", {"low": "7", "error": "KeyError"}, r"refuses its keys: 'low is above 5'$"),
        ("single_tern", {}, "Did you mean single_turn"),
    ],
)
def test_mistakes_are_told(world: Any, name: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(BirlError, match=told):
        world(name, **options)


def test_tasks_that_exit_do_not_end_the_run_as_done(world: Any) -> None:
    with pytest.raises(
        BirlError, match=r"env\.kind=world\.py:Leaves: its tasks failed: \S*world\.py:\d+: SystemExit: 0"
    ):
        world("world.py:Leaves").rows("train")


def test_functions(world: Any) -> None:
    stepped = world("world.py:step", bonus="0.25").open(TASK)
    assert isinstance(stepped, StepFunction)
    assert asyncio.run(stepped.start()) == "<text>"
    found = asyncio.run(stepped.step(Message(role="assistant", content="yes")))
    assert (found.reward, found.done, found.score) == (0.25, True, None)
    agent = world("world.py:agent", tries="5")
    assert agent.agent and agent.turns


def test_single_turn_needs_nothing(world: Any) -> None:
    made = world("single_turn")
    assert isinstance(made.open(TASK), SingleTurn) and not made.turns and made.rows is None


def test_checking_opens_nothing(world: Any) -> None:
    check_world(Keys(kind="world.py:Full", options={"low": "3"}))
    with pytest.raises(BirlError, match="no such key"):
        check_world(Keys(kind="world.py:Full", options={"nothing": "3"}))


STEPS = {
    "no dict": "return 1.0",
    "no reward": "return {'done': True}",
    "no next_state": "return {'reward': 0.0, 'done': False}",
    "unknown key": "return {'reward': 0.0, 'done': True, 'finished': 1}",
}


@pytest.mark.parametrize("body", STEPS.values(), ids=STEPS)
def test_a_step_function_that_returns_something_else_is_told(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(f"def step(state, action, extra_info):\n    {body}\n")
    made = asyncio.run(open_world(Keys(kind="own.py:step"), lambda prompt: "x"))
    env = made.open(TASK)
    asyncio.run(env.start())  # pyright: ignore
    with pytest.raises(BirlError, match=r"step (must return|returned)"):
        asyncio.run(env.step(Message(role="assistant", content="yes")))  # pyright: ignore


@pytest.mark.parametrize("kind", ["here/agent_one.py:play", "agent_two:play"])
def test_a_file_imports_what_is_beside_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as in the program `birl`
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for folder, name in ((tmp_path / "here", "one"), (tmp_path, "two")):
        (folder / f"beside_{name}.py").write_text("REWARD = 1.0\n")
        (folder / f"agent_{name}.py").write_text(f"import beside_{name} as b\n\ndef play(task): return b.REWARD\n")
    check_world(Keys(kind=kind))


def test_a_file_named_as_a_package_imports_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """agents.py, which imports the package agents."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place] + [str(tmp_path / "installed")])
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/agent_package.py").write_text("REWARD = 1.0\n")
    file = tmp_path / "agent_package.py"
    file.write_text("from agent_package import REWARD\n\ndef play(task): return REWARD\n")
    check_world(Keys(kind=f"{file}:play"))
