"""Every way in is trained through `birl rl` with a tiny model: the examples, and what can go wrong around them."""

import json
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birl import named
from birl.cli import evaluation
from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.train.command import train
from tests.train.trainers import small

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(tiny: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    quiet = ("model.max_length=400", "rollout.prompts=2", "validation.every=0", "validation.at_start=false")
    train(small(tiny, folder, *quiet, *words))
    return [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_bytes().splitlines()]


WAYS = {
    "reward function": (f"reward={EXAMPLES}/reward_function.py:close_to", f"data.train={EXAMPLES}/data/lengths.jsonl"),
    "step function": (
        f"env={EXAMPLES}/step_function.py:step",
        f"data.train={EXAMPLES}/data/numbers.jsonl",
        "env.most=3",
    ),
    "class": (f"env={EXAMPLES}/env_class.py:Hints", "env.colors=[a,b]"),
    "gymnasium": ("env=gymnasium", f"env.id={EXAMPLES}/gym_text.py:Backwards-v0", "env.max_turns=3"),
    "self-play": (f"env={EXAMPLES}/self_play.py:Nim", "env.sticks=3"),
}


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_every_way_in_trains(tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    episodes = run(tiny, tmp_path, *words, "algorithm.entropy_coef=0.01")  # trains episodes of equal reward as well
    assert len(episodes) == 16 and {e["outcome"] for e in episodes} <= {"ok", "truncated"}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    gaps = [m["mismatch/mean"] for m in metrics if m["mismatch/mean"] is not None]
    assert gaps and max(gaps) < 1e-5


def test_examples_are_short() -> None:
    for name in ("reward_function", "step_function", "env_class", "self_play", "gym_text"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


SUMS = """
from birl.types import Feedback, Message

class Sums:
    '''Two questions; the second continues the first.'''
    def __init__(self, task):
        self.turn = 0
    async def start(self):
        return (Message(role="user", content="Say a."),)
    async def step(self, reply):
        self.turn += 1
        good = reply.content.count("a") / max(len(reply.content), 1)
        more = (Message(role="user", content="Say a again."),)
        return Feedback(messages=more, reward=good, done=self.turn == 2)
    async def close(self):
        pass
"""


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_it_learns_over_several_turns(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credit: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text(SUMS)
    Path("rows.jsonl").write_text('{"prompt": "x"}\n' * 8)
    words = ("steps=15", "rollout.group_size=8", "rollout.max_tokens=40", f"algorithm.credit={credit}")
    words += ("rollout.stop=[a,e,i,o,u,n,t,s,r]",)  # a random model does not end its answers
    episodes = run(tiny, tmp_path, "env=sums.py:Sums", "data.train=rows.jsonl", *words)
    rewards = [[e["reward"] for e in episodes if e["step"] == step and e["outcome"] == "ok"] for step in range(1, 16)]
    means = [sum(r) / max(len(r), 1) for r in rewards]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.2


def test_an_environment_without_tasks_needs_data(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text(SUMS)
    with pytest.raises(BirlError, match=r"data\.train is empty, and env\.kind=sums\.py:Sums has no tasks of its own"):
        run(tiny, tmp_path, "env=sums.py:Sums")


def test_an_episode_fits_into_a_micro_batch(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text(SUMS)
    Path("rows.jsonl").write_text('{"prompt": "x"}\n')
    words = ("env=sums.py:Sums", "data.train=rows.jsonl", "learner.tokens_per_microbatch=300")
    run(tiny, tmp_path, *words, "model.max_length=0", "steps=1")
    assert "Episodes have at most 300 tokens (learner.tokens_per_microbatch=300)" in capsys.readouterr().out


HARM = """
import asyncio, decimal, os, random, socket, sys, warnings
import numpy, torch
from birl.types import Feedback

def harm(number):
    pass

harm(0)

class Harmful:
    def __init__(self, task):
        harm(1)
    async def start(self):
        harm(2)
        return "x"
    def step(self, reply):  # in a thread
        harm(3)
        return Feedback(reward=reply.content.count("a") / max(len(reply.content), 1))
    async def close(self):
        harm(4)
"""
CHANGES = """
    torch.manual_seed(number); numpy.random.seed(number); random.seed(number)
    torch.set_default_dtype((torch.float64, torch.bfloat16, torch.float16)[number % 3])
    torch.set_grad_enabled(False); torch.set_num_threads(2); os.chdir("/")
    os.environ.clear(); sys.path.clear(); torch.set_default_device("meta"); torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error"); sys.setrecursionlimit(400); socket.setdefaulttimeout(1e-6)
    asyncio.set_event_loop(None); numpy.seterr(all="raise"); decimal.getcontext().prec = 2
"""


@pytest.mark.parametrize("algorithm", ["dr_grpo", "ppo"])
def test_what_an_environment_changes_of_the_process_changes_no_bit(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    seen = {}
    for name, changes in (("nice", "    pass"), ("nasty", CHANGES)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        Path("harm.py").write_text(HARM.replace("    pass", changes, 1))
        Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        words = ("env=harm.py:Harmful", "data.train=rows.jsonl", "validation.every=1", "data.validation=rows.jsonl",
                 f"algorithm={algorithm}", "lora.rank=2", "track.report=true")  # fmt: skip
        threads, variables, limit, errors = (
            torch.get_num_threads(),
            {**os.environ},
            sys.getrecursionlimit(),
            np.geterr(),
        )
        try:
            with warnings.catch_warnings():
                episodes = run(tiny, Path(), *words)
        finally:
            torch.set_grad_enabled(True)
            torch.set_num_threads(threads)
            torch.set_default_device(None)
            torch.use_deterministic_algorithms(False)
            socket.setdefaulttimeout(None)
            sys.setrecursionlimit(limit)
            np.seterr(**errors)
        assert {**os.environ} == variables
        assert Path.cwd() == tmp_path / name and torch.get_default_dtype() == torch.float32
        tensors = sorted(Path("run/checkpoints/step-000002/tensors").iterdir())
        seen[name] = episodes, [file.read_bytes() for file in tensors]
    assert seen["nice"] == seen["nasty"] and seen["nice"][1]


HOLDS = {
    "sleep": "time.sleep(1000)",
    "computing": "[None for _ in iter(int, 1) if _]",
    "a regular expression": "re.fullmatch('(a+)+b', 'a' * 60)",
    "tries again": "again()",
    "a program": "subprocess.run(['sleep', '1000'])",
}
HOLDING = """
import re, subprocess, time
from birl.types import Feedback

def again():
    while True:
        try:
            time.sleep(1000)
        except Exception:
            pass

class Holding:
    begun = 0
    def __init__(self, task):
        self.number, Holding.begun = Holding.begun, Holding.begun + 1
    async def start(self):
        return "x"
    async def step(self, reply):
        if self.number == 1:
            HOLD
        return Feedback(reward=float(self.number))
    async def close(self):
        pass
"""


@pytest.mark.parametrize("hold", HOLDS)
def test_a_coroutine_that_holds_up_the_event_loop_ends_its_episode(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: str
) -> None:
    """S11: nothing else runs meanwhile, no deadline either. It is interrupted where it stands, and the run goes on."""
    monkeypatch.chdir(tmp_path)
    Path("holding.py").write_text(HOLDING.replace("HOLD", HOLDS[hold]))
    Path("rows.jsonl").write_text('{"prompt": "x"}\n' * 4)
    words = ("env=holding.py:Holding", "data.train=rows.jsonl", "env.timeout=3", "rollout.max_failure_rate=1")
    episodes = run(tiny, tmp_path, *words)
    told = [e for e in episodes if "held up the event loop for 3 s" in e["detail"]]
    assert [e["outcome"] for e in told] == ["timeout"] and "holding.py:" in told[0]["detail"]
    assert {e["outcome"] for e in episodes if e["step"] == 2} <= {"ok", "truncated"}


CHOOSY = """
from birl.types import Feedback

class Choosy:
    def __init__(self, task):
        self.number = int(task.answer)
    async def start(self):
        return "x"
    async def step(self, reply):
        return Feedback(reward=float(len(reply.content) + self.number))
    async def close(self):
        pass
"""


def test_a_row_that_cannot_be_opened_is_an_error_of_its_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("choosy.py").write_text(CHOOSY)
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "7"}\n{"prompt": "b", "answer": "seven"}\n')
    episodes = run(tiny, tmp_path, "env=choosy.py:Choosy", "data.train=rows.jsonl", "steps=1")
    assert {(e["task"], e["outcome"], e["reward"] is None) for e in episodes} <= {
        ("rows.jsonl:0", "ok", False),
        ("rows.jsonl:0", "truncated", False),
        ("rows.jsonl:1", "env_error", True),
    }
    assert any("choosy.py:6: ValueError" in e["detail"] for e in episodes)


TOOLS = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\\n' + tool | tojson + '<|im_end|>\\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TASKS = {
    "arithmetic": (),
    "calculator": ("model.chat_template=tools.jinja", "model.max_length=512"),
    "code": ("env.workers=1", "env.rows=20", "model.max_length=512"),
    "countdown": ("env.partial=0.1",),
    "guess_number": ("algorithm.credit=turn",),
    "letter_counting": (),
    "python_tool": ("model.chat_template=tools.jinja", "model.max_length=512", "env.workers=1"),
    "search": ("model.max_length=512", "env.turns=2", "env.passages=1"),
}


@pytest.mark.parametrize("kind", TASKS)
def test_every_built_in_task_trains(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tools.jinja").write_text(TOOLS)
    episodes = run(tiny, tmp_path, f"env={kind}", "steps=1", "validation.every=1", "validation.max_tokens=4",
                   "data.max_validation_samples=4", *TASKS[kind])  # fmt: skip
    assert len(episodes) == 8 and {e["outcome"] for e in episodes} <= {"ok", "truncated"}
    assert f"validation/{kind}/pass@1" in (tmp_path / "run" / "validation.jsonl").read_text()
    assert "Warning" not in capsys.readouterr().out


BROKEN = """
import asyncio
from pathlib import Path

class Broken:
    def __init__(self, task):
        with open("begun", "a") as file:
            file.write("x")
        self.number = Path("begun").stat().st_size
    async def start(self):
        await asyncio.sleep(60 if self.number % 4 != 1 else 0)  # one of each group; the others are cancelled here
        with open("played", "a") as file:
            file.write("x")
        raise FileNotFoundError("no such command")
    async def step(self, reply): ...
    async def close(self): ...
"""


def test_episodes_that_all_fail_alike_stop_the_run_early(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN)
    Path("rows.jsonl").write_text('{"prompt": "x"}\n' * 32)
    words = ("env=broken.py:Broken", "data.train=rows.jsonl", "rollout.prompts=16", "steps=1")
    with pytest.raises(BirlError, match=r"All of the first 8 episodes failed alike[^\n]*\n  8 x .*no such command"):
        run(tiny, tmp_path, *words, "rollout.max_failure_rate=0.1")
    assert len(Path("played").read_text()) <= 16  # of 64 in a step
    Path("played").unlink()
    Path("begun").unlink()
    words = (f"model.path={tiny}", "env=broken.py:Broken", "data.validation=rows.jsonl", "output=", "threads=1")
    Path("broken.py").write_text(BROKEN.replace("self.number % 4 != 1", "self.number > 8"))
    with pytest.raises(BirlError, match=r"All of the first 8 episodes failed alike[^\n]*\n  8 x .*no such command"):
        evaluation.run(load(schema.Eval, list(words)))
    assert len(Path("played").read_text()) == 8  # of 32
    words = ("env=broken.py:Broken", "data.train=rows.jsonl", "rollout.prompts=16", "steps=1")
    Path("broken.py").write_text(BROKEN.replace("60", "0"))
    episodes = run(tiny, tmp_path / "all", *words, "rollout.max_failure_rate=1", "rollout.prompts=4")
    assert [e["outcome"] for e in episodes] == ["env_error"] * 16


def test_the_import_of_an_environment_does_not_change_the_precision_of_products(tmp_path: Path) -> None:
    """Usual in scripts; float32 products of the learner were computed in 16 bits then."""
    (tmp_path / "mine.py").write_text("import torch\ntorch.set_float32_matmul_precision('medium')\ndef f(): pass\n")
    named.load("env", f"{tmp_path}/mine.py:f", {})
    assert torch.get_float32_matmul_precision() == "highest"
