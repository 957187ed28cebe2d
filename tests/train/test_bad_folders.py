"""Run folders and checkpoints of another run, damaged, locked or wrongly named: one clear line, nothing is touched."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import birl.train.command  # noqa: F401  else the first test has the words of `birl/preflight.py`
from birl.cli import main
from birl.track import folder_lock
from tests.tiny import tiny_model_folder
from tests.train.bench import Bench, contents, write_rows


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
    monkeypatch.setenv("BIRL_KERNELS", "0")
    assert "(no kernels): rounding, and so the bits, will differ" in bench.done("steps=3")
    monkeypatch.setattr("birl.models.device.described", lambda device: "another one")
    assert "and this is another one: rounding, and so the bits, will differ" in bench.done("steps=4")


def test_what_a_run_reads_and_that_changed_is_told(bench: Bench, tmp_path: Path) -> None:
    """The order of the rows, the prompts' form and the reference follow from files that the configuration names."""
    model = tiny_model_folder(tmp_path / "model")
    words = (f"model.path={model}", "algorithm.kl_coef=0.1", "resume=auto")
    bench.done(*words)
    assert "WARNING" not in bench.done(*words, "steps=2")
    write_rows("data.jsonl", [{"prompt": f"What is {i} + 3?", "answer": str(i + 3)} for i in range(6)])
    said = bench.done(*words, "steps=3")
    assert said.count("WARNING") == 1 and "data.train has changed since the checkpoint was saved" in said
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>\n\n"))
    said = bench.done(*words, "steps=4")
    assert said.count("WARNING") == 2 and "chat_template.jinja is replaced" in said
    assert "The chat template has changed since the checkpoint was saved" in said
    tiny_model_folder(tmp_path / "other", seed=7)
    shutil.copy(tmp_path / "other/model.safetensors", model)
    said = bench.done(*words, "steps=5")
    assert said.count("WARNING") == 1 and "model.path has changed since the checkpoint was saved" in said
    assert "WARNING" not in bench.done(*words, "steps=6")
    write_rows("data.jsonl", [{"prompt": "What is 1 + 3?", "answer": "4"}])
    assert "WARNING" not in bench.done(*words, "run=other", f"resume={tmp_path}/run")


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
