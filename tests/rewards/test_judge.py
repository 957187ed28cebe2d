"""A judge's words become a score or an error, never a made-up 0, whatever the server does."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.given import Given
from birl.learner import checkpoint, export
from birl.learner.rewards import make_rewards
from birl.rewards import judge as judges
from birl.rewards.endpoint import endpoint
from birl.rewards.requests import NoAnswer
from birl.rewards.score import Rewards, Score
from birl.train.command import train
from tests.rewards.hostile import Hostile, hostile
from tests.server.running import running


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "judge"


@pytest.fixture
def server() -> Iterator[Hostile]:
    with hostile() as found:
        yield found


def judged(server: Hostile, *completions: str, **options: Any) -> list[Any]:
    n = len(completions)
    keys = {"address": f"{server.url}/v1#the-judge", "template": "{completion}", "timeout": 5.0, **options}
    return asyncio.run(judges.judge(list(completions), ["?"] * n, [None] * n, **keys))


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Score: 0.75", 0.75),
        ("Good.\n\nScore: 1\n", 1.0),
        ("**Score: 0.5**", 0.5),
        ("**Score:** 0", 0.0),
        ("Score: 1.000", 1.0),
        ("Score: 0.2\nScore: 0.9", 0.9),
    ],
)
def test_a_score_is_read_from_the_last_line(reply: str, value: float) -> None:
    assert judges.score(reply) == value


NO_SCORES = ("", "0.5", "Score: 5", "Score: 1.5", "Score: -0.5", "Score: 0.5/1", "Score: 80%", "score: 0.5",
             "Score: 0.5\nBye.", "I say Score: 0.5", "Score: .5", "Score: 0,5", "Score: nan", "Score: 1e-1",
             "Score: 0.5 or 0.6", "Score: 01")  # fmt: skip


@pytest.mark.parametrize("reply", NO_SCORES)
def test_anything_else_is_no_score(reply: str) -> None:
    with pytest.raises(ValueError, match="no score such as"):
        judges.score(reply)


BAD = {
    "500": r"says 500: out of memory \(5 attempts\)",
    "400": "says 400: no such model$",
    "401": "says 401.*BIRL_REWARD_TOKEN",
    "garbage": "gave no JSON",
    "half": "gave no JSON",
    "list": "gave no chat completion",
    "null": "is empty",
    "huge": "more than 4 MiB",
    "moved": "says 302",
    "cut": r"was cut after reward\.judge_tokens",
    "say:I like it.": "last line is no score .*I like it",
    "patience": "no answer within .* the last attempt: .* 429",
    "hang": "no answer within 7.2 s",
}


def test_every_mishap_is_an_error_of_its_own_answer(server: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birl.rewards.requests.FIRST_PAUSE", 0.01)
    words = [*BAD, "all is well"]
    start = time.monotonic()
    found = judged(server, *words, timeout=8.0, concurrency=len(words))
    assert time.monotonic() - start < 40
    assert found[-1] == 0.25
    for (word, told), answer in zip(BAD.items(), found, strict=False):
        assert isinstance(answer, NoAnswer), word
        assert re.search(told, str(answer)), (word, answer)
    assert server.seen["400"] == 1 and server.seen["500"] == 5  # what cannot get better is asked once


def test_a_busy_server_is_asked_again(server: Hostile) -> None:
    assert judged(server, "busy", "short") == [0.25, 0.25]
    assert (server.seen["busy"], server.seen["short"]) == (3, 2)


def test_a_server_that_is_not_there() -> None:
    (found,) = judged(Hostile(port=1), "x", timeout=0.5)
    assert isinstance(found, NoAnswer) and "127.0.0.1:1/v1/chat/completions cannot be reached" in str(found)


def test_many_at_once_and_not_more(server: Hostile) -> None:
    words = [f"answer {i}" for i in range(24)]
    assert judged(server, *words, concurrency=6) == [0.25] * 24
    assert 2 <= server.most <= 6


def test_what_the_judge_is_asked(server: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_REWARD_TOKEN", "secret")
    template = "Q {prompt} G {gold} A {completion} {other}"
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "who?"}]
    prompts: list[Any] = ["why {gold}?", talk]
    keys: dict[str, Any] = {"template": template, "tokens": 9, "timeout": 5.0}
    found = asyncio.run(judges.judge(["{prompt}", "b"], prompts, ["7", None], address=f"{server.url}/v1/", **keys))
    assert found == [0.25, 0.25] and server.tokens == {"Bearer secret"}
    asked = sorted(body["messages"][0]["content"] for body in server.bodies)
    assert asked == ["Q (system) Be kind.\nwho? G  A b {other}", "Q why {gold}? G 7 A {prompt} {other}"]
    assert all((b["max_tokens"], b["temperature"], "model" in b) == (9, 0, False) for b in server.bodies)


def test_the_same_question_is_asked_once(server: Hostile, cache: Path) -> None:
    assert judged(server, "a", "a", "b") == [0.25] * 3 and judged(server, "b", "a") == [0.25] * 2
    assert server.seen == {"a": 1, "b": 1} and len(list(cache.rglob("*.json"))) == 2
    assert judged(server, "a", cache=False) == [0.25] and server.seen["a"] == 2
    assert judged(server, "a", tokens=7) == [0.25] and server.seen["a"] == 3  # another question
    for file in cache.rglob("*.json"):
        file.write_text('{"reply": ')
    assert judged(server, "a", "b") == [0.25] * 2 and server.seen == {"a": 4, "b": 2}
    judged(server, "say:no score")
    judged(server, "say:no score")
    assert server.seen["say:no score"] == 2  # what could not be used is not kept


def scored(functions: list[str], completions: list[str], timeout: float, **options: Any) -> list[Score]:
    async def run() -> list[Score]:
        n = len(completions)
        async with Rewards(functions, timeout=timeout, options=options) as rewards:
            return await rewards.score(["?"] * n, completions, {"judge": ["a column"] * n}, [None] * n)

    return asyncio.run(run())


def test_through_the_worker_an_error_is_of_its_own_answer(server: Hostile) -> None:
    options = {"judge": f"{server.url}/v1#m", "judge_template": "{completion}", "judge_timeout": 8.0}
    good, bad, late = scored(["judge"], ["fine", "say:hm", "hang"], 8.0, **options)
    assert (good.value, good.parts, good.outcome) == (0.25, {"judge": 0.25}, "ok")
    assert bad.outcome == late.outcome == "env_error"
    assert "reward judge: " in bad.detail and "no score" in bad.detail and "7.2 s" in late.detail


def test_a_served_reward_model_is_asked_in_the_same_way(server: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birl.rewards.requests.FIRST_PAUSE", 0.01)
    words = ["abc", "busy", "500", "list", *map(str, range(20))]
    found = asyncio.run(endpoint(words, ["?"] * len(words), address=f"{server.url}/pooling", concurrency=5, timeout=4))
    assert found[:2] == [3.0, 4.0] and found[4:] == [float(len(w)) for w in words[4:]]
    assert "says 500: out of memory" in str(found[2]) and "gave no score: []" in str(found[3])
    assert 2 <= server.most <= 5 and server.bodies[0]["add_generation_prompt"] is False


def test_every_key_reaches_the_judge(
    server: Hostile, cache: Path, tmp_path: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("My {completion}")

    async def score(*words: str) -> list[Score]:
        config = load(schema.Eval, ["data.validation=x", "reward=judge", f"reward.judge={server.url}/v1#m", *words])
        rewards = make_rewards(config, compute)
        assert rewards is not None
        async with rewards:
            texts = [f"{i}" for i in range(8)]
            return await rewards.score(["?"] * 8, texts, {}, [None] * 8)

    found = asyncio.run(score("reward.judge_tokens=9", "reward.concurrency=2", "reward.judge_prompt=own.txt"))
    assert [s.value for s in found] == [0.25] * 8 and server.most <= 2
    assert {b["max_tokens"] for b in server.bodies} == {9} and {b["model"] for b in server.bodies} == {"m"}
    assert set(server.seen) == {f"My {i}" for i in range(8)} and len(list(cache.rglob("*.json"))) == 8
    asyncio.run(score("reward.judge_cache=false"))
    assert len(list(cache.rglob("*.json"))) == 8 and any("You judge an answer" in text for text in server.seen)


def test_a_template_must_show_the_answer(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Is it good?")
    with pytest.raises(BirlError, match=r"has no \{completion\}"):
        judges.read_template(str(tmp_path / "t.txt"))
    (tmp_path / "t.txt").write_text("Is {completion} good?")
    assert judges.read_template(str(tmp_path / "t.txt")) == "Is {completion} good?"
    assert "{completion}" in judges.read_template("") and "Score: 0.5" in judges.TEMPLATE


def test_birls_own_server_as_the_judge(tiny: Path, tmp_path: Path) -> None:
    """A tiny model learns to judge, is served, and its verdict is the reward of an evaluation of another."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Judge {completion}")
    words = [f"model.path={tiny}", "model.dtype=float32", "data.train=[given]", "steps=60", "batch_size=8"]
    words += ["optimizer.lr=3e-3", "validation.every=0", "checkpoint.every=0", "track.console=off", "threads=1"]
    words += ["track.tensorboard=false", "track.report=false", f"run={tmp_path}/run"]
    rows = [{"prompt": f"Judge {i}", "response": "Fine.\nScore: 0.75"} for i in range(40)]
    train(load(schema.SFT, words), given=Given(train=rows))
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    export.export(newest, tmp_path / "run", tmp_path / "judge", torch.float32)
    with running(tmp_path / "judge", model={"dtype": "float32"}) as served:
        name = served.service.name
        options = {"judge": f"{served.url}/v1#{name}", "judge_template": "Judge {completion}", "judge_timeout": 8.0}
        found = scored(["judge"], ["3", "17"], 20.0, **options, judge_tokens=20)
        assert [s.value for s in found] == [0.75, 0.75], found
        (other,) = scored(["judge"], ["3"], 20.0, **options | {"judge": f"{served.url}/v1#nobody"})
        assert other.outcome == "env_error" and "says 404" in other.detail
        cut = scored(["judge"], ["5"], 20.0, **options, judge_tokens=2)
        assert "was cut after reward.judge_tokens" in cut[0].detail
        assert json.loads(next((tmp_path / "cache" / "judge").rglob("*.json")).read_text())["reply"].endswith("0.75")
