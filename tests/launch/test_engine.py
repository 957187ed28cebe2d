"""`python -m birl.launch.engine`: an engine of a run in a process of its own, which the run finds by name; and engines
that come and go meanwhile."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from birl.config import schema
from birl.engines import attached, names
from birl.engines.kinds import Wanted
from birl.errors import BirlError
from birl.launch import engine
from birl.rollout.ledger import audit
from tests.launch.jobs import ENGINES, ROWS, alive, children_of, until
from tests.train.test_rl import log, run

QUICK = ("rollout.max_tokens=16", "rollout.prompts=2", "model.dtype=bfloat16", *ENGINES)


@pytest.fixture
def started(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts an engine under the name "birl-launch/test"."""
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "{row["prompt"]}", "answer": "1"}}\n' for row in ROWS))
    children: list[subprocess.Popen] = []

    def start(*words: str, **env: str) -> subprocess.Popen:
        given = [f"model.path={tiny}", f"data.train={data}", *QUICK, "threads=1", f"run={tmp_path}/run", *words]
        command = [sys.executable, "-m", "birl.launch.engine", "--name=birl-launch/test", "rl", *given]
        with (tmp_path / f"engine-{len(children)}.log").open("w") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1", **env})
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def test_engines_join_and_leave_a_run(tiny: Path, tmp_path: Path, started: Callable[..., subprocess.Popen]) -> None:
    """The first is awaited; the second comes during step 1 and the first goes during step 3."""
    first, second, calls, loads = started(), [], [], []

    def reward(completions: list[str], **_: object) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 1:
            second.append(started())
            until(lambda: len(names.find("birl-launch/test")) == 2, 200)
        if len(calls) == 8:
            first.send_signal(signal.SIGTERM)
            assert first.wait(30) == 143
            loads.append(figures())
        time.sleep(0.3)
        return [float(len(c)) for c in completions]

    def figures() -> str:
        (address,) = names.find("birl-launch/test")
        return httpx.get(f"{address}/metrics", trust_env=False).text

    words = ("engine.attach=[birl-launch/test]", "engine.count=1", "engine.start_timeout=200", "track.console=plain")
    run(tiny, tmp_path, *QUICK, *words, "steps=14", reward=reward)
    steps = log(tmp_path)
    assert len(steps) == 14 and all(s["weights/gap"] == 0 and s["mismatch/mean"] in (None, 0.0) for s in steps)
    assert not audit(tmp_path / "run").problems
    found = [float(re.search(r"^birl_weight_version\S* (\S+)", text, re.M)[1]) for text in (loads[0], figures())]  # type: ignore[index]
    assert 0 < found[0] < found[1], "the second engine had the weights of a later step before the first was gone"
    second[0].send_signal(signal.SIGTERM)
    assert second[0].wait(30) == 143 and not names.find("birl-launch/test")


def test_a_name_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path))
    names.register("birl-launch/test", "http://127.0.0.1:9", 1, "killed")  # its file is still there
    limits = {"context": 512, "longest": 96, "kv_cache_gb": 1.0, "end_ids": frozenset({2})}
    wanted = Wanted(folder=Path("m"), dtype="bfloat16", device="cpu", logs=Path("l"), **limits)
    config = schema.Engine(kind="birl", attach=["birl-launch/test"], count=3, start_timeout=0.5)
    began = time.monotonic()
    with pytest.raises(BirlError, match=r"no server registered this name within engine\.start_timeout=0\.5 s"):
        asyncio.run(attached.look_up(config, wanted, ""))
    assert 0.5 <= time.monotonic() - began < 50 and "waiting for 3 servers" in capsys.readouterr().out


def test_what_an_engine_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rl", "data.train=a.jsonl", "engine.kind=birl"]
    monkeypatch.delenv("BIRL_TOKEN", raising=False)
    monkeypatch.setenv("BIRL_HOST", "0.0.0.0")
    assert engine.main(["--name=a/b", *words]) == 2 and "set BIRL_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("BIRL_TOKEN", "x")
    assert engine.main(["--name=a/b", *words, "engine.kind=vllm"]) == 2
    assert "stays on 127.0.0.1" in capsys.readouterr().err
    assert (
        engine.main(["--name=a/b", "rl", "data.train=a.jsonl"]) == 2 and "no engine to start" in capsys.readouterr().err
    )
    assert engine.main(words) == 2 and "--name=EXPERIMENT/TRIAL" in capsys.readouterr().err


SERVER = """
import sys
sys.path[:0] = {path}
from pathlib import Path
import uvicorn
from tests.server.app import tiny_engine
from tests.server.doubles import VLLMDouble
given = dict(zip(sys.argv, sys.argv[1:]))
folder = Path(given["--model"])
double = VLLMDouble(tiny_engine(folder), folder)
uvicorn.run(double.app(), host=given["--host"], port=int(given["--port"]), log_level="warning")
"""


def test_an_engine_of_another_kind_is_a_child_that_ends_with_it(
    tiny: Path, tmp_path: Path, started: Callable[..., subprocess.Popen]
) -> None:
    """What answers is a double of vLLM, in the place of the interpreter that has it."""
    (tmp_path / "server.py").write_text(SERVER.format(path=sys.path))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    python.chmod(0o755)
    words = ("engine.kind=vllm", f"engine.python={python}", "engine.start_timeout=200")
    one = started(*words)
    (address,) = until(lambda: names.find("birl-launch/test"), 200, (tmp_path / "engine-0.log").read_text)
    assert httpx.get(f"{address}/weight_info", trust_env=False).json() == {"weight_version": "default"}
    (below,) = children_of(one.pid)
    one.send_signal(signal.SIGTERM)
    assert one.wait(20) == 143 and not alive(below) and not names.find("birl-launch/test")
    two = started(*words)
    until(lambda: names.find("birl-launch/test"), 200, (tmp_path / "engine-1.log").read_text)
    (below,) = children_of(two.pid)
    two.kill()
    until(lambda: not alive(below), 10)
