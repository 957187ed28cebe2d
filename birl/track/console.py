"""Progress of a run in the terminal or a notebook: a live panel, one line a step, or nothing."""

import contextvars
import html
import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from birl.track.panel import ProgressPanel
from birl.track.progress import Progress, failures, nothing_trained, source, validation_score
from birl.track.units import count, counted, duration
from birl.visible import visible

WIDTH = 96  # columns of the panel in a notebook, whose width is unknown
SECONDS = 1.0  # between two refreshes in a notebook
LINES = 6  # messages and validations that are kept below it


class View:
    """Shows nothing; the interface of views. `progress` is updated before each call."""

    def start(self) -> None: ...
    def step(self) -> None: ...
    def validation(self, step: int, metrics: dict[str, float]) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...


class Terminal(Console):
    """A rich console whose failures do not end the run: output to a closed pipe is dropped, not an error."""

    def __init__(self, **options: Any) -> None:
        # A character that the terminal's encoding lacks becomes a question mark, not an exception.
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: after a `kill -9` it would stay hidden."""
        return False

    def say(self, text: Text | str) -> None:
        if self.quiet:
            return
        try:
            self.print(visible(text) if isinstance(text, str) else text, soft_wrap=True)
        except OSError:
            self.quiet = True


def open_view(mode: str, progress: Progress, console: Terminal) -> View:
    """The view for track.console=`mode`. A live panel needs a terminal or a notebook; else `live` means `plain`."""
    if mode == "off":
        return View()
    if mode != "plain" and console.is_jupyter:
        return NotebookView(progress)
    if mode != "plain" and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(progress, console)
    return PlainView(progress, console)


@contextmanager
def only_shown(what: str) -> Iterator[None]:
    """Context of code that only displays a run: an exception is only a warning on stderr."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has closed the pipe
        pass
    except Exception as error:
        with suppress(OSError, ValueError):  # ValueError: a closed stream
            text = f"birl: warning: {what} failed ({type(error).__name__}: {error}); the run is not affected."
            print(visible(text), file=sys.stderr)


class PlainView(View):
    """One aligned line a step, for files and pipes."""

    def __init__(self, progress: Progress, console: Terminal) -> None:
        self.progress, self.console = progress, console

    def start(self) -> None:
        steps = f": {counted(self.progress.total, 'step')}, a line after each" if self.progress.total else ""
        self.console.say(f"birl: {visible(self.progress.title)}{steps}")

    def step(self) -> None:
        self.console.say(step_line(self.progress))

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self.console.say(validation_line(self.progress, step, metrics))

    def message(self, text: str) -> None:
        self.console.say(visible(text))


class LiveView(PlainView):
    """A panel redrawn in place; prints, warnings and log lines scroll above it."""

    def __init__(self, progress: Progress, console: Terminal) -> None:
        super().__init__(progress, console)
        # Two frames a second: drawing takes the GIL from the thread that generates.
        self._live = Live(
            ProgressPanel(progress), console=console, refresh_per_second=2, vertical_overflow="crop", transient=False
        )
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        old = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        self._live.start()
        # Handlers made earlier write to the streams that the panel replaced; their output would be drawn over.
        for handler in _stream_handlers():
            if name := old.get(id(handler.stream)):
                self._moved.append((handler, handler.stream))
                handler.setStream(getattr(sys, name))

    def step(self) -> None: ...

    def stop(self) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()
        self.progress.phase = ""
        with suppress(OSError):
            self._live.stop()


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in known:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else []:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler


def step_line(progress: Progress) -> str:
    """`step 12/30  reward 0.781 (val 0.74)  len 14.2  finished 64/64  ...`; metrics that the run lacks are left out."""
    m, total = progress.metrics, progress.total
    digits = max(4, len(str(total or 0)))
    parts = [f"step {progress.step:>{digits}}" + (f"/{total}" if total else "")]
    value = m.get(progress.headline)
    if value is not None:
        parts.append(f"{'reward' if progress.headline == 'reward/mean' else 'loss'} {value:6.3f}")
    if progress.validations:
        parts[-1] += f" (val {progress.validations[-1][1]:.2f})"
    parts += [text for name, text in _line_parts(m) if name in m]
    if progress.eta is not None:
        parts.append(f"eta {duration(progress.eta)}")
    # At the end, so that the columns stay aligned: a truncated answer has a reward, a failed episode has none.
    if m.get("outcome/truncated"):
        parts.append(f"truncated {count(m['outcome/truncated'])}")
    if progress.warning:
        parts.append(progress.warning)
    if failed := failures(m):
        parts.append("FAILED " + ", ".join(f"{count(n)} {cause}" for cause, n in failed.items()))
    return "  ".join(parts)


