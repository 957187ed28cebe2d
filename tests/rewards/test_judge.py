"""A judge's words become a score or an error, never a made-up 0, whatever the server does."""

import asyncio
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import export, step_folders
from birl.learner.rewards import check_served, make_rewards
from birl.named import Given
from birl.process import free_port
from birl.rewards import judge as judges
from birl.rewards import questions
from birl.rewards.questions import Manner, read_template, settings
from birl.rewards.requests import NoAnswer, endpoint
from birl.rewards.score import Rewards, Score
from birl.train.command import train
from tests.rewards.hostile import Hostile
from tests.server.running import running

pytestmark = pytest.mark.usefixtures("cache")


def panel(server: Hostile, template: str = "{completion}", **keys: Any) -> dict[str, Any]:
    """Of one judge, unless `judges` names others. `mode`, `rounds` and `seed` are those of its manner."""
    manner = {"template": template} | {name: keys.pop(name) for name in ("mode", "rounds", "seed") if name in keys}
    return {"judges": [f"{server.url}/v1#the-judge"], "manner": manner, "timeout": 5.0, **keys}


def judged(server: Hostile, *completions: str, columns: Any = None, **keys: Any) -> list[Any]:
    n = len(completions)
    own = panel(server, **keys)
    return asyncio.run(judges.judge(list(completions), ["?"] * n, [None] * n, panel=own, **(columns or {})))


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Score: 0.75", 0.75),
        ("Good.\n\nScore: 1\n", 1.0),
        ("**Score: 0.5**", 0.5),
        ("**Score:** 0", 0.0),
        ("Score: 1.000", 1.0),
        ("**Score**: 0.5", 0.5),
        ("Score: **0.5**", 0.5),
        ("`Score: 0.5`", 0.5),
        ("```\nScore: 0.5\n```", 0.5),
        ("Score: 0.2\nScore: 0.9", 0.9),
    ],
)
def test_a_score_is_read_from_the_last_line(reply: str, value: float) -> None:
    assert questions.score(reply) == (value,)


NO_SCORES = ("", "0.5", "Score: 5", "Score: 1.5", "Score: -0.5", "Score: 0.5/1", "Score: 80%", "score: 0.5",
             "Score: 0.5\nBye.", "I say Score: 0.5", "Score: .5", "Score: 0,5", "Score: nan", "Score: 1e-1",
             "Score: 0.5 or 0.6", "Score: 01")  # fmt: skip


@pytest.mark.parametrize("reply", NO_SCORES)
def test_anything_else_is_no_score(reply: str) -> None:
    with pytest.raises(ValueError, match="no verdict such as"):
        questions.score(reply)


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
    "say:I like it.": "last line is no verdict .*I like it",
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
    (found,) = judged(Hostile(port=1), "x", timeout=5.0)
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
    own = panel(server, template, tokens=9, judges=[f"{server.url}/v1/"])
    assert asyncio.run(judges.judge(["{prompt}", "b"], prompts, ["7", None], panel=own)) == [0.25, 0.25]
    assert server.tokens == {"Bearer secret"}
    asked = sorted(body["messages"][0]["content"] for body in server.bodies)
    marks = [re.search(r"<answer-([0-9a-f]{12})>", text)[1] for text in asked]  # type: ignore[index]
    assert asked[0].startswith(
        f"Q (system) Be kind.\nwho? G  A <answer-{marks[0]}>\nb\n</answer-{marks[0]}> {{other}}\n\nWhat stands between"
    )
    assert asked[1].startswith(f"Q why {{gold}}? G 7 A <answer-{marks[1]}>\n{{prompt}}\n</answer-{marks[1]}> {{other}}")
    assert all(text.endswith("\nScore: 0.5") for text in asked)
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
            return await rewards.score(["?"] * n, completions, {"panel": ["a column"] * n}, [None] * n, state={})

    return asyncio.run(run())


def test_through_the_worker_an_error_is_of_its_own_answer(server: Hostile) -> None:
    good, bad, late = scored(["judge"], ["fine", "say:hm", "hang"], 8.0, panel=panel(server, timeout=8.0))
    assert (good.value, good.parts, good.outcome) == (0.25, {"judge": 0.25}, "ok")
    assert bad.outcome == late.outcome == "env_error"
    assert good.logged["judge_unreadable"] == good.logged["judge_timeout"] == pytest.approx(1 / 3)
    assert good.extra == {"judge": "Fine.\nScore: 0.25"} and bad.extra == {"judge": "hm"}
    with pytest.raises(BirlError, match="no judge is named"):
        scored(["judge"], ["fine"], 8.0)
    assert "reward judge: " in bad.detail and "no verdict" in bad.detail and "7.2 s" in late.detail


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

    async def score(*words: str, columns: Any = None) -> list[Score]:
        config = load(schema.Eval, ["data.validation=x", "reward=judge", f"reward.judge={server.url}/v1#m", *words])
        rewards = make_rewards(config, compute)
        assert rewards is not None
        async with rewards:
            texts = [f"{i}" for i in range(8)]
            return await rewards.score(["?"] * 8, texts, columns or {}, [None] * 8)

    found = asyncio.run(score("reward.judge_tokens=9", "reward.concurrency=2", "reward.judge_prompt=own.txt"))
    assert [s.value for s in found] == [0.25] * 8 and server.most <= 2
    assert {b["max_tokens"] for b in server.bodies} == {9} and {b["model"] for b in server.bodies} == {"m"}
    assert set(server.seen) == set("01234567") and len(list(cache.rglob("*.json"))) == 8
    assert all(body["messages"][0]["content"].startswith("My <answer-") for body in server.bodies)
    asyncio.run(score("reward.judge_cache=false"))
    assert len(list(cache.rglob("*.json"))) == 8
    server.judge = lambda shown, body: "Scores: " + ", ".join(f"{i}=0.5" for i in range(1, len(shown) + 1))
    rest = ["reward.judge_mode=group", "reward.judge_rounds=2", "reward.judge_rate=60000", "reward.workers=2"]
    rest += ["reward.judge_rubric=['2: It is right.']", f"reward.judge=[{server.url}/v1#a,{server.url}/v1#b]"]
    before = len(server.bodies)
    rest += ["reward.judge_rubric_column=own", "reward.judge_panel=median"]
    assert [s.value for s in asyncio.run(score(*rest, columns={"own": [None] * 8}))] == [0.5] * 8
    asked = [body["messages"][0]["content"] for body in server.bodies[before:]]
    assert len(asked) == 4 and len(set(asked)) == 2 and all("1. It is right. (weight 2)" in text for text in asked)
    own = settings(load(schema.Eval, ["data.validation=x", "reward=judge", *rest, "reward.timeout=7", "seed=5"]))
    assert (own["rate"], own["timeout"], own["combine"], own["manner"]["seed"]) == (30000, 7, "median", 5)
    assert "You judge answers" in server.bodies[-1]["messages"][0]["content"]


