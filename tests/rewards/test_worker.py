"""The processes of the reward functions: their protocol, their end, and what a function does to its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.rewards.score import Rewards, Score
from birl.types import Outcome
from tests.rewards.mine import FUNCTIONS, alive, local_length, score, values, wait_for, workers

pytestmark = pytest.mark.usefixtures("folder")


def test_prints_do_not_disturb_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    assert values(score(["mine.py:noisy"], ["a", "b"])) == [1.0, 1.0]
    printed = [capfd.readouterr()]

    def complete() -> bool:
        printed.append(capfd.readouterr())
        return all(text in "".join(p.err for p in printed) for text in ("raw", "from a child"))

    assert wait_for(complete) and not any(p.out for p in printed)


SHOUTS = """
import os, sys

def shout(completions, **_):
    sys.stderr.write("\u00e9" * 500_000)
    sys.stderr.flush()
    os._exit(7)
"""


def test_a_line_of_a_megabyte_is_no_reason(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """It was read byte by byte, and told as a whole for every episode."""
    (tmp_path / "shouts.py").write_text(SHOUTS)
    (result,) = score([f"{tmp_path}/shouts.py:shout"], ["a"])
    assert "died (exit code 7): ééé" in result.detail and len(result.detail) < 600
    printed = [capfdbinary.readouterr().err]

    def complete() -> bool:
        printed.append(capfdbinary.readouterr().err)
        return b"".join(printed).count("é".encode()) == 500_000

    assert wait_for(complete) and "\ufffd" not in b"".join(printed).decode()


FORGERS = '''
import os

def forge(completions, **_):
    """Writes a reply of its own to every descriptor; the second answer hangs on the row, the third breaks a line."""
    for text in completions:
        for fd in range(3, 64):
            try:
                os.write(fd, b'half' if text == "half" else b'{"values": [1.0], "extra": {}, "logged": {}}\\n' * 3)
            except OSError:
                pass
    return [0.25 for _ in completions]
'''


async def test_replies_cannot_be_forged_by_writing_to_every_descriptor(tmp_path: Path) -> None:
    (tmp_path / "forgers.py").write_text(FORGERS)
    async with Rewards([f"{tmp_path}/forgers.py:forge"], workers=1) as rewards:
        for text in ("a", "half", "b", "c"):
            for score in await rewards.score(["q"] * 2, [text, text], {}, [None, None]):
                assert (score.value, score.outcome) == (0.25, Outcome.OK), (text, score)


CHANGERS = """
import sys

def answer(reply):
    sys.modules["__main__"].asdict = lambda *_: reply
    return [0.5, 0.5]

def unknown(completions, **_): return answer({"nonsense": 1})
def few(completions, **_): return answer({"values": [1.0]})
def many(completions, **_): return answer({"values": [1.0] * 9})
def listed(completions, **_): return answer([1.0, 1.0])
def worded(completions, **_): return answer({"values": [1.0, 1.0], "extra": 3, "logged": {"a": "b"}})

def closes(completions, **_):
    sys.stdout.close()
    sys.stderr.close()
    return [0.25] * len(completions)
"""


@pytest.mark.parametrize("name", ["unknown", "few", "many", "listed", "worded", "closes"])
async def test_a_function_that_changes_its_worker_does_not_end_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "changers.py").write_text(CHANGERS)
    async with Rewards([f"{tmp_path}/changers.py:{name}"]) as rewards:
        for _ in range(2):
            scores = await rewards.score(["q"] * 2, ["a", "b"], {}, [None] * 2)
            wanted = (Outcome.OK, Outcome.OK) if name == "closes" else (Outcome.ENV_ERROR, Outcome.ENV_ERROR)
            assert tuple(score.outcome for score in scores) == wanted, scores


def test_async_by_name_keeps_one_loop() -> None:
    async def main() -> list[float]:
        async with Rewards(["mine.py:coroutine"]) as rewards:
            return [(await rewards.score(["p"], ["x"], {}, [None]))[0].value for _ in range(3)]

    assert asyncio.run(main()) == [1.0, 1.0, 1.0]


def test_a_file_that_changes_during_the_run(folder: Path) -> None:
    async def main() -> list[Score]:
        async with Rewards(["mine.py:bad"]) as rewards:
            (folder / "mine.py").write_text(FUNCTIONS + "\n# another function from here on\n")
            return await rewards.score(["p"] * 2, ["exit", "a"], {}, [None] * 2)

    scores = asyncio.run(main())
    assert all(s.outcome is Outcome.ENV_ERROR for s in scores) and "was changed during the run" in scores[1].detail


def test_close_leaves_nothing_behind() -> None:
    async def main() -> list[Score]:
        before = workers()
        rewards = Rewards(["mine.py:bad"], workers=2)
        await rewards.start()
        assert len(workers()) == len(before) + 2
        call = asyncio.create_task(rewards.score(["p"] * 2, ["hang", "a"], {}, [None] * 2))
        await asyncio.sleep(0.1)
        await rewards.close()
        assert workers() == before
        scores = await call
        with pytest.raises(BirlError, match="closed"):
            await rewards.start()
        return scores

    assert [s.outcome for s in asyncio.run(main())] == [Outcome.ABORTED] * 2


def test_one_object_serves_several_event_loops() -> None:
    rewards = Rewards(["mine.py:by_length", local_length])
    for _ in range(2):
        assert asyncio.run(rewards.score(["p"], ["abc"], {}, [None]))[0].value == 3.0
    asyncio.run(rewards.close())


def test_many_groups_at_once() -> None:
    async def main() -> list[list[Score]]:
        async with Rewards(["mine.py:by_length"], workers=2) as rewards:
            calls = (rewards.score(["p"] * 2, ["x" * i, ""], {}, [None] * 2) for i in range(40))
            return await asyncio.gather(*calls)

    assert [scores[0].value for scores in asyncio.run(main())] == list(range(40))


PARENT = """
import asyncio, os, signal
from birl.rewards.score import Rewards
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
async def main():
    rewards = Rewards(["mine.py:bad"], timeout=60)
    await rewards.start()
    call = asyncio.create_task(rewards.score(["p"], ["sleep with child"], {}, [None]))
    while not os.path.exists("child.pid") or not open("child.pid").read():
        await asyncio.sleep(0.05)
    print(open("worker.pid").read(), flush=True)
    await call
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how: signal.Signals, folder: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    child = int((folder / "child.pid").read_text())
    assert alive(worker) and alive(child)
    os.kill(worker, signal.SIGINT)  # Ctrl-C is the parent's business
    time.sleep(0.05)
    assert alive(worker)
    parent.send_signal(how)
    parent.wait(timeout=100)
    parent.stdout.close()
    assert wait_for(lambda: not alive(worker) and not alive(child))
