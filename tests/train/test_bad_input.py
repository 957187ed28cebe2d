"""Every mistake gives exit code 2, a message that names the place and the fix, and leaves earlier work as it was."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import birl.train.command  # noqa: F401  else the first test has the words of `birl/preflight.py`
from birl.cli import main
from birl.learner import checkpoint, step_folders
from birl.track import folder_lock
from tests.full_disk import full_disk
from tests.tiny import tiny_model_folder

REWARDS = """
import os, time

def good(completions, **_): return [float(sum(map(ord, c)) % 7) for c in completions]
def same(completions, **_): return [1.0 for _ in completions]
def raises(completions, **_): raise ValueError("no gold here")
def nan(completions, **_): return [float("nan") for _ in completions]
def too_few(completions, **_): return [1.0] * (len(completions) - 1)
def text(completions, **_): return "good"
def texts(completions, **_): return ["good" for _ in completions]
def hangs(completions, **_): time.sleep(60)
def dies(completions, **_): os._exit(7)

def picky(completions, answer, **_):
    if any(a == "3" for a in answer):
        raise ValueError("bad one")
    return good(completions)

number = 3
"""
OUTCOMES = ("ok", "truncated", "env_error", "engine_error", "timeout", "aborted")


class Bench:
    """A folder with a data set and reward functions, and `birl rl` with small defaults in it."""

    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.defaults = {
            "model.path": str(model),
            "model.dtype": "float32",
            "data.train": "data.jsonl",
            "reward.functions": "rewards.py:good",
            "rollout.prompts": "2",
            "rollout.group_size": "2",
            "rollout.max_tokens": "8",
            "optimizer.lr": "1e-3",
            "checkpoint.every": "1",
            "steps": "1",
            "threads": "1",
            "run": "run",
            "track.console": "plain",
            "track.tensorboard": "false",
            "track.report": "false",
        }
        Path("rewards.py").write_text(REWARDS)
        write_rows("data.jsonl", [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(5)])

    def command(self, *words: str) -> list[str]:
        given = dict(word.split("=", 1) for word in words)
        return ["rl", *(f"{key}={value}" for key, value in {**self.defaults, **given}.items())]

    def run(self, *words: str) -> tuple[int, str]:
        code = main(self.command(*words))
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return code, out + err

    def refused(self, *words: str) -> str:
        code, said = self.run(*words)
        assert code == 2, said
        assert "birl: " in said
        return said

    def done(self, *words: str) -> str:
        code, said = self.run(*words)
        assert code == 0, said
        return said

    def metrics(self, run: str = "run") -> list[dict]:
        return [json.loads(line) for line in Path(run, "metrics.jsonl").read_bytes().splitlines()]


@pytest.fixture
def bench(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)
    yield Bench(tiny, capsys)
    assert not list(tmp_path.rglob(".lock"))


def write_rows(name: str, rows: list[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def contents(folder: str) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(Path(folder).rglob("*")) if f.is_file()}


def steps(run: str = "run") -> list[int]:
    found = step_folders.saved(Path(run, "checkpoints"))
    assert all(checkpoint.verify(s.path) == [] for s in found)
    return [s.step for s in found]


LONG = {"prompt": "word " * 400, "answer": "1"}


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (None, ["data.train=dta.jsonl"], ["dta.jsonl: no such file", "Did you mean data.jsonl"]),
        (None, ["data.train=nowhere/data.jsonl"], ["nowhere/data.jsonl: no such file", "nowhere does not exist"]),
        (None, ["data.validation=held.jsonl"], ["held.jsonl: no such file"]),
        (b"", [], ["other.jsonl is empty"]),
        (b"\n\n", [], ["other.jsonl is empty"]),
        (None, ["data.prompt_column=nope"], ["data.prompt_column=nope", "data.jsonl", "columns prompt, answer"]),
        (None, ["data.answer_column=nope"], ["data.answer_column=nope", "data.jsonl", "columns prompt, answer"]),
        (b'{"text": "hi"}\n', [], ["other.jsonl", "columns text", "Set data.prompt_column"]),
        (b'{"prompt": "a"}\n{"prompt": broken\n', [], ["other.jsonl, line 2", "broken JSON", "Correct or remove"]),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', [], ["other.jsonl, line 2", "not UTF-8", "Save the file as"]),
        (b'{"prompt": "a"}\n{"prompt": ""}\n', [], ["other.jsonl, row 2", "prompt is empty", "Remove the row"]),
        (
            b'{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": null}\n',
            [],
            ["other.jsonl, row 2", "`answer` is empty", "Correct or remove"],
        ),
        (json.dumps(LONG).encode(), [], ["other.jsonl: every prompt", "504 tokens", "rollout.max_tokens=8: lower"]),
        (None, ["data.max_prompt_tokens=3"], ["data.jsonl: every prompt has more than 3", "data.max_prompt_tokens"]),
    ],
)
def test_bad_data_is_named_by_file_and_row(
    bench: Bench, content: bytes | None, words: list[str], expected: list[str]
) -> None:
    if content is not None:
        Path("other.jsonl").write_bytes(content)
        words = [*words, "data.train=other.jsonl"]
    said = bench.refused(*words)
    assert [text for text in expected if text not in said] == [], said
    assert not Path("run").exists()


def test_rows_that_are_too_long_are_dropped_and_counted(bench: Bench) -> None:
    write_rows("mixed.jsonl", [{"prompt": "hi", "answer": "1"}, LONG, {"prompt": "ho", "answer": "2"}])
    said = bench.done("data.train=mixed.jsonl", "steps=0")
    assert "mixed.jsonl: dropped 1 of 3 rows, their prompt has more than 504 tokens" in said
    assert [m["outcome/asked"] for m in bench.metrics()] == [4.0]


ALWAYS = [
    ("raises", "env_error", "rewards.py:6: ValueError: no gold here"),
    ("nan", "env_error", "returned nan"),
    ("too_few", "env_error", "returned 1 values for 2 completions"),
    ("text", "env_error", "returned str, not a list of 2 numbers"),
    ("texts", "env_error", "returned a str instead of a number"),
    ("dies", "env_error", "the worker process died (exit code 7)"),
    ("hangs", "timeout", "took longer than 0.1 s"),
]


@pytest.mark.parametrize(("name", "outcome", "reason"), ALWAYS)
def test_a_reward_that_always_fails_stops_the_run_with_its_reason(
    bench: Bench, name: str, outcome: str, reason: str
) -> None:
    said = bench.refused(f"reward.functions=rewards.py:{name}", "reward.timeout=0.1")
    assert f"Step 1: 4 of 4 episodes failed (4 {outcome})" in said
    assert reason in said and "rollout.max_failure_rate=0.5" in said


@pytest.mark.parametrize(("name", "outcome", "reason"), ALWAYS)
def test_where_failures_are_allowed_they_are_typed_and_train_nothing(
    bench: Bench, name: str, outcome: str, reason: str
) -> None:
    bench.done(f"reward.functions=rewards.py:{name}", "reward.timeout=0.1", "rollout.max_failure_rate=1")
    (metrics,) = bench.metrics()
    assert metrics[f"outcome/{outcome}"] == metrics["outcome/asked"] == 4
    assert metrics["updates/done"] == 0 and metrics["reward/mean"] is None and metrics["score/mean"] is None
    records = [json.loads(line) for line in Path("run/rollouts.jsonl").read_bytes().splitlines()]
    assert len(records) == 4
    assert all(r["outcome"] == outcome and r["reward"] is None and r["advantage"] is None for r in records)
    assert any(reason in r["detail"] for r in records)


def test_a_reward_that_sometimes_raises_costs_only_those_episodes(bench: Bench) -> None:
    said = bench.done("reward.functions=rewards.py:picky", "steps=0", "rollout.prompts=5", "data.shuffle=false")
    assert "Step 1: 2 episodes failed:\n  2 x reward picky: rewards.py:" in said and "ValueError: bad one" in said
    (metrics,) = bench.metrics()
    assert metrics["outcome/asked"] == sum(metrics[f"outcome/{o}"] for o in OUTCOMES) == 10
    assert metrics["outcome/env_error"] == 2 and metrics["updates/done"] == 1


def test_an_episode_that_takes_too_long_is_a_timeout(bench: Bench) -> None:
    bench.done("env.timeout=0.0001", "rollout.max_failure_rate=1")
    assert bench.metrics()[0]["outcome/timeout"] == 4


def test_a_failing_step_leaves_the_checkpoints_before_it(bench: Bench) -> None:
    bench.done("checkpoint.keep_last=0", "steps=2")
    before = contents("run/checkpoints")
    with Path("rewards.py").open("a") as file:
        file.write("\ngood = raises\n")
    assert "no gold here" in bench.refused("steps=3")
    assert contents("run/checkpoints") == before and len(bench.metrics()) == 2
    Path("rewards.py").write_text(REWARDS)
    assert f"Resumed from {Path.cwd()}/run/checkpoints/step-000002" in bench.done("steps=3")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("rewards.py:god", ["rewards.py has no function 'god'", "Did you mean good?"]),
        ("rewards.py:number", ["'number' in", "is a int, not a function"]),
        ("missing.py:f", ["reward.functions=missing.py:f", "there is no file missing.py"]),
        ("rewards.py", ["reward.functions=rewards.py: say what of it", "rewards.py:my_function"]),
        ("broken.py:f", ["broken.py:f", "broken.py:1: SyntaxError"]),
        ("mth", ["reward.functions=mth", "Did you mean math?"]),
        ("no_such_module:f", ["no_such_module:f", "there is no module 'no_such_module'"]),
    ],
)
def test_a_reward_that_cannot_be_had_is_refused_before_the_run(
    bench: Bench, function: str, expected: list[str]
) -> None:
    Path("broken.py").write_text("def f(:\n")
    said = bench.refused(f"reward.functions={function}")
    assert [text for text in expected if text not in said] == [], said
    assert not Path("run").exists()


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def add_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shutil.rmtree, ["model.path=./model", "there is no such folder"]),
        (without("config.json"), ["model is not a model folder", "config.json is missing"]),
        (without("model.safetensors"), ["model has no weights", "expected model.safetensors"]),
        (without("tokenizer.json"), ["model has no tokenizer", "tokenizer.json"]),
        (damage, ["model/model.safetensors is damaged", "Download or convert"]),
        (break_config, ["config.json", "not a valid JSON"]),
        (add_layer, ["do not belong to its config.json", "missing model.layers.2"]),
        (without("chat_template.jinja"), ["chat.jsonl, row 1", "no chat template", "model.chat_template=FILE"]),
    ],
)
def test_a_bad_model_folder_is_named(bench: Bench, change: Callable[[Path], None], expected: list[str]) -> None:
    shutil.copytree(bench.defaults["model.path"], "model")
    change(Path("model"))
    write_rows("chat.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}])
    said = bench.refused("model.path=./model", "data.train=chat.jsonl")
    assert [text for text in expected if text not in said] == [], said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["engine.kv_cache_gb=0.0000001"], ["engine.kv_cache_gb=1e-07", "Set engine.kv_cache_gb="]),
        (["learner.tokens_per_microbatch=20"], ["learner.tokens_per_microbatch=20", "Set learner.tokens_per_micro"]),
        (["rollout.max_tokens=512"], ["rollout.max_tokens=512", "context of 512", "Lower it"]),
        (["rollout.group_size=1", "algorithm.scale_rewards=group"], ["rollout.group_size=1", "scale_rewards=none"]),
        (["rollout.group_size=1"], ["rollout.group_size=1", "set rollout.group_size=8, or algorithm.baseline=none"]),
        (["resume=nothing"], ["resume=nothing", "no such checkpoint folder", "birl checkpoints RUN"]),
        (["run=data.jsonl"], ["run=data.jsonl: is a file, or a link to no folder; name a folder"]),
        (
            ["run=data.jsonl/run"],
            ["/data.jsonl/run: Not a directory", "Cannot write into the run folder", "Choose another with run="],
        ),
        (["run=/proc/run"], ["run folder /proc/run", "Choose another with run="]),
    ],
)
def test_sizes_and_folders_that_cannot_work_are_refused_before_sampling(
    bench: Bench, words: list[str], expected: list[str]
) -> None:
    said = bench.refused(*words)
    assert [text for text in expected if text not in said] == [], said
    assert not Path("run").exists()


def test_a_group_of_one_without_baseline_trains(bench: Bench) -> None:
    words = ("rollout.group_size=1", "algorithm.baseline=none", "algorithm.scale_rewards=batch", "rollout.prompts=4")
    bench.done(*words)
    (metrics,) = bench.metrics()
    assert metrics["updates/done"] == 1 and metrics["grad_norm"] > 0


def test_equal_rewards_are_counted_and_move_nothing(bench: Bench) -> None:
    bench.done("reward.functions=rewards.py:same", "steps=2", "checkpoint.keep_last=0")
    for metrics in bench.metrics():
        assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
        assert metrics["groups/no_signal"] == 2 and metrics["updates/skipped"] == 1
    first, last = (checkpoint.read_tensors(Path(f"run/checkpoints/step-00000{i}"), "model.") for i in (1, 2))
    assert all(first[name].equal(last[name]) for name in first)


def test_the_last_prompts_of_an_epoch_are_a_smaller_step(bench: Bench) -> None:
    bench.done("steps=0")
    assert [m["groups/kept"] for m in bench.metrics()] == [2, 2, 1]
    records = [json.loads(line) for line in Path("run/rollouts.jsonl").read_bytes().splitlines()]
    assert {r["task"] for r in records} == {f"data.jsonl:{i}" for i in range(5)}


def test_a_validation_that_fails_says_so_and_does_not_become_the_best(bench: Bench) -> None:
    with Path("rewards.py").open("a") as file:
        file.write(
            "seen = []\n"
            "def at_second_sight(completions, source, **_):\n"
            "    seen.append(source[0])\n"
            "    if seen == ['held']: raise ValueError('held out')\n"
            "    return same(completions)\n"
        )
    write_rows("train.jsonl", [{"prompt": "hi", "answer": "1", "source": "train"}])
    write_rows("held.jsonl", [{"prompt": "ho", "answer": "1", "source": "held"}])
    words = ("data.train=train.jsonl", "data.validation=held.jsonl", "reward.functions=rewards.py:at_second_sight")
    said = bench.done(*words, "rollout.prompts=1", "validation.every=1")
    assert "Validation: 1 of 1 answers failed" in said and "held out" in said
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["best"] == 1 and summary["best_step"] == 1


@pytest.mark.parametrize("step", [1, 2])
def test_a_disk_that_is_full_while_saving_leaves_the_checkpoint_before_it(bench: Bench, step: int) -> None:
    if step == 2:
        bench.done()
    before = contents("run/checkpoints")
    with full_disk(200_000):
        said = bench.refused(f"steps={step}")
    assert f"run/checkpoints/step-00000{step}" in said and "File too large" in said and "prune" in said
    assert contents("run/checkpoints") == before
    bench.done(f"steps={step}")
    assert step in steps() and [m["step"] for m in bench.metrics()] == list(range(1, step + 1))


@pytest.mark.parametrize("file_bytes", [300, 3000])
def test_a_disk_that_is_full_at_the_start_leaves_whole_files(bench: Bench, file_bytes: int) -> None:
    with full_disk(file_bytes):
        assert f"Cannot write into the run folder {Path.cwd()}/run: File too large" in bench.refused()
    assert not Path("run").exists()
    bench.done()
    before = contents("run")
    with full_disk(file_bytes):
        bench.refused("steps=2")
    assert contents("run") == before
    bench.done("steps=2")


def test_a_run_folder_of_another_configuration_is_refused_untouched(bench: Bench) -> None:
    bench.done()
    before = contents("run")
    said = bench.refused("optimizer.lr=1e-4")
    assert "run belongs to a run with another configuration" in said and "optimizer.lr: 0.001 there" in said
    assert "run=ANOTHER_FOLDER" in said
    assert "resume=never" in bench.refused("resume=never")
    assert contents("run") == before
    bench.done("steps=2", "learner.tokens_per_microbatch=2048", "engine.max_batch=3", "watchdog=7200")


def test_a_try_that_ended_before_its_first_step_is_no_obstacle(bench: Bench) -> None:
    bench.refused("reward.functions=rewards.py:raises")
    assert Path("run/config.json").is_file()
    bench.done()


def test_a_damaged_configuration_in_the_run_folder_is_named(bench: Bench) -> None:
    bench.done()
    Path("run/config.json").write_text("{")
    said = bench.refused("steps=2")
    assert f"{Path.cwd()}/run/config.json" in said and f"resume={Path.cwd()}/run/checkpoints/step-" in said
    bench.done("steps=2", "run=other", "resume=run/checkpoints/step-000001")


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_resuming_from_a_folder_around_checkpoints_takes_the_newest(bench: Bench, place: str) -> None:
    bench.done()
    bench.done("steps=2", "run=other", f"resume={place}")
    assert Path("other/checkpoints/step-000002").is_dir()


def test_resuming_from_an_older_checkpoint_needs_another_folder(bench: Bench) -> None:
    """In the same one, the steps that were abandoned would count as the newest."""
    bench.done("steps=2")
    before = contents("run")
    said = bench.refused("steps=3", "resume=run/checkpoints/step-000001")
    assert "has gone on to step-000002" in said and "run=ANOTHER_FOLDER" in said
    assert contents("run") == before
    bench.done("steps=3", f"resume={Path.cwd()}/run/checkpoints/step-000002")
    assert [m["step"] for m in bench.metrics()] == [1, 2, 3]


def test_another_processor_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.done()
    assert "rounding" not in bench.done("steps=2")
    monkeypatch.setattr("birl.models.device.described", lambda device: "another one")
    assert "and this is another one: rounding, and so the bits, will differ" in bench.done("steps=3")


def test_a_checkpoint_of_another_model_is_refused(bench: Bench) -> None:
    bench.done()
    before = contents("run")
    tiny_model_folder("deeper", layers=3)
    said = bench.refused("model.path=deeper", "run=other", "resume=run/checkpoints/step-000001")
    assert "run/checkpoints/step-000001 does not belong to this model" in said
    assert "layers.2.input_layernorm.weight is missing in the checkpoint" in said
    assert contents("run") == before


def test_a_damaged_checkpoint_is_refused(bench: Bench) -> None:
    bench.done()
    file = next(Path("run/checkpoints/step-000001/tensors").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    said = bench.refused("steps=2")
    assert (
        f"All 1 checkpoints of {Path.cwd()}/run are damaged" in said and f"step-000001: tensors/{file.name} has" in said
    )
    assert "run=ANOTHER_FOLDER" in said


def test_two_runs_cannot_share_a_folder(bench: Bench) -> None:
    bench.done()
    before = contents("run")
    with folder_lock.held(Path("run")):
        said = bench.refused("steps=2")
        assert "run is in use by another birl process" in said and f"pid {os.getpid()}" in said and "run=..." in said
        assert main([*bench.command("steps=2"), "--dry-run"]) == 0
    assert contents("run") == before
    bench.done("steps=2")


def test_the_lock_ends_with_a_process_that_was_killed(bench: Bench) -> None:
    """Although its worker, which is busy with a reward, lives on."""
    with Path("rewards.py").open("a") as file:
        file.write("\ndef naps(completions, **_): open('napping', 'w').close(); time.sleep(4)\n")
    command = [sys.executable, "-m", "birl", *bench.command("reward.functions=rewards.py:naps")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as holder:
        while not Path("napping").exists():
            assert holder.poll() is None
            time.sleep(0.05)
        assert f"pid {holder.pid}" in bench.refused()
        holder.kill()
    assert Path("run/.lock").is_file()
    bench.done()


def evaluation(bench: Bench, *words: str) -> tuple[int, str]:
    keys = ("model.path", "model.dtype", "reward.functions", "threads")
    given = {"data.validation": "data.jsonl", "validation.max_tokens": "8", **{k: bench.defaults[k] for k in keys}}
    given |= dict(word.split("=", 1) for word in words)
    code = main(["eval", *(f"{key}={value}" for key, value in given.items())])
    out, err = bench.capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.validation=nothing.jsonl"], ["nothing.jsonl: no such file"]),
        (["reward.functions=rewards.py:raises"], ["5 of 5 answers could not be scored", "ValueError: no gold here"]),
        (["engine.kv_cache_gb=0.0000001"], ["engine.kv_cache_gb=1e-07", "Set engine.kv_cache_gb="]),
        (["output=data.jsonl/out.json"], ["/data.jsonl/out.json cannot be written", "Name another file"]),
        (["model.path=run"], ["run is not a model folder: config.json is missing", "a run that has not begun"]),
    ],
)
def test_an_evaluation_that_cannot_work_says_why(bench: Bench, words: list[str], expected: list[str]) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    code, said = evaluation(bench, *words)
    assert code == 2
    assert [text for text in expected if text not in said] == [], said


def test_an_evaluation_that_fails_leaves_no_results(bench: Bench) -> None:
    assert evaluation(bench, "reward.functions=rewards.py:raises", "output=new/out.json")[0] == 2
    assert not list(Path("new").iterdir())
    assert evaluation(bench, "output=new/out.json")[0] == 0
    before = Path("new/out.json").read_bytes()
    assert json.loads(before)["config"]["validation.max_tokens"] == 8
    assert evaluation(bench, "reward.functions=rewards.py:raises", "output=new/out.json")[0] == 2
    assert Path("new/out.json").read_bytes() == before


def test_an_evaluation_counts_what_could_not_be_scored_or_asked(bench: Bench) -> None:
    code, said = evaluation(bench, "reward.functions=rewards.py:picky")
    assert code == 0 and "1 of 5 answers could not be scored" in said and "ValueError: bad one" in said
    write_rows("mixed.jsonl", [{"prompt": "hi", "answer": "1"}, LONG])
    code, said = evaluation(bench, "data.validation=mixed.jsonl")
    assert code == 0 and "1 of 2 prompts fill the context of 512 tokens" in said


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'no place for messages' }}", ["model.chat_template=own.jinja", "leaves out messages of role user"]),
        (
            "{% for m in messages %}{{ m.content ",
            ["The chat template refuses a conversation of user", "unexpected end"],
        ),
    ],
)
def test_a_bad_chat_template_is_refused(bench: Bench, template: str, expected: list[str]) -> None:
    Path("own.jinja").write_text(template)
    said = bench.refused("model.chat_template=own.jinja")
    assert [text for text in expected if text not in said] == [], said


@pytest.mark.parametrize(
    "word", ["dtype=float", "temperature=-1", "max_tokens=0", "max_tokens=many", "top_p=0", "seed=-5", "colour=red"]
)
def test_chat_settings_are_checked_first(bench: Bench, word: str) -> None:
    assert main(["chat", bench.defaults["model.path"], word]) == 2
    assert word.partition("=")[0] in bench.capsys.readouterr().err
