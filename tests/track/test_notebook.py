"""What a notebook sees: progress in place, a run's files as tables, curves; and the example notebook, executed."""

import asyncio
import builtins
import html
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from birl import BirlError, Trainer, signals
from birl.track.charts import plot
from birl.track.console import LINES, NotebookView, PlainView, Terminal, View, open_view
from birl.track.log import Records
from birl.track.progress import Progress
from tests.track import runs
from tests.track.runs import HOSTILE

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


class Display:
    """IPython's `display`, and the handle that it gives."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, content: dict[str, str], raw: bool, display_id: bool) -> "Display":
        assert raw and display_id
        self.shown.append(content)
        return self

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(content)


def test_a_notebook_gets_one_output_that_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birl.track.console.SECONDS", 0.01)
    progress, display = Progress(title="smollm2", total=1000), Display()
    view = NotebookView(progress, display)
    view.start()
    for step in range(1, 1001):
        progress.add(step, runs.metrics(step))
        view.step()
        if step % 100 == 0:
            view.validation(step, runs.validation(step))
    view.message(HOSTILE)
    view.stop()
    view.stop()
    assert not view._thread.is_alive()  # type: ignore[union-attr]
    last = display.shown[-1]
    assert last["text/plain"].startswith("birl: step 1000/1000") and len(display.shown) < 1000
    assert last["text/plain"].count("\n") == LINES and "step 1000/1000  validation" in last["text/plain"]
    page = last["text/html"]
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert "\u202e" not in page and "⟪U+202E⟫" in page
    assert "1000" in page and page.startswith("<pre ") and page.endswith("</pre>")


def test_which_view_a_notebook_gets() -> None:
    progress = Progress(title="x")
    console = Terminal(force_jupyter=True)
    assert isinstance(open_view("auto", progress, console), NotebookView)
    assert isinstance(open_view("live", progress, console), NotebookView)
    assert isinstance(open_view("plain", progress, console), PlainView)
    assert type(open_view("off", progress, console)) is View


def finished(run: Path) -> Path:
    with runs.tracker(run) as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 6)
    return run


def test_files_are_sequences_and_tables(tmp_path: Path) -> None:
    run = finished(tmp_path)
    metrics, rollouts = Records(run / "metrics.jsonl"), Records(run / "rollouts.jsonl")
    assert len(metrics) == 6 and metrics[0]["step"] == 1 and metrics[-1]["step"] == 6
    assert [m["step"] for m in metrics[1:3]] == [2, 3] and metrics.column("length/max") == [32.0] * 6
    assert metrics.column("grad_norm")[2] is None
    table = rollouts.to_pandas()
    assert len(table) == 18 and list(table.columns) == ["step", "tokens", "logprobs", "text"]
    assert repr(rollouts) == f"<18 records of {run / 'rollouts.jsonl'}>"
    with pytest.raises(IndexError):
        metrics[6]
    with pytest.raises(BirlError, match=r"has no 'reward/men'.*reward/mean"):
        metrics.column("reward/men")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":7,"rew')
    assert len(metrics) == 6
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(BirlError, match=r"metrics\.jsonl, line 7: not JSON"):
        list(metrics)
    missing = Records(run / "nothing.jsonl")
    assert len(missing) == 0 and repr(missing)
    with pytest.raises(BirlError, match=r"call train\(\) first"):
        missing.to_pandas()


def test_curves(tmp_path: Path) -> None:
    run = finished(tmp_path)
    curves = plot(run)
    assert curves.names[:2] == ("reward/mean", "length/mean") and len(curves.names) == 5
    curves.save(tmp_path / "curves.html")
    assert (tmp_path / "curves.html").read_text() == curves.html and curves.html.count("data-chart=") == 5
    (shown,) = re.findall('srcdoc="(.*)"></iframe>', curves._repr_html_(), re.S)
    assert html.unescape(shown) == curves.html and "reward/mean" in repr(curves)

    def steps(name: str) -> list[int]:
        data = plot(run, [name]).html.partition('id="data">')[2].partition("</script>")[0]
        return json.loads(data)[0]["lines"][0]["x"]

    assert steps("validation/all/pass@1") == [0, 5] and steps("grad_norm") == [1, 2, 3, 4, 5, 6]
    with pytest.raises(BirlError, match=r"no metric 'klx'.*kl"):
        plot(run, ["klx"])
    (tmp_path / "new").mkdir()
    with pytest.raises(BirlError, match=r"call train\(\) first"):
        plot(tmp_path / "new")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = finished(tmp_path), builtins.__import__

    def without(name: str, *words: Any, **more: Any) -> Any:
        if name.split(".")[0] == "pandas":
            raise ImportError(name)
        return real(name, *words, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BirlError, match=r'pip install "birl\[notebook\]"'):
        Records(run / "metrics.jsonl").to_pandas()


def test_an_interrupted_cell_saves(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: an event loop runs, and Ctrl-C comes to the thread that waits for the run."""
    small = {"engine.kv_cache_gb": 0.01, "threads": 1, "track.console": "off", "track.tensorboard": False}
    trainer = Trainer(
        str(tiny),
        lambda completions, **_: [float(len(c)) for c in completions],
        [{"prompt": f"What is {i}?"} for i in range(8)],
        num_generations=2, batch_size=2, max_tokens=8, max_steps=2000, output_dir=str(tmp_path / "run"),
        overrides=small,
    )  # fmt: skip

    def press() -> None:
        while not signals.IN_THREADS or len(trainer.metrics) < 2:
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def cell() -> dict[str, Any]:
        threading.Thread(target=press, daemon=True).start()
        return trainer.train()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    coroutine = cell()
    try:
        asyncio._set_running_loop(asyncio.new_event_loop())  # asyncio.run would take the signal itself
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
    finally:
        asyncio._set_running_loop(None)
        signal.signal(signal.SIGINT, before)
    summary = ended.value.value
    assert not summary["finished"] and 2 <= summary["step"] < 2000
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) and not signals.IN_THREADS


