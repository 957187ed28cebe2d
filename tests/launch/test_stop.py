"""`birl stop` of a job that has ended already tells how, and still gives back what belongs to it."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from birl.cli import main
from birl.launch import modal, ray, slurm_queue
from birl.launch.launcher import WHERE, Handle
from tests.launch import places

Place = Callable[[pytest.MonkeyPatch, Path, str], dict[str, Any]]


def of_ray(monkeypatch: pytest.MonkeyPatch, here: Path, state: str) -> dict[str, Any]:
    def asked(handle: Handle) -> Any:
        states = iter([state or "running", "stopped"])
        return lambda method: (next(states), "", []) if method == "status" else None

    monkeypatch.setattr(ray, "Asked", asked)
    return {"address": "auto", "without_token": False}


def of_modal(monkeypatch: pytest.MonkeyPatch, here: Path, state: str) -> dict[str, Any]:
    given = iter([None] if not state else [])
    code = {"failed": 1}.get(state, 0)
    notes = {"learner": {"state": state or "running", "time": 0}}
    client = SimpleNamespace(
        exception=SimpleNamespace(AuthError=PermissionError, Error=RuntimeError, OutputExpiredError=LookupError),
        Dict=SimpleNamespace(from_name=lambda *a, **k: SimpleNamespace(get=notes.get, put=lambda *a: None)),
        FunctionCall=SimpleNamespace(from_id=lambda name: SimpleNamespace()),
    )
    monkeypatch.setattr(modal, "client", lambda: client)
    monkeypatch.setattr(modal, "outcome", lambda client, call: next(given, code))
    monkeypatch.setattr(modal, "POLL", 0.01)
    monkeypatch.setattr(modal, "cli", lambda *words: ["modal", *words])
    return {"learner": "fc", "app": "birl-x", "environment": "", "count": 1, "stop_timeout": 5, "volume": "v"}


def of_slurm(monkeypatch: pytest.MonkeyPatch, here: Path, state: str) -> dict[str, Any]:
    (here / "launch").mkdir()
    (here / "launch" / slurm_queue.STATE).write_text(f"demo {state or 'running'}\n")
    jobs = [[SimpleNamespace(state=slurm_queue.WAITING[0], job="7")]] if not state else []
    monkeypatch.setattr(slurm_queue, "seen", lambda handle: jobs.pop() if jobs else [])
    monkeypatch.setattr(slurm_queue, "ask", lambda words: "")
    monkeypatch.setattr(slurm_queue.time, "sleep", lambda seconds: None)
    return {"array": False, "folders": [str(here)], "roles": {"learner": 1}, "ranks": 1}


def of_cluster(monkeypatch: pytest.MonkeyPatch, here: Path, state: str) -> dict[str, Any]:
    """What the head prints comes back through the program of the place."""
    said = f"demo had ended before: it is {state}." if state else "demo was stopped."
    places.stand_ins(here, ("ray", "aws", "sky", "ssh"), {"birl stop": said})
    return {"cluster": "c", "place": "p", "bucket": "s3://b", "keep": False, "region": "us-west-2"}


HOW: dict[str, Place] = {"ray": of_ray, "modal": of_modal, "slurm": of_slurm}
HOW |= dict.fromkeys(("aws", "kubernetes", "skypilot"), of_cluster)


def test_no_place_is_left_out() -> None:
    assert {*HOW, "local", "torchrun"} == set(WHERE)  # those two refuse it, in test_local.py


@pytest.mark.parametrize("state", ["done", "failed", "stopped", ""])
@pytest.mark.parametrize("where", HOW)
def test_how_it_had_ended_is_told(
    where: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places.stand_ins(tmp_path, ("modal",))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    more = HOW[where](monkeypatch, tmp_path, state)
    Handle(where=where, id="demo", run=str(tmp_path), name="demo", more=more).save()
    assert main(["stop", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"demo had ended before: it is {state}." in said if state else "demo was stopped" in said
    assert ("was stopped" in said) is (not state)
