"""Every mistake gives exit code 2, a message that names the place and the fix, and leaves earlier work as it was."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import birl.train.command  # noqa: F401  else the first test has the words of `birl/preflight.py`
from birl.cli import main
from birl.learner import checkpoint
from tests.full_disk import full_disk
from tests.train.bench import OUTCOMES, REWARDS, Bench, contents, steps, write_rows

LONG = {"prompt": "word " * 400, "answer": "1"}


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (None, ["data.train=dta.jsonl"], ["dta.jsonl: no such file", "Did you mean data.jsonl"]),
        (None, ["data.train=nowhere/data.jsonl"], ["nowhere/data.jsonl: no such file", "nowhere does not exist"]),
        (b"", [], ["other.jsonl is empty"]),
        (None, ["data.prompt_column=nope"], ["data.prompt_column=nope", "data.jsonl", "columns prompt, answer"]),
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
        (
            None,
            ["steps=0", "optimizer.warmup_steps=3"],
            ["optimizer.warmup_steps=3: the run has only 3 optimizer steps"],
        ),
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
    assert "mixed.jsonl: dropped 1 of 3 rows whose prompt has more than 504 tokens" in said
    assert [m["outcome/asked"] for m in bench.metrics()] == [4.0]


ALWAYS = [
    ("raises", "env_error", "rewards.py:6: ValueError: no gold here"),
    ("texts", "env_error", "returned a str instead of a number"),
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


def test_a_run_that_ended_is_not_emptied_where_its_checkpoints_were_deleted(bench: Bench) -> None:
    bench.done()
    shutil.rmtree("run/checkpoints")
    before = contents("run")
    assert "its checkpoints are not there: it would begin anew and empty metrics" in bench.refused("steps=2")
    assert contents("run") == before


def test_a_run_whose_current_folder_is_deleted_ends_well(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        f"{REWARDS}\ndef deletes(completions, **_):\n    os.rmdir({str(tmp_path / 'here')!r})\n"
        "    return good(completions)\n"
    )
    (tmp_path / "here").mkdir()
    os.chdir("here")
    words = (f"reward.functions={tmp_path}/rewards.py:deletes", f"data.train={tmp_path}/data.jsonl")
    try:
        assert "Traceback" not in bench.done(*words, f"run={tmp_path}/run", "reward.workers=1", "rollout.prompts=1")
    finally:
        os.chdir(tmp_path)


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def add_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))


def many(name: str) -> Callable[[Path], None]:
    """A count that would take all memory before it is compared with the weights."""
    return lambda folder: (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {name: 10**9})
    )


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
        (many("num_hidden_layers"), ["config.json", "num_hidden_layers is larger than 65,536"]),
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
        (["resume=nothing"], ["resume=nothing", "no such checkpoint folder", "birl checkpoints RUN"]),
        (["run=data.jsonl"], ["run=data.jsonl: is a file or a broken link; name a folder"]),
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
