"""Tasksets of verifiers 0.4, as its own documentation and `vf-init` write them. test_verifiers_tasksets.py runs this
file in .venv-verifiers."""

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from birl.config.schema import Env as Keys
from birl.envs.open import World, open_world
from birl.errors import BirlError
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits, Session
from birl.server.gateway import Gateway
from birl.text.chat import Chat
from birl.types import Outcome, SamplingParams, Trajectory
from tests.docs.commands import execute
from tests.docs.pages import ROOT, blocks, commands, scripts
from tests.envs.adapters.play import mistake, task, world
from tests.rollout.scripted import Scripted
from tests.text.test_tools import QWEN
from tests.tiny import tiny_tokenizer
from tests.train.test_environments import run

SUMS = """
import asyncio
import time
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1 / max(1, len(trace.last_reply))

    @vf.metric
    async def letters(self, trace) -> float:
        return len(trace.last_reply)

class SumConfig(vf.TasksetConfig):
    most: int = 4
    split: str = "train"

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        first = 50 if self.config.split == "test" else 1
        for i in range(first, first + self.config.most):
            data = SumData(prompt=f"What is {i} + {i}?", system_prompt="Be short.", answer=str(2 * i))
            yield SumTask(data, self.config.task)

__all__ = ["SumTaskset"]
"""
#: what goes wrong in the reward function `right`, by file
WRONG = {
    "raising": 'raise KeyError("judge")',
    "waiting": "await asyncio.sleep(1000)",
    "sleeping": "time.sleep(1000)",
    "nothing": "return None",
}
RIGHT = "return float(trace.last_reply == self.data.answer)"

TOOLS = '''
import verifiers.v1 as vf

class DoubleToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def double(self, x: int) -> str:
        """Twice a number."""
        return str(2 * x)

class SumTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == "6")

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [DoubleToolset(vf.ToolsetConfig())]

    def load(self):
        return [SumTask(vf.TaskData(prompt=f"What is 3 + 3? {i}")) for i in range(4)]

__all__ = ["SumTaskset"]

if __name__ == "__main__":
    DoubleToolset.run()
'''

#: the same server for each episode of its own
OWN_TOOLS = TOOLS.replace("class SumTaskset", "class Unused").replace(
    "__all__",
    """class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    load = Unused.load

SumTask.toolsets = classmethod(lambda cls, config: [DoubleToolset(vf.ToolsetConfig())])

__all__""",
)

#: two that are trained, each with a reward of its own
DUEL = """
import verifiers.v1 as vf

class DuelConfig(vf.EnvConfig):
    white: vf.AgentConfig = vf.AgentConfig()
    black: vf.AgentConfig = vf.AgentConfig()

class DuelEnv(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        await agents.white.run(task)
        await agents.black.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("won", 1.0 if trace.agent.name == "black" else -1.0)
            trace.record_metric("letters", len(trace.last_reply))

class DuelTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="Say a word."))]

__all__ = ["DuelTaskset", "DuelEnv"]
"""

