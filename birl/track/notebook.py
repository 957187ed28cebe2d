"""Progress in a notebook: one output that is written anew in place, instead of a line a step."""

import contextvars
import html
import io
import threading
from typing import Any

from rich.console import Console

from birl.track.console import step_line, validation_line
from birl.track.panel import ProgressPanel
from birl.track.progress import Progress
from birl.visible import visible

WIDTH = 96  # columns of the panel; notebooks do not say how wide they are
SECONDS = 1.0  # between two looks at the progress
LINES = 6  # messages and validations that stay below it


class NotebookView:
    """A `birl.track.console.View`: the panel of the terminal as one HTML output, with the last messages below it."""

    def __init__(self, progress: Progress, display: Any = None) -> None:
        """`display`: IPython's function, unless a test has its own."""
        self.progress = progress
        self._display, self._handle = display, None
        self._said: list[str] = []
        self._shown: dict[str, str] = {}
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._display is None:
            from IPython.display import display  # pyright: ignore[reportMissingImports]

            self._display = display
        self._shown = self.content()
        self._handle = self._display(self._shown, raw=True, display_id=True)
        # Jupyter finds the cell that an output belongs to by the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="progress", daemon=True)
        self._thread.start()

    def step(self) -> None: ...

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self.message(validation_line(self.progress, step, metrics))

    def message(self, text: str) -> None:
        with self._lock:
            self._said = [*self._said, visible(text)][-LINES:]

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
        """By type, as Jupyter takes it. Everything that a run says is text, never markup."""
        with self._lock:
            said = list(self._said)
        console = Console(
            file=io.StringIO(), record=True, width=WIDTH, height=24, force_terminal=True, color_system="truecolor",
            force_jupyter=False, legacy_windows=False,
        )  # fmt: skip
        console.print(ProgressPanel(self.progress))
        page = console.export_html(inline_styles=True, code_format="{code}").rstrip()
        style = "font-family:monospace;line-height:1.2;white-space:pre;overflow-x:auto"
        more = html.escape("\n".join(said))
        head = step_line(self.progress) if self.progress.step else visible(self.progress.title)
        return {
            "text/html": f'<pre style="{style}">{page}\n{more}</pre>',
            "text/plain": "\n".join([f"birl: {head}", *said]),
        }
