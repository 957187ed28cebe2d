"""`Trainer(launcher=...)`: what becomes of MRL's parameters and of Python objects, and a job that really runs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from birl import BirlError, Trainer
from birl.launch import job as jobs
from birl.launch import launcher as places
from birl.launch import slurm
from birl.launch.command import keys_of, listed
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status
from birl.launch.program import launch_words, starts_when_imported

ROWS = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(4)]


@dataclass
class Place(ModuleType):
    """A launcher that runs the learner at once, in this process's folder. `jobs`: what was submitted."""

    jobs: list[tuple[Job, Any]] = field(default_factory=list)
    state: str = "done"

    def __post_init__(self) -> None:
        super().__init__("birl.launch.here")
        self.Keys: type[Any] = jobs.Keys

    def submit(self, job: Job, keys: Any) -> Handle:
        self.jobs.append((job, keys))
        return Handle(where="here", id="1", run=str(job.run), name=job.name)

    def logs(self, handle: Handle, role: str, follow: bool) -> Iterator[str]:
        assert (role, follow) == ("learner", True)
        done = subprocess.run(self.jobs[-1][0].learner.command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        yield from done.stdout.splitlines()

    def status(self, handle: Handle) -> Sequence[Status]:
        return [Status(role="learner", index=0, state=self.state, detail="exit code 1")]


Make = Callable[..., Trainer]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place()
    monkeypatch.setitem(sys.modules, "birl.launch.here", found)
    monkeypatch.setitem(places.WHERE, "here", "this test")
    return found


@pytest.fixture
def make(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place) -> Make:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def make(**arguments: Any) -> Trainer:
        overrides = {"threads": 1, "engine.kv_cache_gb": 0.05, "track.report": False, "rollout.max_failure_rate": 1}
        small: dict[str, Any] = {"num_generations": 2, "batch_size": 2, "max_tokens": 6, "max_steps": 1}
        given = {"model": str(tiny), "train_dataset": ROWS, "output_dir": "runs/demo", "launcher": "here", **small}
        return Trainer(**{**given, **arguments}, overrides={**overrides, **arguments.pop("overrides", {})})

    return make


def module(name: str, text: str) -> Any:
    Path(f"{name}.py").write_text(text)
    return __import__(name)


def test_a_job_of_python_objects_runs_in_another_process(
    make: Make, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = module("scores_of_mine", "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    summary = make(reward_funcs=[mine.score, "length"], launch={"gpus": 2, "cpus": 3}).train()
    assert summary["finished"] is True and summary["step"] == 1
    ((job, keys),) = place.jobs
    assert (keys.gpus, keys.cpus, job.learner.gpus, job.engine) == (2.0, 3, 2.0, None)
    assert "reward.functions=['scores_of_mine.py:score','length']" in job.words
    assert [json.loads(line) for line in Path("runs/demo-rows/train.jsonl").read_bytes().splitlines()] == ROWS
    assert "demo: done" in capsys.readouterr().out and Path("runs/demo/launch.json").is_file()


def test_a_job_that_failed_says_where_to_look(make: Make, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.state = "failed"
    monkeypatch.setattr(place, "logs", lambda *_: iter(["no\n"]))
    with pytest.raises(BirlError, match=r"learner 0 failed: exit code 1 `birl logs runs/demo` shows why"):
        make().train()


def test_the_parameters_of_mrl(make: Make) -> None:
    trainer = make(num_rollout_workers=2, weight_sync_method="volume")
    engine, weights = trainer.config.engine, trainer.config.weights
    assert (engine.kind, engine.count, weights.method) == ("birl", 2, "volume")
    trainer = make(launcher="modal", actor_gpu="H100", rollout_gpu="L4", num_rollout_workers=1, reward_funcs="sandbox")
    assert trainer.config.reward.functions == ["code"] and trainer.config.sandbox.kind == "modal"
    assert trainer._launch == ("launch.gpu=H100", "launch.engine_gpu=L4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reward_funcs": lambda completions, **_: [0.0]}, r"reward_funcs: .*<lambda> is known to this process alone"),
        ({"launcher": "nowhere"}, "There is no place 'nowhere'"),
        ({"actor_gpu": "A100"}, r'actor_gpu=.A100.: launcher="here" does not choose kinds of GPUs'),
        ({"launcher": "", "actor_gpu": "A100"}, "actor_gpu: says what a launcher is to give"),
        ({"launch": {"gpu": 1}}, r"launch\.gpu=1: there is no such key.* Did you mean launch\.gpus"),
        ({"num_rollout_workers": -1}, "num_rollout_workers=-1: must be 0"),
    ],
)
def test_what_cannot_be_elsewhere_is_refused_at_once(make: Make, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BirlError, match=said):
        make(**arguments)


def test_only_functions_of_a_file_can_be_found_again(make: Make) -> None:
    class Judge:
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [0.0] * len(completions)

    def local(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    for function in (Judge(), local, Judge().__call__):
        with pytest.raises(BirlError, match=r"name that: my_rewards\.py:my_function"):
            make(reward_funcs=function)


def test_a_script_that_would_start_again_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    for text, starts in (
        ("trainer = Trainer()\ntrainer.train()\n", True),
        ("def main():\n    Trainer().train()\n", False),
        ('if __name__ == "__main__":\n    Trainer().train()\n', False),
    ):
        file.write_text(text)
        assert starts_when_imported(file) is starts


def test_rows_that_are_no_json_are_refused(make: Make) -> None:
    with pytest.raises(BirlError, match="cannot be written as JSON"):
        make(train_dataset=[{**row, "more": object()} for row in ROWS]).train()


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("[--constraint=h200,--exclude=n[1-2]]", ["--constraint=h200", "--exclude=n[1-2]"]),  # of docs/launch_slurm.md
        ("--nodelist=n[1,3]", ["--nodelist=n[1,3]"]),
        ('["--mail-type=END,FAIL",--mem=1G]', ["--mail-type=END,FAIL", "--mem=1G"]),
        ("'numpy>=1,<3', it's", ["numpy>=1,<3", "it's"]),
        (" a, b ,,c,", ["a", "b", "c"]),
        ("[]", []),
    ],
)
def test_elements_of_a_list_are_whole(text: str, elements: list[str]) -> None:
    assert listed(text) == elements
    words = launch_words("slurm", {}, {"extra": elements, "nodes": 2})
    assert keys_of(slurm.Keys, words)[0].extra == elements