def test_a_template_must_show_the_answer(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Is it good?")
    with pytest.raises(BirlError, match=r"has no \{completion\}"):
        read_template(str(tmp_path / "t.txt"))
    (tmp_path / "t.txt").write_text("Is {completion} good?")
    assert read_template(str(tmp_path / "t.txt")) == "Is {completion} good?"


def test_birls_own_server_as_the_judge(tiny: Path, tmp_path: Path) -> None:
    """A tiny model learns to judge, is served, and its verdict is the reward of an evaluation of another."""
    words = [f"model.path={tiny}", "model.dtype=float32", "data.train=[given]", "steps=60", "batch_size=8"]
    words += ["optimizer.lr=3e-3", "validation.every=0", "checkpoint.every=0", "track.console=off", "threads=1"]
    words += ["track.tensorboard=false", "track.report=false", f"run={tmp_path}/run"]
    group, one = Manner(template="{completion}", mode="group"), Manner(template="{completion}")
    rows = [{"prompt": one.questions("?", "", [f"{i}"])[0].text, "response": "Fine.\nScore: 0.75"} for i in range(40)]
    for i in range(20):
        asked = group.questions("?", "", [f"{i}", f"{i + 20}"])[0].text
        rows.append({"prompt": asked, "response": "Fine.\nScores: 1=0.75, 2=0.25"})
    train(load(schema.SFT, words), given=Given(train=rows))
    newest = step_folders.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    export.export(newest, tmp_path / "run", tmp_path / "judge", torch.float32)
    with running(tmp_path / "judge", model={"dtype": "float32"}) as served:
        address = f"{served.url}/v1#{served.service.name}"
        own = {"judges": [address], "manner": {"template": "{completion}"}, "timeout": 20.0, "tokens": 40}
        assert [s.value for s in scored(["judge"], ["3", "17"], 20.0, panel=own)] == [0.75, 0.75]
        grouped = own | {"manner": own["manner"] | {"mode": "group"}}
        assert sorted(s.value for s in scored(["judge"], ["3", "23"], 20.0, panel=grouped)) == [0.25, 0.75]
        (other,) = scored(["judge"], ["3"], 20.0, panel=own | {"judges": [f"{served.url}/v1#nobody"]})
        assert other.outcome == "env_error" and "says 404" in other.detail
        cut = scored(["judge"], ["5"], 20.0, panel=own | {"tokens": 2})
        assert "was cut after reward.judge_tokens" in cut[0].detail
        assert "Score" in json.loads(next((tmp_path / "cache" / "judge").rglob("*.json")).read_text())["reply"]
        human = [{"prompt": "?", "response": f"{i}", "score": i % 2} for i in range(6)]
        (tmp_path / "judged.jsonl").write_text("\n".join(map(json.dumps, human)))
        (tmp_path / "prompt.txt").write_text("{completion}")
        keys = [f"data.validation={tmp_path}/judged.jsonl", f"reward.judge={address}", "reward.judge_tokens=40"]
        keys += [f"reward.judge_prompt={tmp_path}/prompt.txt", f"output={tmp_path}/out.json"]
        assert main(["eval", "--judge", *keys]) == 0
        assert [row["judge"] for row in json.loads((tmp_path / "out.json").read_text())["answers"]] == [0.75] * 6


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("reward=judge", "reward.judge={}/v1#m"), "reward.judge"),
        (("reward=model", "reward.model={}/pooling"), "reward.model"),
        (("reward=length", "algorithm=distill", "algorithm.teacher={}/v1/completions#t"), "algorithm.teacher"),
    ],
)
def test_a_server_that_is_not_there_is_told_before_anything_is_loaded(
    words: tuple[str, ...], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once noticed at the first step only, after models and engines had been loaded and a step rolled out."""

    def check(address: str, only_warn: bool = False) -> None:
        config = load(schema.RL, ["data.train=x", *(word.format(address) for word in words)])
        with ThreadPoolExecutor(1) as compute:
            asyncio.run(check_served(config, make_rewards(config, compute), only_warn))

    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(BirlError, match=rf"^{re.escape(key)}={nobody}/.*: cannot be reached .*Start that"):
        check(nobody)
    check(nobody, only_warn=True)
    assert f"Warning: {key}={nobody}" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as listening:
        check(f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert not capsys.readouterr().out