#: an environment that is the user, turn by turn
AGAIN = """
import verifiers.v1 as vf

class AgainTask(vf.Task[vf.TaskData]):
    pass

class AgainConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class AgainEnv(vf.Env[AgainConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            said = []
            while not segment.terminated and len(said) < 3:
                said.append(segment.last_reply)
                if len(said) < 3:
                    segment = await talk.turn("Again.")
        talk.trace.record_reward("letters", sum(map(len, said)) / 30)

class AgainTaskset(vf.Taskset[AgainTask, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        i = 0
        while True:
            yield AgainTask(vf.TaskData(prompt=f"Say a word, {i}."))
            i += 1

__all__ = ["AgainTaskset", "AgainEnv"]
"""
BOX = SUMS.replace('system_prompt="Be short."', 'image="python:3.12"')
OLD = (
    "import verifiers as vf\n\nclass Again(vf.MultiTurnEnv):\n    pass\n\ndef load_environment():\n    return Again()\n"
)
FILES = {
    "sums4": SUMS,
    "tools4": TOOLS,
    "own_tools4": OWN_TOOLS,
    "duel4": DUEL,
    "again4": AGAIN,
    "program4": SUMS.replace("(self, trace)", "(self, trace, runtime)").replace(
        RIGHT, 'await runtime.run_uv_script("print(1)")'
    ),
    "box4": BOX,
    "old4": OLD,
    "needy4": "import not_there_at_all\n",
    "empty4": "",
    **{f"{name}4": SUMS.replace(RIGHT, text) for name, text in WRONG.items()},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """verifiers imports each file once: they are the same for all tests."""
    result = tmp_path_factory.mktemp("tasksets")
    for name, text in FILES.items():
        (result / f"{name}.py").write_text(text)
    return result


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("birl.envs.adapters.verifiers_tasksets.which", lambda name: None)  # no uv


def rows(made: World, split: str = "train") -> list[dict[str, Any]]:
    assert made.rows is not None
    result = made.rows(split)
    assert isinstance(result, list)
    return result


def play(
    name: str, lines: list[str], timeout: float = 60.0, user: list[str] | None = None, **keys: Any
) -> tuple[Trajectory, list[str]]:
    """One episode of the first task, and the prompts that the model saw. `user`: what another model says, whose address
    the role user has."""

    async def main() -> tuple[Trajectory, list[str]]:
        chat = Chat(tiny_tokenizer(template=QWEN))
        engine, gateway = Scripted(lines, chat), Gateway(chat)
        await gateway.start()
        params = SamplingParams(max_tokens=90, temperature=1.0)
        session, other = (
            Session(model, chat, params, Limits(timeout=timeout), lambda turn: turn, gateway=gateway)
            for model in (engine, Scripted(user or [], chat))
        )
        if user:
            keys["parameters"] += [
                "user.client.type=eval",
                f"user.client.base_url={other.base_url}",
                "user.model=other",
            ]
        made = await open_world(Keys(kind="verifiers", options={"task": f"{name}.py", **keys}), str)
        try:
            told = await run_episode(made.open(task(rows(made)[0])), session)
        finally:
            await made.close()
            await gateway.close()
        return told, [chat.decode(prompt) for prompt in engine.prompts]

    return asyncio.run(main())


def test_rows_are_the_tasks() -> None:
    made = world("verifiers", task="sums4.py", parameters=["taskset.most=3"], validation=["taskset.split=test"])
    assert [row["answer"] for row in rows(made)] == ["2", "4", "6"]
    assert [row["answer"] for row in rows(made, "validation")] == ["100", "102", "104"]
    assert rows(made)[0]["prompt"] == "What is 1 + 1?"
    made = world("verifiers", task="sums4.py", rows="3")
    assert [len(rows(made, split)) for split in ("train", "validation")] == [3, 1]  # those behind
    assert not rows(world("verifiers", task="sums4.py"), "validation")


def test_an_installed_taskset_is_found_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    assert len(rows(world("verifiers", task="own-tools4"))) == 4


def test_the_reward_is_the_traces() -> None:
    told, (prompt,) = play("sums4", ["2"])
    assert (told.outcome, told.reward, told.parts) == (Outcome.OK, 1.5, {"right": 1.0, "short": 1.0, "letters": 1.0})
    assert "Be short." in prompt and "What is 1 + 1?" in prompt
    told, _ = play("sums4", ["five"])
    assert told.reward == 0.5 / 4 and told.parts["letters"] == 4


@pytest.mark.parametrize("name", ["tools4", "own_tools4"])
def test_tools_are_called(name: str) -> None:
    call = '<tool_call>\n{"name": "sums_double", "arguments": {"x": 3}}\n</tool_call>'
    told, (first, second) = play(name, [call, "6"])
    assert (told.outcome, told.reward, len(told.turns)) == (Outcome.OK, 1.0, 2), told.detail
    assert "Twice a number." in first and second.startswith(first + call) and "6" in second[len(first + call) :]


def test_each_role_has_its_reward() -> None:
    told, _ = play("duel4", ["one", "three"])
    assert told.outcome is Outcome.OK and told.rewards == {"white": -1.0, "black": 1.0}, told.detail
    assert [turn.agent for turn in told.turns] == ["white", "black"]
    assert told.parts["black/letters"] == 5 and told.parts["white/won"] == -1


def test_each_run_of_a_role_has_its_reward() -> None:
    told, _ = play("sums4", ["2", "five"], parameters=["id=best-of-n", "n=2"])
    assert told.rewards == {"agent": 1.5, "agent_2": 0.125} and told.outcome is Outcome.OK, told.detail
    assert [turn.agent for turn in told.turns] == ["agent", "agent_2"]


def test_an_environment_may_be_the_user() -> None:
    told, prompts = play("again4", ["ab", "cd", "e"], rows="2")
    assert told.outcome is Outcome.OK and math.isclose(told.reward, 5 / 30), told.detail
    assert len(prompts) == 3 and prompts[2].startswith(prompts[1]) and prompts[2].count("Again.") == 2


def test_a_simulated_user_is_not_trained() -> None:
    lines = ["What is it?", "2", "###DONE###"]
    told, prompts = play("sums4", lines, parameters=["id=user-sim"])
    assert told.outcome is Outcome.OK, told.detail
    assert len(prompts) == 3 and "What is 1 + 1?" in prompts[0] and "What is 1 + 1?" not in prompts[1]
    assert [turn.agent for turn in told.turns] == ["assistant"] and told.rewards == {"assistant": 1.5}
    assert told.parts["user_turns"] == 2
    told, prompts = play("sums4", ["2"], user=["What is it?", "###DONE###"], parameters=["id=user-sim"])
    assert (told.outcome, told.rewards, len(prompts)) == (Outcome.OK, {"assistant": 1.5}, 1), told.detail


def test_what_is_cut_is_scored() -> None:
    told, _ = play("sums4", ["2" * 200])
    assert told.outcome is Outcome.TRUNCATED and math.isclose(told.reward, 0.5 / 89, rel_tol=0.05)


def test_a_limit_of_turns_truncates() -> None:
    """As Gymnasium's time limit does."""
    call = '<tool_call>\n{"name": "sums_double", "arguments": {"x": 3}}\n</tool_call>'
    told, _ = play("tools4", [call, "6"], parameters=["agent.max_turns=1"])
    assert (told.outcome, told.reward, len(told.turns)) == (Outcome.TRUNCATED, 0.0, 1), told.detail


@pytest.mark.parametrize(
    ("name", "keys", "outcome", "detail"),
    [
        ("raising4", {}, Outcome.ENV_ERROR, "raising4.py:12: TaskError: task SumTask scoring: KeyError: 'judge'"),
        ("program4", {}, Outcome.ENV_ERROR, "uv, which is not installed"),
        ("nothing4", {}, Outcome.ENV_ERROR, "TypeError"),
        ("waiting4", {"timeout": 3.0}, Outcome.TIMEOUT, "env.timeout=3 s"),
        ("waiting4", {"parameters": ["agent.timeout.scoring=1"]}, Outcome.TIMEOUT, "scoring_timeout"),
        ("sums4", {"parameters": ["timeout.episode=0.001"]}, Outcome.TIMEOUT, "0.001s deadline"),
    ],
)
def test_failures_have_an_outcome(name: str, keys: dict[str, Any], outcome: Outcome, detail: str) -> None:
    told, _ = play(name, ["2"], **keys)
    assert told.outcome is outcome and detail in told.detail, told.detail
    assert math.isnan(told.reward)


def test_a_reward_that_holds_up_the_loop_is_interrupted(tiny: Path, tmp_path: Path) -> None:
    words = ("env=verifiers", "env.task=sleeping4.py", "env.timeout=1", "model.chat_template=hermes", "steps=1")
    with pytest.raises(BirlError, match="8 timeout"):
        run(tiny, tmp_path, *words)


def test_mistakes_are_told() -> None:
    def of(name: str, **keys: Any) -> str:
        told = mistake("verifiers", task=name, **keys)
        assert "\n" not in told
        return told

    assert "needs env.task" in of("")
    assert "there is no such file" in of("nowhere4.py")
    assert "Did you mean textarena" in of("textarina")
    assert "No module named 'not_there_at_all'. Install it" in of("needy4.py")
    assert "pip install 'verifiers<0.4'" in of("old4.py")
    assert "defines no `__all__`" in of("empty4.py")
    assert "taskset.mots" in of("sums4.py", parameters=["taskset.mots=1"])
    assert "uv, which is not installed" in of("sums4.py", parameters=["agent.harness.id=bash"])
    assert "harness 'nul' not found" in of("sums4.py", parameters=["agent.harness.id=nul"])
    for name, words, wrong in (
        ("sums4.py", ["agent.harness.id=codex"], "sums4.py: Harness 'codex' needs a container runtime"),
        ("again4.py", [], "its tasks have no end; env.rows=1000"),
        ("box4.py", [], r"box4.py: task 0 requires image 'python:3.12'.*agent.runtime.type=docker"),
    ):
        with pytest.raises(BirlError, match=wrong):
            rows(world("verifiers", task=name, parameters=words))


TRAINED = {
    "sums4": ("env.task=sums4.py", "env.parameters=[taskset.split=test]"),
    "tools4": ("env.task=tools4.py", "reward=length", "reward.length_target=10"),  # random weights are never right
    "again4": ("env.task=again4.py", "env.rows=4"),
    "user-sim": ("env.task=sums4.py", "env.parameters=[id=user-sim,user.max_turns=2]"),
}
TURNS = {"again4": 3, "user-sim": 2}


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains(name: str, tiny: Path, tmp_path: Path) -> None:
    """Through `birl rl`, two steps."""
    shutil.copytree(tiny, tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    (tmp_path / "long" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    words = ("env=verifiers", "model.chat_template=hermes", "model.max_length=3000", *TRAINED[name])
    episodes = run(tmp_path / "long", tmp_path, *words)
    assert {e["outcome"] for e in episodes} <= {"ok", "truncated"} and len(episodes) == 16
    for e in episodes:
        (sample,) = e["samples"]  # all turns are one sequence
        assert 0 < sum(sample["mask"]) <= 8 * TURNS.get(name, 1)
        if name == "sums4":
            assert math.isclose(e["reward"], e["parts"]["right"] + 0.5 * e["parts"]["short"])
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    assert len(metrics) == 2 and all(m["grad_norm"] > 0 and m["mismatch/mean"] < 1e-5 for m in metrics)


def test_the_page_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "adapters.md"
    shown = (words for kind, text in blocks(page) if kind == "text" for words in commands(text))
    (words,) = (words for words in shown if words[:3] == ["birl", "rl", "env=verifiers"])
    monkeypatch.chdir(tmp_path)
    (name,) = (word.removeprefix("env.task=") for word in words if word.startswith("env.task="))
    Path(name).write_text(scripts(page)[name])
    execute(words, tiny, monkeypatch)
