"""Reports of a run: its files, the trackers, the terminal and the report."""

import atexit
import dataclasses
import os
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from birl.config.schema import Reports, Track
from birl.regular import write_whole, writing
from birl.track.console import Terminal, only_shown, open_view
from birl.track.log import JsonLog, encode, whole
from birl.track.outbox import PATIENCE, Marks, Outbox, Record
from birl.track.progress import Progress, numbers, stored
from birl.track.sink import KINDS, Figures, Start, public
from birl.track.summary import closing, facts, figures
from birl.track.trace import FILE, Trace

if TYPE_CHECKING:  # imported only by the runs that use it
    from birl.track.tensorboard import TensorBoard

SAMPLES_IN_TRACKERS = 8
LEDGER = "ledger.jsonl"


class Tracker:
    """Single interface for the reports of a training loop.

    Example:
        with Tracker(run, config.track, title="smollm2", total_steps=30, config=flat) as tracker:
            tracker.rewind(offsets=None, step=0)
            tracker.step(1, {"reward/mean": 0.2})
            tracker.finish({"next": ["birl chat runs/x"]})
    """

    def __init__(
        self, run: Path, track: Reports, *, title: str, total_steps: int | None, config: dict[str, object]
    ) -> None:
        self.run, self.track, self.title, self.config = Path(run).absolute(), track, title, config
        self.shown = short(self.run)
        self._ledger = self.run / LEDGER
        self._console = Terminal()
        self._progress = Progress(title=title, total=total_steps)
        self._view = open_view(track.console, self._progress, self._console)
        self._logs: dict[str, JsonLog] = {}
        self._trace: Trace | None = None
        self.traced = 0.0  # end of the kept part of the trace [s since 1970]
        self._events: TensorBoard | None = None
        self._boxes: list[Outbox] = []

    def rewind(self, offsets: dict[str, int] | None, step: int) -> None:
        """Open everything, once, at the start. `offsets` are those stored in the checkpoint of `step`: files are
        truncated to them, so that they end up like those of an uninterrupted run. None empties them (a new run)."""
        with writing(self.run):
            self.run.mkdir(parents=True, exist_ok=True)
        names = ["metrics.jsonl", "validation.jsonl"]
        if isinstance(self.track, Track):
            recorded = self.track.record or (self.run / "record.jsonl").exists()  # by an earlier process of the run
            names += ["rollouts.jsonl"] + ["record.jsonl"] * recorded
        self._logs = {name: JsonLog(self.run / name) for name in names}
        short = [log.path for name, log in self._logs.items() if not log.cut((offsets or {}).get(name, 0))]
        kept = whole(self._ledger) if self._ledger.is_file() else 0  # a resume does not truncate it
        short += [self._ledger] * (kept < (offsets or {}).get(LEDGER, 0))
        if self.track.trace:
            self._trace = Trace(self.run / FILE)
            self.traced = self._trace.begin((offsets or {}).get(FILE), step)
        self._open(step, resumed=offsets is not None)
        self._recall()
        atexit.register(self.close)
        with only_shown("the console"):
            self._view.start()
        for path in short:
            self.message(
                f"warning: {path} is shorter than at the checkpoint, or was changed; some earlier records are missing "
                "from it"
            )

    def expect(self, steps: int | None) -> None:
        """Set the number of steps of the run; None: unknown."""
        self._progress.total = steps

    def _open(self, step: int, resumed: bool) -> None:
        start = Start(run=self.run, mode="offline", id=secrets.token_hex(16), config={}, step=step, resumed=resumed)
        if self.track.tensorboard:
            from birl.track.tensorboard import TensorBoard

            self._events = TensorBoard(start)
        for name, kind in KINDS.items():
            mode: str = getattr(self.track, name)
            if mode == "off":
                continue
            box = Outbox(kind.title, kind.make(), Marks(self.run, name), PATIENCE[mode])
            box.open(dataclasses.replace(start, mode=mode, config=public(self.config)))
            self._boxes.append(box)

    def _recall(self) -> None:
        """Queue figures that an earlier process could not send."""
        for record in stored(self.run / "metrics.jsonl"):
            self._progress.add(record["step"], numbers(record))
            self._put("log", record["step"], numbers(record))
        for record in stored(self.run / "validation.jsonl"):
            self._progress.validate(record["step"], numbers(record))
            self._put("validation", record["step"], numbers(record))

    def offsets(self) -> dict[str, int]:
        """Sizes of the files in bytes, after fsync, to be stored in the checkpoint."""
        beside = {FILE: self._trace.size()} if self._trace else {}
        beside |= {LEDGER: self._ledger.stat().st_size} if self._ledger.is_file() else {}
        return {name: log.sync() for name, log in self._logs.items()} | beside

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of a training step. Any metric name is allowed."""
        metrics = {name: float(value) for name, value in metrics.items()}
        self._logs["metrics.jsonl"].append([{"step": step, "time": _now(), **metrics}])
        self._send("log", step, metrics)
        if self._trace:
            self._trace.count(metrics)
            self._trace.next_step(step)
        self._progress.add(step, metrics)
        with only_shown("the console"):
            self._view.step()

    def validation(
        self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]], about: dict[str, Any] | None = None
    ) -> None:
        """Report a validation after `step` steps, with a few dozen samples (prompt, completion, answer, score, source).
        `about`: digests of weights and data, seed, number of answers."""
        metrics = {name: float(value) for name, value in metrics.items()}
        self._logs["validation.jsonl"].append(
            [{"step": step, "time": _now(), **(about or {}), **metrics, "samples": samples}]
        )
        self._send("validation", step, metrics)
        if few := samples[:SAMPLES_IN_TRACKERS]:
            if self._events:
                self._events.samples(step, few)
            self._put("samples", step, few)
        self._progress.validate(step, metrics)
        with only_shown("the console"):
            self._view.validation(step, metrics)

    def _send(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if self._events:
            self._events.log(step, metrics)
        self._put(kind, step, metrics)

    def _put(self, kind: str, step: int, content: Any) -> None:
        for box in self._boxes:
            box.put(Record(kind, step, content))
            while box.unsaid:
                self.message(box.unsaid.pop(0))

    def rollouts(self, step: int, records: Iterable[dict[str, Any]]) -> None:
        """Write one line per episode. Floats in lists (log-probs) keep six significant digits."""
        if isinstance(self.track, Track) and self.track.rollouts:
            self._logs["rollouts.jsonl"].append({"step": step, **record} for record in records)

    def record(self, row: dict[str, Any]) -> None:
        """Write one step with all digits, if recording is on."""
        if isinstance(self.track, Track) and self.track.record:
            self._logs["record.jsonl"].append([row], exact=True)

    def phase(self, text: str) -> None:
        """Set the current activity ("generating 37/64"), shown only in the live panel; cheap to call."""
        self._progress.phase = text

    def message(self, text: str) -> None:
        """Print a line that stays visible."""
        with only_shown("the console"):
            self._view.message(text)

    def finish(self, summary: dict[str, Any]) -> None:
        """Close everything, write summary.json and report.html, and print the results. `summary["next"]`: commands to
        try next. A failure of the report is only a warning."""
        result = {"title": self.title, "ended": _now(), "finished": True}
        with only_shown("the figures of the run"):
            result |= facts(self.run)
        result |= summary
        self.close(summary=figures(result))
        write_whole(self.run / "summary.json", encode(result))
        if self.track.report:
            from birl.track.report import write_report

            with only_shown(f"{self.run}/report.html"):
                write_report(self.run)
        say_end(self.run, self.track, result)

    def close(self, failed: bool = False, summary: Figures | None = None) -> None:
        """Restore the terminal and close all files and trackers; a second call does nothing."""
        atexit.unregister(self.close)
        with only_shown("the console"):
            self._view.stop()
        events, self._events = self._events, None
        trace, self._trace = self._trace, None
        boxes, self._boxes = self._boxes, []
        for log in (*self._logs.values(), *([trace] if trace else [])):
            log.close()
        if events:
            events.close()
        for box in boxes:
            box.close(summary or {}, failed)
        for text in (text for box in boxes for text in box.unsaid):
            self.message(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def short(run: Path) -> Path:
    """Relative path if it is below the current folder."""
    try:
        return Path(os.path.relpath(run)) if run.is_relative_to(Path.cwd()) else run
    except FileNotFoundError:  # the current folder was deleted meanwhile
        return run


def say_end(run: Path, track: Reports, told: dict[str, Any]) -> None:
    """Print the results of a run. `told`: its summary.json."""
    if track.console == "off":
        return
    console, report = Terminal(), short(run) / "report.html"
    plain, made = not console.encoding.startswith("utf"), track.report and report.is_file()
    with only_shown("the summary of the run"):
        for part in closing(run, short(run), str(told.get("title", run.name)), told, report if made else None, plain):
            console.print(part)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
