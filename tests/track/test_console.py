import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from birl.track.console import NotebookView, Terminal, step_line, validation_line
from birl.track.panel import ProgressPanel, sparkline
from birl.track.progress import Progress
from birl.track.units import count, counted, duration, figure
from tests.track import runs


def _progress(steps: int, total: int | None = 30) -> Progress:
    progress = Progress(title="smollm2 · " + runs.HOSTILE, total=total, phase="generating 37/64")
    for step in range(1, steps + 1):
        progress.add(step, runs.metrics(step))
        if step % 5 == 0:
            progress.validate(step, runs.validation(step))
    return progress


def _render(progress: Progress, width: int, height: int = 40, encoding: str = "utf-8", **options: object) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="\n")
    console = Console(file=file, width=width, height=height, force_terminal=True, legacy_windows=False, **options)  # type: ignore
    console.print(ProgressPanel(progress))
    file.flush()
    raw = file.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [10, 20, 40, 56, 60, 80, 100, 120, 200, 400])
@pytest.mark.parametrize("steps", [0, 1, 12, 500])
@pytest.mark.parametrize("height", [5, 24, 60])
def test_panel_fits_every_width(width: int, steps: int, height: int) -> None:
    shown = _render(_progress(steps, total=500), width, height, color_system=None)
    assert all(len(line) <= width for line in shown.splitlines()), shown
    if width >= 40:
        assert f"{steps}/500" in shown and "generating 37/64" in shown
    if width >= 40 and steps and height >= 24:
        assert "812 tok/s" in shown and "1,930 tok/s" in shown and "generate 6" in shown
    if height >= 24 and width >= 40:
        assert len(shown.splitlines()) <= height


def test_panel_without_utf8_and_colours() -> None:
    progress = _progress(12)
    progress.title = "smollm2"
    shown = _render(progress, 80, encoding="cp1252", no_color=True)
    assert "generate 6" in shown and "reward" in shown and shown.isascii()


def _with_failures() -> Progress:
    progress = _progress(12)
    progress.add(13, runs.metrics(13) | {"outcome/ok": 57, "outcome/env_error": 4, "outcome/timeout": 1})
    return progress


@pytest.mark.parametrize("width", [80, 200])
def test_failed_episodes_look_unlike_answers_that_were_cut(width: int) -> None:
    shown = _render(_with_failures(), width, color_system=None)
    assert "finished   57 of 64" in shown and "truncated  2" in shown
    assert "FAILED     5 of 64 episodes: 4 env error, 1 timeout" in shown and "from 0.220" in shown
    colored = _render(_with_failures(), width, color_system="standard")
    assert "\x1b[33mtruncated" in colored and "\x1b[1;31mFAILED" in colored
    assert "FAILED" not in _render(_progress(12), width)


def test_failed_episodes_stand_at_the_end_of_a_plain_line() -> None:
    line, before = step_line(_with_failures()), step_line(_progress(12))
    assert line.endswith("truncated 2  FAILED 4 env error, 1 timeout")
    assert line.index("gen") == before.index("gen") and before.endswith("truncated 2")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize(
    "words", [["--help"], ["rl", "--help"], ["runs", "RUNS"], ["rl", "--print-config", "data.train=ü.jsonl"]]
)
def test_any_encoding_will_do(tmp_path: Path, encoding: str, words: list[str]) -> None:
    with runs.tracker(tmp_path / "smollm2 · 中") as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 2)
    words = [str(tmp_path) if word == "RUNS" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "birl", *words],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding)


