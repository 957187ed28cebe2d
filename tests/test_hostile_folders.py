"""A folder from elsewhere with a pickle in every file, opened by every command and key that takes a folder or URL: it
runs nothing, and each command ends by itself, without a traceback."""

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from birl.cli import main
from birl.config.schema import Track
from birl.errors import BirlError
from birl.launch.launcher import Handle, find, launcher
from birl.learner.store import COMPLETE
from birl.process import ProcessGroup
from birl.regular import clear, write_whole
from birl.track.tracker import Tracker
from tests.tiny import tiny_model_folder
from tests.track.traces import ahead, write
from tests.view.runs import make

MODEL = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "chat_template.jinja"),
    *("training_args.bin", "optimizer.pt", "adapter_config.json", "adapter_model.bin", "model.gguf"),
)
RUN = (
    *("config.yaml", "metrics.jsonl", "validation.jsonl", "rollouts.jsonl", "ledger.jsonl", "trace.json"),
    *("summary.json", "record.jsonl", ".lock", "latest.json", "data.pkl", "README.md", "dataset_info.json"),
    "state.json",
    *("train.jsonl", "train.json", "train.csv", "train.parquet", "train.arrow"),
    *(f"model/{name}" for name in MODEL),
)
CHECKPOINT = (
    "manifest.json",
    "state.json",
    COMPLETE,
    *(f"tensors/{n}" for n in (".metadata", "index.json", "__0_0.distcp")),
)


class Harm:
    """Unpickling it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def hostile(folder: Path, harm: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(Harm(harm)))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hostile folders by what they pretend to be; `good` is a model whose weights have pickles beside them."""
    root = tmp_path_factory.mktemp("hostile")
    harm = root / "harm"
    pickle.loads(pickle.dumps(Harm(root / "works")))
    assert (root / "works").is_dir()  # unpickling one does harm
    steps = tuple(f"{where}step-000001/{name}" for where in ("", "checkpoints/") for name in CHECKPOINT)
    everything = hostile(root / "all", harm, (*MODEL, *RUN, *steps))
    run = hostile(root / "run", harm, (*RUN, *steps))
    (run / "config.json").write_text(json.dumps({"model.path": str(everything), "steps": 3}))
    good = tiny_model_folder(root / "good")
    hostile(good, harm, tuple(name for name in MODEL if not (good / name).exists()))
    for folder in (good,):  # these would be read as weights or words of the model, and are no pickles' place
        for name in ("model.safetensors.index.json", "model.gguf", "chat_template.jinja", "adapter_config.json"):
            (folder / name).unlink(missing_ok=True)
    (root / "rows.jsonl").write_text(
        '{"prompt": "a", "answer": "1", "response": "b", "chosen": "c", "rejected": "d"}\n'
    )
    return {"all": everything, "run": run, "good": good, "harm": harm, "rows": root / "rows.jsonl", "root": root}


TRAIN = ["model.path=GOOD", "data.train=ROWS", "run=NEW", "steps=1", "threads=1", "track.report=false", "--dry-run"]
KEYS = [
    *(["rl", f"{key}=ALL"] for key in ("model.path", "data.train", "data.validation", "critic.path", "run")),
    *(["rl", f"{key}=ALL/train.json"] for key in ("model.chat_template", "data.train", "reward.functions", "env.kind")),
    *(["rl", f"data.train=ALL/train.{kind}"] for kind in ("jsonl", "csv", "parquet", "arrow")),
    *(["rl", "reward.functions=model", "reward.model=ALL"], ["rl", "model.path=ALL/model.gguf"]),
    *(["rl", "resume=ALL/step-000001"], ["rl", "resume=file://ALL"], ["rl", "resume=file://ALL/step-000001"]),
    *(
        ["rl", "resume=ALL"],
        ["rl", "checkpoint.store=file://ALL/.."],
        ["sft", "model.path=ALL"],
        ["rm", "model.path=ALL"],
    ),
    *(
        ["dpo", "model.path=ALL"],
        ["dpo", "preference.reference=ALL"],
        ["eval", "model.path=ALL"],
        ["eval", "model.path=RUN"],
    ),
    *(["eval", "data.train=ALL"], ["serve", "model.path=ALL"], ["rl", "ALL/config.yaml"]),
]
COMMANDS = [
    *(["chat", "ALL"], ["chat", "RUN"], ["chat", "RUN/checkpoints/step-000001"], ["ledger", "ALL"], ["runs", "ALL"]),
    *(["runs", "ROOT"], ["diff", "ALL", "RUN"], ["diff", "RUN", "RUN"], ["rollouts", "ALL"], ["rollouts", "RUN"]),
    *(["trace", "ALL"], ["plan", "model.path=ALL"], ["reproduce", "ALL"], ["status", "ALL"], ["logs", "ALL"]),
    *(["checkpoints", "RUN"], ["checkpoints", "RUN", "verify"], ["checkpoints", "RUN", "convert"]),
    *(["checkpoints", "RUN", "export", "last", "NEW"], ["checkpoints", "RUN", "export-adapter", "1", "NEW"]),
    *(["checkpoints", "RUN", "prune", "1"], ["checkpoints", "ALL", "export", "best", "NEW"]),
]


