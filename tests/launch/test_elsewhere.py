"""What aws, kubernetes and skypilot share: which files go along, what the head runs, what it answers."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch import command, elsewhere, external, job
from birl.launch.launcher import Handle, Status
from tests.launch import places


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(places.folder(tmp_path))
    return tmp_path


def made(*more: str) -> tuple[job.Job, elsewhere.Keys]:
    keys, words = command.keys_of(elsewhere.Keys, [*places.words("skypilot")[2:], *more])
    return job.derive("rl", words, keys), keys


def test_files_go_along_that_the_command_or_its_recipe_names(here: Path) -> None:
    for name in ("data/more.jsonl", "own.py", "extra/a.txt", "not-named.txt"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text("def score(completions, prompts): return [1.0] * len(completions)\n" + places.ROW)
    words = (f"data.train=[my.jsonl,{here}/data/more.jsonl]", "data.validation=data/more.jsonl", "reward=own.py:score")
    assert elsewhere.sent(*made(*words)) == ["data/more.jsonl", "my.jsonl", "own.py", "recipe.yaml"]
    assert elsewhere.sent(*made("launch.files=extra"))[0] == "extra"
    assert "my.jsonl" in elsewhere.sent(*made())  # only the recipe names it


@pytest.mark.parametrize("more", [(), ("run=runs/other",), ("run=runs/other", "steps=5")])
def test_the_run_folder_is_given_once(more: tuple[str, ...], here: Path) -> None:
    made_job, keys = made("engine.kind=birl", *more)
    commands = [elsewhere.command(made_job, keys), *(role.command for role in made_job.roles)]
    for words in commands:
        assert [w for w in words if w.startswith("run=")] == [f"run={made_job.run}"], words
    assert len(commands) == 3 and str(made_job.run) == ("runs/other" if more else "runs/demo")


@pytest.mark.parametrize("name", ["nothing.txt", "../x", "/etc/passwd"])
def test_other_files_are_refused(name: str, here: Path) -> None:
    (here.parent / "x").write_text("")
    with pytest.raises(BirlError, match=r"launch\.files"):
        elsewhere.sent(*made(f"launch.files={name}"))


def test_what_status_prints_can_be_read_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Status(role="learner", index=0, state="running", where="10.0.0.5 pid 17", detail="step 3"),
        Status(role="engine", index=11, state="restarting", detail="was killed"),
        Status(role="a-role-with-a-long-name", index=2, state="done"),
    ]
    place = type("Place", (), {"status": staticmethod(lambda handle: rows)})
    monkeypatch.setattr(command, "launcher", lambda where: place)
    Handle(where="skypilot", id="x", run="runs/demo", name="demo").save()
    command.status(["runs/demo"])
    found = elsewhere.statuses(capsys.readouterr().out)
    assert [(s.role, s.index, s.state) for s in found] == [(r.role, r.index, r.state) for r in rows]
    assert "step 3" in found[0].detail and "was killed" in found[1].detail


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", "demo"),
        ("Llama_3.1--x", "llama-3-1-x"),
        ("-", "run"),
        ("a" * 60, "a" * 52),
        ("a" * 51 + "-b", "a" * 51),
    ],
)
def test_names_of_machines(name: str, expected: str) -> None:
    assert elsewhere.named(name) == expected


@pytest.mark.skipif(find_spec("birl.launch.ray") is None, reason="birl.launch.ray is not there")
def test_ray_takes_what_the_head_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    keys = ("launch.gpus=1", "launch.cpus=2", "launch.memory_gb=3", "launch.nodes=2", "launch.env=HF_TOKEN")
    birl, *words = elsewhere.command(*made(*keys))
    assert birl == "birl" and main([*words, "--dry-run"]) == 0
    assert "learner: 1 x (1 GPU, 2 CPU, 3 GiB)" in capsys.readouterr().out


def test_programs_that_fail_or_are_late_or_missing() -> None:
    assert external.run(("sh", "-c", "echo a; echo b >&2")) == "a\n"
    with pytest.raises(BirlError, match=r"ended with code 3\. why"):
        external.run(("sh", "-c", "echo why >&2; exit 3"))
    with pytest.raises(BirlError, match=r"longer than 0\.2 s"):
        external.run(("sleep", "5"), timeout=0.2)
    with pytest.raises(BirlError, match="not installed"):
        external.run(("no-such-program",))
    lines = external.lines(("sh", "-c", "echo 1; echo 2; sleep 60"))
    assert [next(lines), next(lines)] == ["1\n", "2\n"]
    lines.close()  # and it ends
    assert [*external.lines(("sh", "-c", "echo 1; exec sleep 60"), over=lambda: True)] == ["1\n"]
