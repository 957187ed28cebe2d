"""Any program is an agent, and nothing of it is left behind, however it ends."""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from birl.config.schema import Env as Keys
from birl.envs import calls
from birl.envs.open import open_world
from birl.envs.program import Config, Program, reward
from birl.errors import BirlError
from birl.process import strays
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits, Session
from birl.server.gateway import Gateway
from birl.types import Message, Outcome, SamplingParams, Task, Trajectory
from tests.rollout.scripted import CHAT, Scripted
from tests.scenario import scenario

TASK = Task(id="t", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7", columns={"level": 2})

#: what an agent without a client needs
ASK = """
import json, os, sys, time, urllib.request
def post(path, data):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(data).encode())
    return json.load(urllib.request.urlopen(request, timeout=20))
def ask(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"messages": messages})["choices"][0]["message"]["content"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where agents' folders are made, and nothing else."""
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def written(body: str) -> str:
    Path("my_agent.py").write_text(ASK + body)
    return "python my_agent.py"


def play(
    command: str,
    *,
    engine: Any = None,
    timeout: float = 20.0,
    n: int = 1,
    cancel: Callable[[int], float] | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Episodes at once; those that are cancelled after a while have no result."""

    async def main() -> list[Trajectory]:
        world = await open_world(Keys(kind="program", options={"command": command, **options}), CHAT.text)
        gateway = Gateway(CHAT)
        await gateway.start()

        async def one(i: int) -> Trajectory:
            session = Session(
                engine or Scripted(lambda prompt: "seven"), CHAT, SamplingParams(max_tokens=20),
                Limits(timeout=timeout), lambda turn: turn, name=f"episode {i}", gateway=gateway,
            )  # fmt: skip
            return await run_episode(world.open(TASK), session)

        tasks = [asyncio.create_task(one(i)) for i in range(n)]
        if cancel is not None:
            for i, task in enumerate(tasks):
                asyncio.get_running_loop().call_later(cancel(i), task.cancel)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await gateway.close()
        assert world.shared.places._value == world.shared.config.processes
        for one_ in found:
            assert isinstance(one_, Trajectory | asyncio.CancelledError), one_
        return [t for t in found if isinstance(t, Trajectory)]

    return scenario(main)


def test_it_finds_its_task_and_the_model(folder: Path) -> None:
    command = written("""
task = json.load(open(os.environ["BIRL_TASK"]))
assert sys.stdin.read() == "What is 3 + 4?" and task["answer"] == "7" and task["level"] == 2
assert os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
open("notes.txt", "w").write("x")
print(ask("Say seven."))
print(json.dumps({"reward": 0.5}))
""")
    (found,) = play(command)
    assert (found.outcome, found.reward, len(found.turns)) == (Outcome.OK, 0.5, 1), found.detail
    assert not any(folder.iterdir())


def test_its_environment_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("LEVEL", "2")
    command = written("""
ask("Hi")
assert "SECRET" not in os.environ and os.environ["LEVEL"] == "2"
assert set(os.environ) - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "LANG", "LEVEL", "BIRL_TASK", "OPENAI_BASE_URL",
    "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}, os.environ
print('{"reward": 1}')
""")
    (found,) = play(command, pass_environment="[LEVEL]")
    assert (found.outcome, found.reward) == (Outcome.OK, 1.0), found.detail


ENDS = {
    "sent": ("ask('a'); post('/reward', {'reward': 2})", {}, Outcome.OK, 2.0, ""),
    "sent, then failed": ("ask('a'); post('/reward', {'reward': 2}); sys.exit(3)", {}, Outcome.OK, 2.0, ""),
    "sent and printed": (
        "ask('a'); post('/reward', {'reward': 2}); print(json.dumps({'reward': 3}))", {}, Outcome.OK, 2.0, ""
    ),
    "only what it prints": (
        "ask('a'); post('/reward', {'reward': 2}); print(json.dumps({'reward': 3}))",
        {"reward": "printed"}, Outcome.OK, 3.0, "",
    ),
    "not what others send": (
        "ask('a'); post('/reward', {'reward': 2})", {"reward": "printed"}, Outcome.ENV_ERROR, None, "env.reward=printed"
    ),
    "each of its agents": (
        "post('/chat/completions', {'model': 'birl/x', 'messages': [{'role': 'user', 'content': 'a'}]})\n"
        "print(json.dumps({'reward': {'x': 1.5}}))", {}, Outcome.OK, 1.5, "",
    ),
    "no reward": ("ask('a')", {}, Outcome.ENV_ERROR, None, "the agent gave no reward: it printed nothing, not {"),
    "not the last line": (
        "ask('a'); print(json.dumps({'reward': 3})); print('x')", {}, Outcome.ENV_ERROR, None,
        "the agent gave no reward: its last line is 'x', not {\"reward\": 1.0}, and nothing was sent",
    ),
    "not a number": ("ask('a'); print('{\"reward\": \"1\"}')", {}, Outcome.ENV_ERROR, None, "a reward is a number"),
    "not finite": ("ask('a'); print('{\"reward\": NaN}')", {}, Outcome.ENV_ERROR, None, "reward is nan"),
    "exit code": (
        "print('note', file=sys.stderr); sys.exit('no disk')", {}, Outcome.ENV_ERROR, None, "exit code 1: no disk"
    ),
    "exception": ("ask('a'); 1 / 0", {}, Outcome.ENV_ERROR, None, "ZeroDivisionError: division by zero"),
    "signal": ("ask('a'); os.kill(os.getpid(), 9)", {}, Outcome.ENV_ERROR, None, "ended by SIGKILL"),
    "never asked": ("print('{\"reward\": 1}')", {}, Outcome.ENV_ERROR, None, "never called the model"),
    "much output": (
        "ask('a'); print('x' * 3_000_000); sys.stderr.write('y' * 3_000_000); print('{\"reward\": 1}')", {},
        Outcome.OK, 1.0, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "options", "outcome", "worth", "told"), ENDS.values(), ids=ENDS)
def test_how_it_ends(
    folder: Path, body: str, options: dict[str, str], outcome: Outcome, worth: float | None, told: str
) -> None:
    (found,) = play(written(body), **options)
    assert (found.outcome, None if worth is None else found.reward) == (outcome, worth), found.detail
    assert told in found.detail and not any(folder.iterdir())


def test_an_engine_that_fails_is_not_the_agents_fault(folder: Path) -> None:
    class Down(Scripted):
        async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Any:
            raise RuntimeError("boom")

    body = "try:\n    ask('a')\nexcept Exception:\n    pass\nprint('{\"reward\": 0}')"
    (found,) = play(written(body), engine=Down([]))
    assert found.outcome is Outcome.ENGINE_ERROR and "boom" in found.detail and found.reward != 0


def test_places_are_counted_and_the_clock_starts_with_the_process(folder: Path) -> None:
    Path("log").mkdir()
    command = written(f"""
import pathlib
here = pathlib.Path({str(folder.parent / "log")!r}, str(os.getpid()))
here.write_text("")
running = len(list(here.parent.iterdir()))
time.sleep(1.5)
ask("a")
here.unlink()
print(json.dumps({{"reward": running}}))
""")
    found = play(command, n=8, processes="2", timeout=5.0)  # eight of them take longer than that
    assert [t.outcome for t in found] == [Outcome.OK] * 8, found
    assert max(t.reward for t in found) == 2


STRAYS = """
import subprocess
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1001"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.mkdir("locked"); open("locked/x", "w").close(); os.chmod("locked", 0)
"""
BODIES = {
    "well": "ask('a'); print('{\"reward\": 1}')",
    "leaves processes": STRAYS + "ask('a'); print('{\"reward\": 1}')",
    "hangs": STRAYS + "time.sleep(1000)",
    "deaf": STRAYS + "import signal; signal.signal(15, signal.SIG_IGN); ask('a'); time.sleep(1000)",
    "dies": STRAYS + "os.kill(os.getpid(), 9)",
    "closes": "os.close(0); os.close(1); os.close(2); time.sleep(1000)",
}


def descendants() -> set[str]:
    """Commands of this process's children and of whatever got away with a folder of the tests as its home."""
    own = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if "birl-agent-" in process.environ().get("HOME", ""):
                own[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return {f"{pid} {command}" for pid, command in own.items()}


def test_nothing_is_left_after_chaos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty agents that hang, die and leave processes, of which some are cancelled and the others timed out."""
    monkeypatch.setattr(calls, "IDLE", 0.5)
    for i, body in enumerate(BODIES.values()):
        Path(f"agent{i}.py").write_text(ASK + body)
    chosen = folder.parent / "chosen.py"  # each episode takes the next one
    chosen.write_text("import os, runpy, sys\n"
                      f"number = int.from_bytes(os.urandom(2)) % {len(BODIES)}\n"
                      f"runpy.run_path(f'{folder.parent}/agent{{number}}.py', run_name='__main__')\n")  # fmt: skip
    random = Random(0)
    play(f"{sys.executable} chosen.py", n=2, timeout=1.0)  # what stays once: pools, imports
    gc.collect()
    files, threads, processes = len(os.listdir("/proc/self/fd")), threading.active_count(), descendants()
    found = play(
        f"{sys.executable} chosen.py", n=40, timeout=1.5, processes="12", cancel=lambda i: random.uniform(0.1, 6.0)
    )
    gc.collect()
    assert {t.outcome for t in found} <= {Outcome.OK, Outcome.TIMEOUT, Outcome.ENV_ERROR} and found

    def left() -> list[object]:
        """Threads of the pools end when they have nothing to do."""
        open_files, alive = os.listdir("/proc/self/fd"), threading.enumerate()
        return [
            *(descendants() - processes),
            *folder.iterdir(),
            *(open_files if len(open_files) > files else ()),
            *(alive if len(alive) > threads + 2 else ()),
        ]

    end = time.monotonic() + 30
    while left():
        assert time.monotonic() < end, left()
        time.sleep(0.1)


TRAINER = """
import asyncio
from birl.envs.program import Config, Program
from birl.types import Task

class Model:
    base_url, reward = "http://127.0.0.1:9/s/secret/v1", None

async def main():
    shared = Program.shared(Config(command="python my_agent.py"))
    await Program(Task(id="t", prompt="x"), shared).run(Model())

asyncio.run(main())
"""


def test_agents_end_with_the_trainer(folder: Path) -> None:
    """Also when it is killed, and can clean up nothing: with what they started, and their folders."""
    hold = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session={})"
    written(f"import subprocess, sys\n{hold.format(False)}\n{hold.format(True)}\ntime.sleep(1000)")
    Path("trainer.py").write_text(TRAINER)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(folder)}
    trainer = subprocess.Popen([sys.executable, "trainer.py"], env=env)
    try:
        end = time.monotonic() + 60
        while len(agents := psutil.Process(trainer.pid).children(recursive=True)) < 4:  # one guards the others
            assert time.monotonic() < end and trainer.poll() is None
            time.sleep(0.1)
    finally:
        trainer.kill()
        trainer.wait(10)
    _, alive = psutil.wait_procs(agents, 10)
    assert not alive and not list(folder.glob("birl-agent-*"))


async def test_an_episode_without_an_address_ends_nobody(folder: Path) -> None:
    """Its processes are known by the address in their environment; all processes have an empty text in theirs."""
    assert strays("") == []

    class Nowhere:
        @property
        def base_url(self) -> str:
            raise RuntimeError("no gateway")

    agent = Program(TASK, Program.shared(Config(command="python")))
    with pytest.raises(RuntimeError, match="no gateway"):
        await agent.run(Nowhere())  # type: ignore[arg-type]
    assert agent.folder is None
    await agent.close()


MISTAKES = {
    "no command": ({}, "env.command is empty"),
    "no such program": ({"command": "no-such-agent x"}, "there is no program no-such-agent"),
    "no such file": ({"command": "python -u nothing.py"}, "there is no file nothing.py in "),
    "half a quote": ({"command": "python 'x"}, "No closing quotation"),
    "no places": ({"command": "python", "processes": "0"}, "env.processes=0"),
    "another reward": ({"command": "python", "reward": "mine"}, "env.reward=mine"),
    "no variable": ({"command": "python", "pass_environment": "[NO_SUCH_THING]"}, "NO_SUCH_THING"),
    "its own variable": ({"command": "python", "pass_environment": "[HOME]"}, "agents have their own"),
    "unknown": ({"command": "python", "proceses": "3"}, "Did you mean env.processes"),
}


@pytest.mark.parametrize(("options", "told"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told(options: dict[str, str], told: str) -> None:
    with pytest.raises(BirlError, match=re.escape(told)):
        asyncio.run(open_world(Keys(kind="program", options=options), CHAT.text))


def test_a_link_to_python_stays_one(folder: Path) -> None:
    """The python of a virtual environment is a link; what it points to knows nothing of the packages there."""
    Path("env").mkdir()
    Path("env/python").symlink_to(sys.executable)
    world = asyncio.run(open_world(Keys(kind="program", options={"command": "env/python x"}), CHAT.text))
    assert f"{folder.parent}/env/python" in world.shared.words


@pytest.mark.parametrize("line", ["", "1", "[]", '{"reward": 1, "x": 2}', "{", '{"score": 1}', "reward: 1"])
def test_what_is_no_reward(line: str) -> None:
    assert reward(line) is None


@pytest.mark.parametrize("value", [1, 0.5, {"a": 1.0}])
def test_what_is_one(value: Any) -> None:
    assert reward(json.dumps({"reward": value})) == value
