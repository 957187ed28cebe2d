"""An asynchronous run, written down and run again: the same bits, or the step that differs."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.rollout import replay as replaying
from birl.rollout.replay import _group_from, _group_to
from birl.samples import Support
from birl.types import (
    PICTURES,
    PLACE,
    Completion,
    Group,
    Message,
    Outcome,
    Picture,
    Stop,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from tests.train.test_rl import log, run

RECORDED = (
    *("rollout.max_tokens=40", "rollout.prompts=2", "rollout.group_size=4", "engine.max_batch=6", "steps=6"),
    *("rollout.max_staleness=3", "model.dtype=bfloat16", "optimizer.lr=0.01", "seed=3"),
)


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    run(tiny, folder, *RECORDED, "track.record=true")
    assert max(m["staleness/max"] for m in log(folder)) > 0  # time had its say
    return folder / "run"


def test_a_step_is_written_down_whole(tmp_path: Path) -> None:
    call = ToolCall(name="weather", arguments='{"city": "Oslo"}', id="1")
    shown = Picture.of(b"the bytes of a file")
    (tmp_path / PICTURES).mkdir()
    (tmp_path / PICTURES / shown.digest).write_bytes(shown.data)
    asked = (
        Message(role="user", content=f"Hi {PLACE}", pictures=(shown,)),
        Message(role="assistant", content="", thinking="Hm", tool_calls=(call,)),
        Message(role="tool", content="Rain", tool_call_id="1", name="weather"),
    )
    said = Completion(tokens=(5, 2), logprobs=(-0.1, -0.2), versions=(3, 3), stop=Stop.STOP, routes=b"\x00\xff\x01\x02",
                      support=Support(counts=(2, 0), ids=(5, 8)))  # fmt: skip
    episode = Trajectory(
        turns=(Turn(prompt=(1, 4), completion=said, rewards={"a": 0.5}),), reward=1.0, score=1.0, outcome=Outcome.OK
    )
    group = Group(index=1, task=Task(id="t", prompt=asked, columns={"env": "sums", "tests": [{"n": 1}]}),
                  trajectories=(episode,), start_version=3)  # fmt: skip
    assert _group_from(json.loads(json.dumps(_group_to(group))), tmp_path) == group


def test_the_same_bits_come_out(tiny: Path, tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture) -> None:
    run(tiny, tmp_path, *RECORDED, f"debug.replay={recorded}", "debug.resample=true", "track.console=plain")
    assert "every figure is equal" in (told := capsys.readouterr().out) and "sampled again, bit-identical" in told
    states = [checkpoint.read_tensors(step_folders.latest(f / "checkpoints")) for f in (recorded, tmp_path / "run")]
    assert all((states[0][k] == states[1][k]).all() for k in states[0])


def test_greedy_answers_are_recorded_too(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Without their rewards a replay had no group that counts."""
    run(tiny, tmp_path / "a", "algorithm=remax", "steps=2", "track.record=true")
    run(tiny, tmp_path / "b", "algorithm=remax", "steps=2", f"debug.replay={tmp_path}/a/run", "track.console=plain")
    assert "Replayed 2 steps" in capsys.readouterr().out
    assert log(tmp_path / "b")[-1]["tokens/trained"] == log(tmp_path / "a")[-1]["tokens/trained"] > 0


def test_a_replay_stops_and_goes_on(
    tiny: Path, tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ctrl-C was heard when it was over, and a replay that went on began with the first step again."""
    plain = replaying.differences

    def interrupted(step: int, *rest: Any) -> list[str]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(step, *rest)

    words = (*RECORDED, f"debug.replay={recorded}", "track.console=plain")
    with monkeypatch.context() as patch:
        patch.setattr(replaying, "differences", interrupted)
        summary = run(tiny, tmp_path, *words)
    assert (summary["finished"], summary["signal"], summary["step"]) == (False, signal.SIGINT, 2)
    assert run(tiny, tmp_path, *words)["finished"] and "Replayed 4 steps" in capsys.readouterr().out
    states = [checkpoint.read_tensors(step_folders.latest(f / "checkpoints")) for f in (recorded, tmp_path / "run")]
    assert all((states[0][k] == states[1][k]).all() for k in states[0])


def test_a_figure_that_differs_is_named(tiny: Path, tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(BirlError, match=r"step 1: .*grad_norm"):
        run(
            tiny, tmp_path, *RECORDED, f"debug.replay={recorded}", "learner.gradient_checkpointing=false", "lora.rank=2"
        )


def test_a_token_that_differs_is_named(tiny: Path, tmp_path: Path, recorded: Path) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    lines = (recorded / "record.jsonl").read_bytes().splitlines()
    row = json.loads(lines[-1])
    turn = row["groups"][-1]["trajectories"][-1]["turns"][0]
    turn["tokens"][1] = (turn["tokens"][1] + 1) % 300 + 3
    (changed / "record.jsonl").write_bytes(b"\n".join([*lines[:-1], json.dumps(row).encode()]) + b"\n")
    (changed / "metrics.jsonl").write_text((recorded / "metrics.jsonl").read_text())
    with pytest.raises(BirlError, match=r"Group \d+, episode \d+, turn 0: token \d"):
        run(tiny, tmp_path, *RECORDED, f"debug.replay={changed}", "debug.resample=true")


def test_what_cannot_be_replayed_says_so(tiny: Path, tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(BirlError, match=r"track.record=true"):
        run(tiny, tmp_path, *RECORDED, f"debug.replay={tmp_path}")
    (tmp_path / "record.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(BirlError, match="not a step of a run"):
        run(tiny, tmp_path, *RECORDED, f"debug.replay={tmp_path}")
    with pytest.raises(BirlError, match="name another folder with run="):
        run(tiny, tmp_path, *RECORDED, f"debug.replay={tmp_path}/run")


def test_pictures_are_taken_from_the_recorded_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "a" / PICTURES).mkdir(parents=True)
    (tmp_path / "key").write_bytes(b"private")
    (tmp_path / "a" / PICTURES / "x").symlink_to(tmp_path / "key")
    with pytest.raises(BirlError, match="outside the folder"):
        replaying.take_pictures(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    with pytest.raises(BirlError, match="outside the folder"):
        replaying._message_from({"role": "user", "content": "", "tool_calls": [], "pictures": ["x"]}, tmp_path / "a")
    (tmp_path / "a" / PICTURES / "x").unlink()
    os.mkfifo(tmp_path / "a" / PICTURES / "x")
    with pytest.raises(BirlError, match="a named pipe"):
        replaying.take_pictures(tmp_path / "a", tmp_path / "b")


def test_only_steps_with_figures_are_compared(
    tiny: Path, tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run that is killed has written down what it would train on, and nothing of what came out."""
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "record.jsonl").write_text((recorded / "record.jsonl").read_text())
    figures = (recorded / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(figures[:2]))
    run(tiny, tmp_path, *RECORDED, f"debug.replay={killed}", "track.console=plain")
    assert "Replayed 2 steps" in capsys.readouterr().out
    (killed / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(BirlError, match="6 recorded steps, and no figures"):
        run(tiny, tmp_path / "b", *RECORDED, f"debug.replay={killed}")


def test_sampling_alone_leaves_the_weights(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "steps=3", "debug.only_rollout=true")
    assert all(m["updates/done"] == 0 and m["tokens/generated"] > 0 for m in log(tmp_path))
    assert {v for r in log(tmp_path, "rollouts") for s in r["samples"] for v in s["versions"]} == {-1, 0}
