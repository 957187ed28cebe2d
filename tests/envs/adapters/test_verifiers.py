"""verifiers' environments run their own rollouts; rewards are those of their rubrics."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf

from birl.errors import TooLong
from birl.types import Message, ToolCall
from tests.envs.adapters.play import Script, mistake, task, without, world

ENVS = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, 6)]

def right(completion, answer, **kwargs):
    return float(completion[-1]["content"].strip() == answer)

async def short(completion):
    return 1 / len(completion[-1]["content"])

def broken(completion):
    raise KeyError("judge")

def nothing(completion):
    return None

def whole(state):
    return float(not state["is_truncated"])

class Tidy(vf.Rubric):
    tidied = 0
    @vf.cleanup
    async def tidy(self, state):
        Tidy.tidied += 1

def together(completions, **kwargs):
    return [1.0] * len(completions)

async def double(x: int) -> int:
    """Twice a number.

    Args:
        x: the number
    """
    if x < 0:
        raise ValueError("negative")
    return 2 * x

class Again(vf.MultiTurnEnv):
    closed = 0
    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == "crash":
            raise RuntimeError("the world fell over")
        return [{"role": "user", "content": "Again."}]
    @vf.cleanup
    async def count(self, state):
        Again.closed += 1

def load_environment(kind="single", reward="right", answers=True, weight=1.0):
    rows = Dataset.from_list(ROWS if answers else [{**row, "answer": ""} for row in ROWS])
    rubric = Tidy(funcs=[globals()[reward], short], weights=[weight, 0.5])
    given = {"dataset": rows, "eval_dataset": rows.select([4]), "rubric": rubric, "system_prompt": "Be short."}
    if kind == "group":
        return vf.EnvGroup([vf.SingleTurnEnv(**given), vf.SingleTurnEnv(**given)])
    if kind == "tools":
        return vf.ToolEnv(tools=[double], max_turns=3, **given)
    return vf.SingleTurnEnv(**given) if kind == "single" else Again(max_turns=3, **given)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs.py").write_text(ENVS)
    return tmp_path


def opened(*parameters: str) -> Any:
    return world("verifiers", task="envs.py", parameters=list(parameters))


def run(made: Any, number: int, *lines: Any) -> tuple[float, Script]:
    script = Script(model=list(lines))
    return asyncio.run(made.open(task(made.rows("train")[number])).run(script)), script


def test_rewards_are_the_rubrics(folder: Path) -> None:
    made = opened()
    assert [row["answer"] for row in made.rows("train")] == ["2", "4", "6", "8", "10"]
    assert [row["answer"] for row in made.rows("validation")] == ["10"]
    (row, *_) = opened("answers=false").rows("train")
    assert "answer" not in row  # an empty one would be refused, as if it were checked against
    good, script = run(made, 1, "4")
    bad, _ = run(made, 1, "five")
    assert (good, bad) == (1.0 + 0.5, 0.5 / 4)
    agent = made.open(task(made.rows("train")[1]))
    asyncio.run(agent.run(Script(model=["4"])))
    assert agent.info == {"right": 1.0, "short": 1.0, "num_turns": 1.0}
    assert [(m.role, m.content) for m in script.said[""][:2]] == [("system", "Be short."), ("user", "What is 2 + 2?")]


def test_several_turns_and_what_is_cut(folder: Path) -> None:
    made = opened("kind=turns")
    closed = made.shared.env.closed
    reward, script = run(made, 0, "1", "22", "2")
    assert reward == 1.5 and len(script.said[""]) == 7
    assert run(made, 0, "1", "2", TooLong("no turn is left"))[0] == 1.5  # what there is, is scored
    with pytest.raises(RuntimeError, match="the world fell over"):
        run(made, 0, "crash", "2")
    assert made.shared.env.closed == closed + 3


def test_tools_are_called(folder: Path) -> None:
    made = opened("kind=tools")
    call = Message(
        role="assistant", content="", tool_calls=(ToolCall(name="double", arguments='{"x": 3}', id="call_0"),)
    )
    reward, script = run(made, 2, call, "6")
    assert reward == 1.5
    assert script.tools[0]["function"]["parameters"]["properties"]["x"]["type"] == "integer"
    answer = script.said[""][3]
    assert (answer.role, answer.content, answer.name) == ("tool", "6", "double")


@pytest.mark.parametrize("kind", ["single", "group"])
@pytest.mark.parametrize("reward", ["broken", "nothing"])
def test_a_reward_function_that_fails_gives_no_reward(folder: Path, reward: str, kind: str) -> None:
    """verifiers itself logs the failure and takes 0, in a group of environments, too."""
    made = opened(f"reward={reward}", f"kind={kind}")
    with pytest.raises((KeyError, TypeError)):
        run(made, 0, "2")


def test_a_metric_that_fails_costs_nothing(folder: Path) -> None:
    """It has no weight in the reward."""
    assert run(opened("reward=broken", "weight=0.0"), 0, "2")[0] == 0.5


def test_a_rubric_knows_what_was_cut(folder: Path) -> None:
    made = opened("reward=whole")
    assert [run(made, 0, text)[0] for text in ("12345678", "12345...")] == [1 + 0.5 / 8, 0.5 / 8]
    with pytest.raises(vf.Error):
        run(made, 0, vf.Error("the sandbox is gone"))
    assert made.shared.env.rubric.rubrics[0].tidied == 3


def test_a_failure_of_the_model_is_passed_on(folder: Path) -> None:
    with pytest.raises(ConnectionError, match="engine"):
        run(opened(), 0, ConnectionError("engine"))


def test_signals_stay_as_they_are(folder: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=opened)
    opened()
    thread.start()
    thread.join()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_installed_environment_is_found_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "my_sums.py").write_text(ENVS)
    made = world("verifiers", task="my-sums")
    assert isinstance(made.shared.env, vf.SingleTurnEnv) and run(made, 0, "2")[0] == 1.5
    assert "Did you mean my_sums" in mistake("verifiers", task="my-sumz")


def test_mistakes_are_told(folder: Path) -> None:
    (folder / "other.py").write_text("")
    assert "needs env.task" in mistake("verifiers")
    assert "there is no such file" in mistake("verifiers", task="nowhere.py")
    assert "no function load_environment" in mistake("verifiers", task="other.py")
    for kind in ("single", "group"):
        words = ["reward=together", f"kind={kind}"]
        assert "scores groups" in mistake("verifiers", task="envs.py", parameters=words)
    assert "unexpected keyword argument 'x'" in mistake("verifiers", task="envs.py", parameters=["x=1"])
    assert "pip install 'birl[verifiers]'" in without("verifiers", "verifiers")
