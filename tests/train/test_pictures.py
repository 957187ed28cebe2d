"""Runs on rows with pictures: every command, resume, other processes, and what the run shows of them."""

import base64
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.cli import main
from birl.learner import checkpoint, step_folders
from birl.view.trajectory import picture
from tests import sights
from tests.train.test_resume import finish, same, start, wait_for_step

QUIET = ("track.tensorboard=false", "track.console=off", "model.dtype=float32")
ROLLOUT = ("rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=6", "rollout.max_failure_rate=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sights.folder(tmp_path_factory.mktemp("sees") / "m")


def rows(path: Path) -> dict[str, str]:
    """Files of rows for each command; pictures as files, base64 and in a column."""
    talks, prompts, pairs = [], [], []
    for i in range(6):
        data = sights.drawn(str(i))
        (path / f"{i}.png").write_bytes(data)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        image = {"type": "image", "image": f"{i}.png"} if i % 2 else {"type": "image_url", "image_url": {"url": url}}
        asked = [{"role": "user", "content": [image, {"type": "text", "text": "Which digit?"}]}]
        talks.append({"messages": [*asked, {"role": "assistant", "content": str(i)}]})
        prompts.append({"prompt": asked, "answer": str(i)})
        pairs.append({"prompt": "Which?", "images": [f"{i}.png"], "chosen": str(i), "rejected": str(i + 1)})
    (path / "judge.py").write_text(
        "def length(completions, **_):\n    return [float(len(str(c))) for c in completions]\n"
    )
    result = {}
    for name, own in {"sft": talks, "rl": prompts, "dpo": pairs, "rm": pairs}.items():
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, own)))
        result[name] = str(path / f"{name}.jsonl")
    return result


def run(command: str, folder: Path, data: str, goal: Path, *words: str) -> dict[str, Any]:
    judged = f"reward.functions=[{Path(data).parent / 'judge.py'}:length]"
    small = (*ROLLOUT, judged) if command == "rl" else ("batch_size=3",)
    assert main([command, f"model={folder}", f"data.train=[{data}]", f"run={goal}", *QUIET, *small, *words]) == 0
    return run_metrics(goal)


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = step_folders.latest(run / "checkpoints")
    assert newest is not None
    return checkpoint.read_tensors(newest, "model.")


@pytest.mark.parametrize(
    ("command", "kind"), [*((c, "qwen3_vl") for c in ("sft", "dpo", "rm", "rl")), ("sft", "qwen3_5"), ("rl", "qwen3_5")]
)
def test_a_resumed_run_is_the_uninterrupted_one(command: str, kind: str, folder: Path, tmp_path: Path) -> None:
    data = rows(tmp_path)[command]
    more = ("optimizer.lr=0.001",)
    if kind != "qwen3_vl":  # whose text alone has a class, too
        folder, more = sights.folder(tmp_path / "m", kind), (*more, "model.pictures=true")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(command, folder, data, whole, "steps=4", *more)
    run(command, folder, data, parts, "steps=2", *more)
    run(command, folder, data, parts, "steps=4", *more)
    one, two = weights(whole), weights(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert float(run_metrics(whole)["grad_norm"]) > 0
    assert len(list((whole / "pictures").iterdir())) == 6


def test_kill_minus_nine_changes_no_bit(tmp_path: Path) -> None:
    """In the middle of a step, and while a checkpoint is written."""
    folder, data = sights.folder(tmp_path / "m", "qwen3_5"), rows(tmp_path)["rl"]
    judged = f"reward.functions=[{tmp_path / 'judge.py'}:length]"
    words = ["rl", f"model={folder}", f"data.train=[{data}]", *QUIET, *ROLLOUT, judged, "model.pictures=true"]
    words += ["steps=5", "optimizer.lr=0.001", "checkpoint.every=1", "checkpoint.keep_last=0", "threads=1"]
    assert finish(start([*words, f"run={tmp_path / 'whole'}"])) == 0
    killed = [*words, f"run={tmp_path / 'killed'}"]
    process = start(killed)
    wait_for_step(tmp_path / "killed", 1)
    process.kill()
    assert finish(process) == -signal.SIGKILL
    assert finish(start(killed, die_at=9)) == -signal.SIGKILL
    assert finish(start(killed)) == 0
    same(tmp_path / "whole", tmp_path / "killed")


def test_rollouts_are_those_of_the_learner_and_show_their_pictures(folder: Path, tmp_path: Path) -> None:
    goal, data = tmp_path / "run", rows(tmp_path)["rl"]
    validated = (f"data.validation=[{data}]", "validation.at_start=true")
    metrics = run("rl", folder, data, goal, "steps=2", *validated)
    records = [json.loads(line) for line in (goal / "rollouts.jsonl").read_text().splitlines()]
    assert max(gap for r in records for s in r["samples"] for gap in s["gaps"]) <= 1e-5
    assert all((goal / file).is_file() for r in records for file in r["pictures"])
    assert picture(goal, records[0], 0).read_bytes().startswith(b"\x89PNG")  # on the live page
    assert "data:image/png;base64," in (goal / "report.html").read_text()
    assert metrics["step"] == 2 and metrics["grad_norm"] > 0


def test_a_recorded_run_is_replayed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, again = rows(tmp_path)["rl"], ("debug.resample=true", "track.console=plain")
    run("rl", folder, data, tmp_path / "one", "steps=2", "track.record=true")
    run("rl", folder, data, tmp_path / "two", "steps=2", f"debug.replay={tmp_path / 'one'}", *again)
    assert "bit-identical" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("algorithm=ppo", "critic.path={}"), ("algorithm=distill", "algorithm.teacher={}")])