def test_a_whole_run_prints_with_ascii_alone(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.track import runs
with runs.tracker(Path({str(tmp_path)!r}), console="plain") as tracker:
    tracker.rewind(None, 0)
    runs.train(tracker, 1, 10)
    tracker.finish({{"next": ["birl chat here"]}})
"""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert "step    1/10" in text and "10 steps" in text and "+---" in text.replace("=", "-")


def test_panel_survives_not_a_number_and_no_total() -> None:
    progress = Progress(title="x", total=None)
    progress.add(1, {"reward/mean": math.nan, "grad_norm": math.inf, "time/train": math.nan, "speed/train": math.nan})
    progress.validate(1, {"validation/odd": math.nan})
    for width in (40, 80, 200):
        assert "nan" in _render(progress, width)
    assert "nan" in step_line(progress)


def test_panel_obeys_no_model_output() -> None:
    assert "\x1b[2J" not in _render(_progress(3), 200) and "\u202e" not in _render(_progress(3), 200)


def test_plain_line() -> None:
    progress = _progress(12)
    line = step_line(progress)
    assert line.startswith("step   12/30  reward  0.440 (val 0.40)  len  14.2  finished 62/64  kl 0.00")
    assert "gen    812 tok/s  train  1,930 tok/s" in line and "eta 2m2" in line


def test_plain_lines_are_aligned() -> None:
    progress = _progress(9)
    before = step_line(progress)
    progress.add(10, runs.metrics(10))
    assert before.index("gen") == step_line(progress).index("gen")


def test_plain_line_without_rewards_shows_the_loss() -> None:
    progress = Progress(title="sft", total=3)
    progress.add(1, {"loss": 2.5, "anything": 1.0})
    assert step_line(progress) == "step    1/3  loss  2.500"


def test_validation_line_names_sources_when_there_are_several() -> None:
    progress = _progress(5)
    metrics = {"validation/all/pass@1": 0.3, "validation/a/pass@1": 0.4, "validation/b/pass@1": 0.2}
    progress.validate(10, metrics)
    assert validation_line(progress, 10, metrics) == "step   10/30  validation 0.300 (at first 0.300)  a 0.400  b 0.200"
    metrics = {"validation/all/pass@1": 0.3, "validation/x/a/pass@1": 0.4, "validation/x/b/pass@1": 0.2}
    assert validation_line(progress, 10, metrics).endswith("  x/a 0.400  x/b 0.200")


def test_characters_that_the_terminal_lacks_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", file)
    Terminal().say("smollm2 · 中 ✓")
    file.flush()
    assert isinstance(file.buffer, io.BytesIO) and file.buffer.getvalue() == b"smollm2 ? ? ?\n"


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3], 4) == ["▁▃▆█"]
    assert sparkline([0, math.nan, 3], 3) == ["▁ █"]
    assert sparkline([1, 1], 2) == ["▄▄"]
    assert sparkline([], 5, height=2) == ["", ""]
    assert len(sparkline(range(1000), 37)[0]) == 37


def test_units() -> None:
    assert [duration(s) for s in (8.4, 130, 7260, 90000, math.nan)] == ["8s", "2m10s", "2h01m", "1d01h", "?"]
    assert [count(v) for v in (1930.4, 1.23e7, 5e10, math.inf)] == ["1,930", "12.3M", "50.0G", "inf"]
    assert [figure(v) for v in (0.5, 0.00012, 62, 15.23, 0.0)] == ["0.500", "0.00012", "62", "15.2", "0"]


@pytest.mark.parametrize("why", [{"updates/skipped": 1.0}, {"updates/skipped": 0.0, "tokens/trained": 0.0}])
def test_a_run_that_trains_nothing_says_so_in_every_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], why: dict[str, float]
) -> None:
    """All rewards of a group are equal: no answer is better than another. Or none has one."""
    equal = {**runs.metrics(1), "updates/done": 0.0, "speed/train": 0.0, **why}
    said = "nothing was trained: all rewards of a group are equal or missing, in 1 of 1 step"
    progress = _progress(0)
    progress.add(1, equal)
    assert said in step_line(progress) and "train  " not in step_line(progress)
    assert all(said in _render(progress, 100, height) for height in (5, 24, 60))
    assert said in NotebookView(progress).content()["text/html"]
    with runs.tracker(tmp_path, console="plain") as tracker:
        tracker.rewind(None, 0)
        assert " steps, a line after each" in capsys.readouterr().out
        for step in (1, 2, 3):
            tracker.step(
                step,
                equal if step > 1 else {**equal, "updates/done": 1.0, "updates/skipped": 0.0, "tokens/trained": 9.0},
            )
        tracker.finish({"next": []})
    told = "all rewards of a group are equal or missing, in 2 of 3 steps"
    assert " ".join(capsys.readouterr().out.split()).count(told) == 2
    assert told in (tmp_path / "report.html").read_text()


def test_one_is_no_plural() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