def _line_parts(m: dict[str, float]) -> Iterator[tuple[str, str]]:
    asked = count(m.get("outcome/asked", 0))
    yield "length/mean", f"len {m.get('length/mean', 0):5.1f}"
    yield "outcome/asked", f"finished {count(m.get('outcome/ok', 0)):>{len(asked)}}/{asked}"
    yield "kl", f"kl {m.get('kl', 0):.3f}"
    yield "speed/generate", f"gen {count(m.get('speed/generate', 0)):>6} tok/s"
    if not nothing_trained(m):
        yield "speed/train", f"train {count(m.get('speed/train', 0)):>6} tok/s"
    yield "time/step", f"{m.get('time/step', 0):6.1f} s"


def validation_line(progress: Progress, step: int, metrics: dict[str, float]) -> str:
    digits = max(4, len(str(progress.total or 0)))
    score = validation_score(metrics)
    line = f"step {step:>{digits}}" + (f"/{progress.total}" if progress.total else "") + "  validation"
    line += f" {score:.3f}" if score is not None else ""
    if len(progress.validations) > 1:
        line += f" (at first {progress.validations[0][1]:.3f})"
    figure = next((kind for kind in ("/score", "/pass@1") if any(name.endswith(kind) for name in metrics)), "/pass@1")
    sources = {source(name): value for name, value in metrics.items() if name.endswith(figure)}
    sources.pop("all", None)
    return line + "".join(f"  {visible(name)} {value:.3f}" for name, value in sources.items() if len(sources) > 1)


class NotebookView(View):
    """The terminal's panel as one HTML output, followed by the last messages."""

    def __init__(self, progress: Progress, display: Any = None) -> None:
        """`display`: function that shows the output, IPython's by default."""
        self.progress = progress
        self._display, self._handle = display, None
        self._messages: list[str] = []
        self._shown: dict[str, str] = {}
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._display is None:
            from IPython.display import display  # pyright: ignore[reportMissingImports]

            self._display = display
        self._shown = self.content()
        self._handle = self._display(self._shown, raw=True, display_id=True)
        # Jupyter assigns outputs to cells by the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="progress", daemon=True)
        self._thread.start()

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self.message(validation_line(self.progress, step, metrics))

    def message(self, text: str) -> None:
        with self._lock:
            self._messages = [*self._messages, visible(text)][-LINES:]

    def stop(self) -> None:
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self.progress.phase = ""
        self._update()

    def _watch(self) -> None:
        while not self._stopped.wait(SECONDS):
            self._update()

    def _update(self) -> None:
        content = self.content()
        if self._handle is not None and content != self._shown:
            self._handle.update(content, raw=True)
            self._shown = content

    def content(self) -> dict[str, str]:
        """The output by MIME type, for Jupyter. The run's texts are escaped."""
        with self._lock:
            messages = list(self._messages)
        console = Console(
            file=io.StringIO(), record=True, width=WIDTH, height=24, force_terminal=True, color_system="truecolor",
            force_jupyter=False, legacy_windows=False,
        )  # fmt: skip
        console.print(ProgressPanel(self.progress))
        page = console.export_html(inline_styles=True, code_format="{code}").rstrip()
        style = "font-family:monospace;line-height:1.2;white-space:pre;overflow-x:auto"
        more = html.escape("\n".join(messages))
        head = step_line(self.progress) if self.progress.step else visible(self.progress.title)
        return {
            "text/html": f'<pre style="{style}">{page}\n{more}</pre>',
            "text/plain": "\n".join([f"birl: {head}", *messages]),
        }