def test_a_critic_and_a_teacher_see(words: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    run("rl", folder, rows(tmp_path)["rl"], tmp_path / "run", "steps=1", *(w.format(folder) for w in words))


def test_the_export_of_a_run_sees(folder: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    files = rows(tmp_path)
    run("sft", folder, files["sft"], first, "steps=1")
    run("rl", first, files["rl"], tmp_path / "second", "steps=1")


def test_what_is_not_built_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(tmp_path)["sft"]
    words = [f"model={folder}", f"data.train=[{data}]", *QUIET, "steps=1"]
    assert main(["sft", *words, f"run={tmp_path / 'q'}", "lora.quantize=int8", "lora.rank=2"]) == 2
    assert "has a vision tower, for which lora.quantize=int8 is not built" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "Which?", "images": ["none.png"], "response": "x"}))
    assert (
        main(["sft", f"model={folder}", f"data.train=[{tmp_path / 'bad.jsonl'}]", *QUIET, f"run={tmp_path / 'r'}"]) == 2
    )
    assert "row 1: `images` names the file 'none.png'" in capsys.readouterr().err


def run_metrics(goal: Path) -> dict[str, Any]:
    return json.loads((goal / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.usefixtures("forking")
def test_an_engine_in_another_process_sees_the_same(folder: Path, tmp_path: Path) -> None:
    """Synchronous training with `birl serve` beside it is the run within one process."""
    data = rows(tmp_path)["rl"]
    run("rl", folder, data, tmp_path / "one", "steps=2", "optimizer.lr=0.001")
    other = ("engine.kind=birl", "engine.count=1", "engine.kv_cache_gb=0.02")
    run("rl", folder, data, tmp_path / "two", "steps=2", "optimizer.lr=0.001", *other)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


WORLD = """
from pathlib import Path
from birl.types import Feedback, Message, Picture, PLACE

class Shows:
    '''A picture at first, and another one for each answer.'''
    def __init__(self, task, config):
        self.task, self.turn = task, 0
    def shown(self, text):
        picture = Picture.of(Path(__file__).with_name(f"{self.turn}.png").read_bytes())
        return Message(role="user", content=f"{PLACE}{text}", pictures=(picture,))
    async def start(self):
        return (self.shown("Which?"),)
    async def step(self, reply):
        self.turn += 1
        return Feedback(messages=(self.shown("And this?"),), reward=float(len(reply.content) % 3), done=self.turn == 3)
    async def close(self): pass
"""


def test_an_environment_shows_pictures_in_every_turn(folder: Path, tmp_path: Path) -> None:
    """The engine's log-probs are the learner's over all turns, whose tokens are one sequence."""
    data, goal = rows(tmp_path)["rl"], tmp_path / "run"
    (tmp_path / "world.py").write_text(WORLD)
    words = (f"env.kind={tmp_path / 'world.py'}:Shows", "env.max_turns=3", "steps=1", "optimizer.lr=0.001")
    words += ("rollout.stop=[e,a,i,o,n]", "rollout.max_tokens=60")
    run("rl", folder, data, goal, *words)
    records = [json.loads(line) for line in (goal / "rollouts.jsonl").read_text().splitlines()]
    whole = [r for r in records if len(r["turns"]) == 3]
    assert whole and all(len(r["pictures"]) == 3 and len(r["samples"]) == 1 for r in whole)
    gaps = [gap for r in records for s in r["samples"] for gap in s.get("gaps", ())]  # of what was trained
    assert gaps and max(gaps) <= 1e-5
