"""A real OpenEnv server, started here, and its sessions."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from birl.envs.open import World
from tests.envs.adapters.play import mistake, play, task, told, without, world
from tests.envs.adapters.word_server import WORDS

SERVER = f"{sys.executable} {Path(__file__).with_name('word_server.py')} --port {{port}}"


@pytest.fixture(scope="module")
def words() -> Iterator[World]:
    opened = world("openenv", command=SERVER)
    yield opened
    asyncio.run(opened.close())


def word(seed: int) -> str:
    return random.Random(seed).choice(WORDS)


def test_rewards_are_the_servers(words: World) -> None:
    assert words.rows is not None
    for row in words.rows("train")[:3]:
        wrong = next(w for w in WORDS if w != word(row["seed"]))
        first, found = play(words, row, wrong, word(row["seed"]))
        assert first == "One of: ash, birch, cedar, elm"
        assert [(f.reward, f.done, f.messages[0].content) for f in found] == [
            (-0.25, False, "No."),
            (1, True, "Right."),
        ]


def test_training_and_validation_have_no_seed_in_common(words: World) -> None:
    assert words.rows is not None
    train, validation = ({row["seed"] for row in words.rows(split)} for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1000, 100) and not train & validation


def test_a_failure_of_the_server_is_no_reward(words: World) -> None:
    with pytest.raises(RuntimeError, match="the server fell over"):
        play(words, {"prompt": "x", "seed": 1}, "crash")
    with pytest.raises(ValueError, match="gave no reward for any"):
        play(words, {"prompt": "x", "seed": 1}, "silence")


def test_a_full_server_is_waited_for_and_the_process_ends() -> None:
    """Servers allow one session unless they are told otherwise; sessions are given back."""
    small = world("openenv", command=f"{SERVER} --sessions 2")
    url, process = small.shared.url, small.shared.process

    async def five() -> list[float]:
        played = [told(small.open(task({"prompt": "x", "seed": i})), [word(i)]) for i in range(5)]
        return [found[-1].reward for _, found in await asyncio.wait_for(asyncio.gather(*played), 30)]

    assert asyncio.run(five()) == [1.0] * 5
    assert httpx.get(f"{url}/health").is_success
    asyncio.run(small.close())
    assert process.poll() is not None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def sleepers(seconds: int) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", str(seconds)]]


def test_what_a_server_that_died_had_started_ends_too() -> None:
    assert "ended with status 3" in mistake("openenv", command="sh -c 'sleep 4711 & exit 3' {port}")
    assert not psutil.wait_procs(sleepers(4711), 20)[1]


def test_no_proxy_is_between_here_and_here(words: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert play(world("openenv", url=words.shared.url), {"prompt": "x", "seed": 1}, word(1))[1][0].reward == 1


TRAINER = """
import asyncio
from birl.envs.adapters.openenv import OpenEnv

async def main():
    await OpenEnv.shared(OpenEnv.Config(command="sh -c 'exec sleep 4712' {port}"))

asyncio.run(main())
"""


def test_the_server_ends_with_the_trainer() -> None:
    """Also when that is killed, and can end nothing."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER])
    try:
        end = time.monotonic() + 60
        while not sleepers(4712):
            assert time.monotonic() < end and trainer.poll() is None
            time.sleep(0.1)
    finally:
        trainer.kill()
        trainer.wait(10)
    _, alive = psutil.wait_procs(sleepers(4712), 10)
    assert not alive


def test_an_action_of_several_fields_is_json(words: World) -> None:
    words.shared.action = ""
    try:
        _, found = play(words, {"prompt": "x", "seed": 1}, f'{{"word": "{word(1)}"}}')
        assert found[0].reward == 1
        assert found[0].info == {"invalid": 0.0}
        for text in ("elm", "[1]", "[" * 100_000):  # the model's mistake, and not the environment's
            _, found = play(words, {"prompt": "x", "seed": 1}, text, f'{{"word": "{word(1)}"}}')
            assert (found[0].reward, found[0].done, found[0].info) == (0, False, {"invalid": 1.0})
            assert "a JSON object" in found[0].messages[0].content and found[1].reward == 1
    finally:
        words.shared.action = "word"


def test_fields_can_be_chosen(words: World) -> None:
    assert (words.shared.action, words.shared.see) == ("word", "text")
    seen = world("openenv", url=words.shared.url, see="guesses")
    assert play(seen, {"prompt": "x", "seed": 1}, "no")[1][0].messages[0].content == "1"
    assert "Did you mean word" in mistake("openenv", url=words.shared.url, action="wodr")


def test_mistakes_are_told() -> None:
    assert "either env.url" in mistake("openenv")
    assert "no OpenEnv server answers there" in mistake("openenv", url="http://127.0.0.1:9")
    assert "needs {port}" in mistake("openenv", command="python server.py")
    assert "there is no program no-such-server" in mistake("openenv", command="no-such-server {port}")
    assert "pip install 'birl[openenv]'" in without("openenv", "openenv")