def shape(cell: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds of its outputs, in order; text that is printed in pieces is one."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for output in cell["outputs"]:
        kind = output["output_type"], tuple(sorted(output.get("data", {output.get("name", ""): ""})))
        if not found or found[-1] != kind or kind[0] != "stream":
            found.append(kind)
    return found


def summary(cell: dict[str, Any]) -> list[list[str]]:
    """The words of what is displayed once a run is over, without numbers and colours."""
    shown = ["".join(o["data"]["text/plain"]) for o in cell["outputs"] if o["output_type"] == "display_data"]
    return [re.findall(r"[a-z/]{2,}", re.sub(r"\x1b\[\d*m", "", text)) for text in shown[1:]]


def test_the_example_notebook_is_what_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is executed as it stands; the outputs in the repository have the shape, and the words,
    of those that come out."""
    nbformat, nbclient = _package("nbformat"), _package("nbclient")
    _package("ipykernel")
    committed = json.loads(EXAMPLE.read_text())
    notebook = nbformat.read(EXAMPLE, 4)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE.parents[1]), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
    pairs = [
        (old, new) for old, new in zip(committed["cells"], notebook.cells, strict=True) if old["cell_type"] == "code"
    ]
    for old, new in pairs:
        assert shape(old) == shape(new), "".join(old["source"])
        assert summary(old) == summary(new)  # what was committed is what this version prints
        assert old["execution_count"] == new["execution_count"]
    progress = [o for old, _ in pairs for o in old["outputs"] if "text/html" in o.get("data", {})]
    assert "step   16/16" in "".join(progress[0]["data"]["text/plain"])
    assert (
        "/root" not in EXAMPLE.read_text() and "/tmp" not in EXAMPLE.read_text() and "/home" not in EXAMPLE.read_text()
    )
    said = "".join("".join(o.get("text", "")) for _, new in pairs for o in new["outputs"])
    ((before, after),) = re.findall(r"rose from ([\d.]+) to ([\d.]+)", said)  # it does learn
    assert float(after) > float(before) + 0.3
    assert "learner" in said and (tmp_path / "runs" / "notebook" / "run" / "trace.json").is_file()


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {name}: make setup")