@pytest.mark.parametrize("words", [*COMMANDS, *KEYS], ids=" ".join)
def test_no_pickle_of_a_folder_runs(
    words: list[str], world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if words in KEYS and words[0] in ("rl", "sft", "rm", "dpo"):
        given = {word.partition("=")[0] for word in words}
        words = [*words, *(word for word in TRAIN if word.partition("=")[0] not in given)]
        if any(word.startswith(("resume=", "checkpoint.store=", "run=")) for word in words if "NEW" not in word):
            words = [word for word in words if word != "--dry-run"]
    if words[0] == "rl" and not any(word.startswith("reward.functions") for word in words):
        words = [*words, "reward.functions=math"]
    if words[0] == "eval":
        words = [*words, "reward.functions=math", *(["data.validation=ROWS"] if "data.train=ALL" not in words else [])]
    copy = shutil.copytree(world["run"], tmp_path / "run")
    places = {"ALL": world["all"], "RUN": copy, "GOOD": world["good"], "ROWS": world["rows"], "ROOT": world["root"]}
    for name, place in {**places, "NEW": tmp_path / "new"}.items():
        words = [word.replace(name, str(place)) for word in words]
    try:
        main(words)
    except SystemExit:
        pass
    except BirlError as error:
        pytest.fail(f"not told by the command line: {error}")
    assert not world["harm"].exists()


GOOD_LAUNCH = {"where": "local", "id": "1", "run": "/elsewhere", "name": "x", "more": {}}
OTHERS = ("slurm", "ray", "modal", "aws")  # they have something in `more`
SLURM = {"array": False, "folders": ["x"], "roles": {"learner": 1}, "ranks": 1}
DAMAGE = {
    "deep": "[" * 100_000,
    "empty": "",
    "list": "[]",
    "number": json.dumps(GOOD_LAUNCH | {"run": 3}),
    "more": json.dumps(GOOD_LAUNCH | {"more": [1]}),
    "place": json.dumps(GOOD_LAUNCH | {"where": "../local"}),
    "long": json.dumps(GOOD_LAUNCH | {"where": "x" * 100_000}),
    "key": json.dumps(GOOD_LAUNCH | {"further": 1}),
    "option": json.dumps(GOOD_LAUNCH | {"where": "skypilot", "id": "--config=evil"}),
    **{f"lacks-{where}": json.dumps(GOOD_LAUNCH | {"where": where}) for where in OTHERS},
    "wrong": json.dumps(GOOD_LAUNCH | {"where": "slurm", "more": SLURM | {"folders": 7}}),
    "counts": json.dumps(GOOD_LAUNCH | {"where": "slurm", "more": SLURM | {"roles": {"learner": "4"}}}),
    "pipe": os.mkfifo,
    "circle": lambda path: path.symlink_to(path.name),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["launch.json", "launch/state.json", "launch/supervisor.lock", "launch/learner-0.log"])
def test_a_damaged_launched_run_is_told_in_a_line(
    file: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch").mkdir()
    for name, text in (("launch.json", json.dumps(GOOD_LAUNCH)), ("launch/learner-0.log", "hello\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / file).unlink(missing_ok=True)
    content: Any = DAMAGE[damage]
    (tmp_path / file).write_text(content) if isinstance(content, str) else content(tmp_path / file)
    for command in ("status", "logs", "stop", "scale"):
        code = main([command, str(tmp_path), *(["engines=2"] if command == "scale" else [])])
        out, err = capsys.readouterr()
        assert code in (0, 2) and "Traceback" not in out + err and len(err) < 2000
        if file == "launch.json" or command in ("stop", "scale"):
            assert (code == 2 and str(tmp_path) in err) or damage in ("place", "long")


@pytest.mark.parametrize("words", ["eval output=PIPE", "trace RUN --output PIPE", "rollouts RUN --export PIPE"])
def test_what_is_no_regular_file_is_not_written(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader would keep its writer waiting for ever."""
    monkeypatch.setattr("birl.cli.evaluation.evaluation", None)  # refused before anything is loaded
    make(tmp_path / "run")
    write(tmp_path / "run", ahead())
    (tmp_path / "run/rollouts.jsonl").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    words = words.replace("RUN", str(tmp_path / "run")).replace("PIPE", str(tmp_path / "pipe.jsonl"))
    more = [f"data.validation={tmp_path / 'run/rollouts.jsonl'}", "reward.functions=math"]
    assert main([*words.split(), *(more if "eval" in words else [])]) == 2
    assert "pipe.jsonl" in (err := capsys.readouterr().err) and "a named pipe, not a regular file" in err


def test_pipes_under_the_names_of_a_runs_files_keep_nobody_waiting(tmp_path: Path) -> None:
    for name in ("config.yaml", "config.yaml.new"):
        os.mkfifo(tmp_path / name)
    write_whole(tmp_path / "config.yaml", b"x")
    assert (tmp_path / "config.yaml").read_bytes() == b"x"
    os.mkfifo(tmp_path / "model")
    clear(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (tmp_path / "tensorboard").touch()
    with (
        pytest.raises(BirlError, match="tensorboard"),
        Tracker(tmp_path, Track(console="plain"), title="x", total_steps=1, config={}) as tracker,
    ):
        tracker.rewind(None, 0)
    os.mkfifo(tmp_path / "engine.log")
    with pytest.raises(OSError, match="a named pipe"):
        ProcessGroup(["true"], log=tmp_path / "engine.log", env={})


def test_a_copy_of_a_launched_run_is_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`birl stop COPY` must not stop the run that it was copied from."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/launch.json").write_text(json.dumps(GOOD_LAUNCH | {"run": str(tmp_path / "run")}))
    assert find(str(tmp_path / "copy")).run == str(tmp_path / "copy")
    assert main(["stop", str(tmp_path / "copy")]) == 2 and f"{tmp_path}/copy does not run" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["status RUN", "logs RUN", "stop RUN", "scale RUN engines=+1"])
@pytest.mark.parametrize("where", ["aws", "ray", "slurm", "skypilot", "kubernetes", "modal"])
def test_a_launched_run_from_elsewhere_runs_nothing(
    where: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's cluster.yaml names commands, squeue takes any job, ssh any machine."""
    bait = {"cluster": str(tmp_path / "cluster.yaml"), "place": ".", "bucket": "s3://x", "keep": False, "region": "x"}
    bait |= {"address": "ray://127.0.0.1:1", "without_token": True}
    bait |= {"array": False, "folders": [str(tmp_path / "other")], "roles": {}, "ranks": 1}
    bait |= {"learner": "fc-1", "app": "a", "environment": "", "count": 1, "stop_timeout": 1.0, "volume": "v"}
    kind = getattr(launcher(where), "More", None)
    more = {name: bait[name] for name in kind.__annotations__} if kind else {}
    handle = Handle(where=where, id="1", run=str(tmp_path / "run"), name="x", more=more)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/launch.json").write_text(json.dumps(asdict(handle)))
    for program in ("ray", "aws", "squeue", "scancel", "sky", "ssh", "modal"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    assert main(words.replace("RUN", str(tmp_path / "run")).split()) == 2
    assert "add --trust" in capsys.readouterr().err and not (tmp_path / "ran").exists()
    handle.save()
    assert find(str(tmp_path / "run")).id == "1"


@pytest.mark.parametrize("target", ["run", "nothing"])
@pytest.mark.parametrize("command", ["rl", "launch local rl"])
def test_a_link_to_no_folder_is_no_run(
    command: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(target)
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    assert main([*command.split(), "run=run", "data.train=rows.jsonl", "reward.functions=math"]) == 2
    assert "run=run: is a file or a broken link; name a folder." in capsys.readouterr().err


def test_a_trace_is_not_written_where_links_lead_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run")
    write(tmp_path / "run", ahead())
    (tmp_path / "o").symlink_to("o")
    assert main(["trace", str(tmp_path / "run"), "--output", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err.rstrip().endswith("Too many levels of symbolic links. Name another place.")


def test_what_the_file_system_refuses_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("one", "two"):
        (tmp_path / run / "validation.jsonl").mkdir(parents=True)
        for name in ("config.yaml", "config.json"):
            (tmp_path / run / name).write_text("{}")
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "one/validation.jsonl: it is a folder, not a regular file." in capsys.readouterr().err
