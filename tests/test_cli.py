"""The command line: dispatch, messages, exit codes, several runs, and that cheap commands stay cheap."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from birl import Trainer, __version__, cli
from birl.cli import COMMANDS, main
from birl.errors import BirlError
from birl.jobs import job_names

TRAIN = "data.train=a.jsonl"


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """Put a module in place of one that would load torch."""
    module = types.ModuleType(name)
    vars(module).update(functions)
    package, _, last = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules.get(package) or __import__(package, fromlist=["x"]), last, module, raising=False)


def test_version_and_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"birl {__version__}\n"
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        page = capsys.readouterr().out
        assert all(f"  {command} " in page for command in COMMANDS) and len(page.splitlines()) < 36


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--help"]) == 0
    assert f"birl {command}" in capsys.readouterr().out


def test_help_names_the_flags_that_a_command_has(capsys: pytest.CaptureFixture[str]):
    for command, flags in (
        ("rl", "[--print-config] [--multirun] [--dry-run] [--contamination] [--help [WORD]]"),
        ("eval", "[--print-config] [--multirun] [--validate] [--judge] [--help [WORD]]"),
        ("serve", "[key=value ...] [--print-config] [--help [WORD]]"),
    ):
        assert main([command, "--help"]) == 0
        assert flags in " ".join(capsys.readouterr().out.split())


def test_help_lists_an_environments_own_keys(capsys: pytest.CaptureFixture[str]):
    for words in (["rl", "env=guess_number", "--help"], ["eval", "--help", "env.kind=guess_number", "lr"]):
        assert main(words) == 0
        own = capsys.readouterr().out.partition("env: keys of guess_number")[2]
        assert "  env.wasted=0.1  float\n" in own and "Largest number" in own and "env.max_turns=" not in own
    assert main(["rl", "env=guess_numbre", "--help"]) == 2
    assert "Did you mean guess_number?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["evla"], "Did you mean eval?"),
        (["seed=1"], "a command comes first"),
        (["rl"], "birl rl data.train=my.jsonl"),
        (["rl", TRAIN, "--dryrun"], "Did you mean --dry-run?"),
        (["eval", "data.validation=a.jsonl", "--dry-run"], "`birl eval` has --help, --print-config, --multirun, --val"),
        (["sft", TRAIN, "--validate"], "belongs to `birl eval`"),
        (["serve", "--multirun"], "a server does not end; start one for each; `birl serve` has --help, --print-config"),
        (["rl", TRAIN, "lr=1"], "Did you mean optimizer.lr"),
        (["checkpoints"], "Name a run folder"),
        (["doctor", "please"], "takes no words"),
    ],
)
def test_mistakes_exit_2_with_a_message(words: list[str], part: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    streams = capsys.readouterr()
    assert part in streams.err and "Traceback" not in streams.err and streams.out == ""
    assert all(line.startswith("birl: ") for line in streams.err.splitlines())


@pytest.mark.parametrize("words", [["rl", "run=/tmp/a", TRAIN], ["doctor"], ["reproduce"]])
def test_a_deleted_current_folder_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from birl.config.load import _composed

    _composed.cache_clear()  # Hydra looks for the folder
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(words) == 2
    assert capsys.readouterr().err == "birl: the current folder was deleted: change to another one, as with `cd`.\n"


def test_a_trainer_in_a_deleted_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BirlError, match="the current folder was deleted"):
        Trainer(model=str(tmp_path), reward_funcs=[len], train_dataset=[{"prompt": "Hi"}])


def test_print_config_is_yaml_that_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["rl", "--print-config", TRAIN, "algorithm=dapo", "seed=5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("# presets: algorithm=dapo model=smollm2\n") and "seed: 5" in first
    (tmp_path / "c.yaml").write_text(first)
    assert main(["rl", "--print-config", str(tmp_path / "c.yaml")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]


@pytest.mark.parametrize("words", [["rl", TRAIN, "run=a"], ["eval", "data.validation=x.jsonl", "output=a.json"]])
def test_a_job_of_multirun_has_one_value_of_a_key(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "seed=1,2", "--multirun", "--print-config"]) == 0
    jobs = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- # ")]
    ends = [f"seed={seed} {'run=a/' if words[0] == 'rl' else 'output=a/'}seed={seed}" for seed in (1, 2)]
    assert [line.removesuffix(".json") for line in jobs] == [f"--- # {words[1]} {end}" for end in ends]


HEAVY = "torch transformers datasets modal ray wandb"
BOARD = "TensorBoard(Start(run=Path(mkdtemp()), mode='', id='', config={}, step=0, resumed=False))"


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import birl", "httpx fsspec starlette uvicorn s3fs"),
        *(
            (f"main({words})", "numpy starlette uvicorn s3fs boto3")
            for words in (["--help"], ["rl", "--help"], ["rl", "lr=1"])
        ),
        (f"main({['rl', '--print-config', TRAIN]})", "numpy"),
        ("main(['--version']); main(['completion', 'bash'])", "httpx starlette uvicorn"),
        ("import birl.view.command, birl.view.metrics", "rich hydra"),
        ("main(['runs', 'birl/rewards']); main(['diff', *['birl/rewards'] * 2])", "rich.live hydra"),
        ("import birl.rewards.worker, birl.rewards.score", "numpy sympy"),
        ("import birl.launch.ray, birl.launch.ray_envs, birl.data.tasks, birl.data.stream", ""),
        (f"import birl.track.tracker, birl.track.report; {BOARD}", ""),
    ],
)
def test_what_is_quick_or_light_loads_nothing_heavy(code: str, more: str) -> None:
    imports = "import sys; from pathlib import Path; from tempfile import mkdtemp"
    if "main(" in code:
        imports += "; from birl.cli import main"
    if code.endswith(BOARD):
        imports += "; from birl.track.sink import Start; from birl.track.tensorboard import TensorBoard"
    check = f"heavy = {{*'{HEAVY} {more}'.split()}} & sys.modules.keys(); assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", f"{imports}\n{code}\n{check}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_survives_a_closed_pipe():
    done = subprocess.run(
        f"{sys.executable} -m birl rl --help | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_another_closed_pipe_is_an_error():
    code = (
        "import sys, types; from birl.cli import main; import birl.train\n"
        "def train(*args, **options): raise BrokenPipeError('of a worker')\n"
        "sys.modules['birl.train.command'] = types.SimpleNamespace(train=train)\n"
        "sys.exit(main(['rl', 'data.train=a.jsonl']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "BrokenPipeError: of a worker" in done.stderr


def test_rl_and_eval_get_their_configuration(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[object, ...]] = []
    fake(monkeypatch, "birl.train.command", train=lambda *args, **options: calls.append((*args, options)))
    fake(monkeypatch, "birl.cli.evaluation", run=lambda config: calls.append((config,)))
    assert main(["rl", TRAIN, "--dry-run", "algorithm=grpo"]) == 0
    assert main(["eval", "data.validation=b.jsonl"]) == 0
    (config, choices, options), (evaluation,) = calls
    assert config.data.train == ["a.jsonl"] and choices["algorithm"] == "grpo" and options == {"dry_run": True}  # type: ignore[attr-defined]
    assert evaluation.data.validation == ["b.jsonl"]  # type: ignore[attr-defined]


def test_other_commands_get_their_words(monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []
    fake(monkeypatch, "birl.cli.chat", run=lambda words: calls.append(words) or 0)
    fake(monkeypatch, "birl.cli.checkpoints", run=lambda words: calls.append(words) or 3)
    fake(monkeypatch, "birl.models.gguf", run=lambda words: calls.append(words) or 4)
    assert main(["chat"]) == 0
    assert main(["chat", "runs/x", "seed=1"]) == 0
    assert main(["chat", "seed=1"]) == 0
    assert main(["checkpoints", "runs/x", "prune", "2"]) == 3
    assert main(["cache"]) == 4
    assert calls == [[], ["runs/x", "seed=1"], ["seed=1"], ["runs/x", "prune", "2"], []]


def test_errors_and_ctrl_c_have_their_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(error: BaseException):
        def train(*args: object, **options: object) -> None:
            raise error

        return train

    fake(monkeypatch, "birl.train.command", train=fail(BirlError("row 3: no prompt")))
    assert main(["rl", TRAIN]) == 2
    assert capsys.readouterr().err == "birl: row 3: no prompt\n"
    fake(monkeypatch, "birl.train.command", train=fail(KeyboardInterrupt()))
    assert main(["rl", TRAIN]) == 130


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a process that is gone on Linux only")
def test_a_job_of_multirun_ends_with_its_parent(tmp_path: Path) -> None:
    """It trained on, without the other jobs, and held its run folder."""
    words = ["view", str(tmp_path), "--no-browser", "--port", "0"]
    code = f"from birl.jobs import Jobs; Jobs().start({words})"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    while "birl view: http" not in (line := parent.stdout.readline()):
        assert line
    parent.kill()
    parent.communicate(timeout=60)  # the pipe is open for as long as the child lives


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python does not name the file where a write fails."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake(monkeypatch, "birl.train.command", train=full)
    assert main(["rl", TRAIN]) == 2
    assert capsys.readouterr().err.startswith("birl: No space left on device: make room on the disk")


def test_job_names_are_unique_folder_names():
    jobs = [["optimizer.lr=1e-5", "seed=1", TRAIN], ["optimizer.lr=1e-5", "seed=2", TRAIN]]
    assert job_names(jobs, ["optimizer.lr", "seed"]) == ["lr=1e-5,seed=1", "lr=1e-5,seed=2"]
    assert job_names([["data.train=/x/a!"], ["data.train=/x/a?"]], ["data.train"]) == ["train=x_a", "train=x_a-1"]
    same = [["rollout.top_k=1", "validation.top_k=2"]]
    assert job_names(same, ["rollout.top_k", "validation.top_k"]) == ["rollout.top_k=1,validation.top_k=2"]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of Python: it writes down its words and fails where they contain seed=2."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *seed=2*) exit 7;; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("birl.jobs.tied", list)
    return tmp_path / "calls"


def test_multirun_runs_every_combination(stub: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["rl", TRAIN, "seed=1,2,3", "--multirun", "--dry-run"]) == 1
    calls = stub.read_text().splitlines()
    assert calls[0] == f"-m birl rl {TRAIN} seed=1 run=runs/smollm2-a-dr_grpo/seed=1 --dry-run"
    assert len(calls) == 3, "a failed job does not stop the others"
    table = [line.split()[:2] for line in capfd.readouterr().out.splitlines()[-3:]]
    assert table == [["seed=1", "0"], ["seed=2", "7"], ["seed=3", "0"]]


def test_multirun_keeps_run_and_output_apart(stub: Path):
    assert main(["rl", TRAIN, "run=here", "algorithm=grpo,dapo", "-m"]) == 0
    assert main(["eval", "data.validation=b", "output=x/r.json", "seed=4,5", "-m"]) == 0
    words = [line.split() for line in stub.read_text().splitlines()]
    assert [line[-1] for line in words] == [
        "run=here/algorithm=grpo",
        "run=here/algorithm=dapo",
        "output=x/r/seed=4.json",
        "output=x/r/seed=5.json",
    ]


def test_multirun_checks_every_job_before_the_first(stub: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["rl", TRAIN, "rollout.group_size=8,1", "--multirun"]) == 2
    assert not stub.exists() and "rollout.group_size=1" in capsys.readouterr().err


def test_ctrl_c_reaches_the_job_once_and_stops_the_rest(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\ngot = []\n"
        "signal.signal(signal.SIGINT, lambda *a: got.append(1))\n"
        f"open({str(tmp_path / 'started')!r}, 'a').write('x')\n"
        "while not got: time.sleep(0.02)\n"
        f"time.sleep(0.2); open({str(tmp_path / 'signals')!r}, 'a').write(str(len(got)))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    code = (
        f"import sys; from birl import jobs; from birl.cli import main; jobs.tied = list; "
        f"sys.executable = {str(program)!r}; sys.exit(main(sys.argv[1:]))"
    )
    words = ["rl", TRAIN, "seed=1,2", "--multirun"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (tmp_path / "signals").read_text() == "1"
    assert (tmp_path / "started").read_text() == "x" and "not run" in out


def test_the_configured_commands_are_those_that_have_a_schema() -> None:
    """Named apart from their schemas, which nobody wants to import for `birl --help`."""
    from birl.cli import commands
    from birl.config import schema

    assert (tuple(schema.TRAINING), tuple(schema.COMMANDS)) == (commands.TRAINING, commands.CONFIGURED)


def test_a_torchvision_of_another_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's beside PyTorch for CPUs: transformers said that AttentionInterface cannot be imported."""
    (tmp_path / "mismatched.py").write_text(
        "try:\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "except RuntimeError as error:\n    raise ModuleNotFoundError('AttentionInterface') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BirlError, match=r"not the build for this PyTorch \(operator torchvision::nms does not exist\)"):
        cli.load("mismatched")
