"""The page in a real browser: a server of its own, and Debian's Chromium driven by Playwright.

A test takes the fixture `chromium` (put `from tests.view.browser import chromium` at the top of its file) and opens
pages with `opened(chromium, url)`, which fails when the page wrote an error to its console or asked another host.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from birl.view.command import listen, server
from birl.view.folders import Runs

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
WIDE: Any = {"width": 1280, "height": 800}
NARROW: Any = {"width": 360, "height": 740}
WAIT = 15_000  # ms; a machine that is shared takes its time


def program() -> str:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), "")


@contextmanager
def serving(*roots: Path) -> Iterator[str]:
    """The page for the runs below `roots`: its address, ending in /."""
    listener = listen(0)
    port = listener.getsockname()[1]
    page = server(Runs(roots), listener)
    thread = threading.Thread(target=page.run, args=([listener],), daemon=True)
    thread.start()
    try:
        while not page.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/"
    finally:
        page.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture(scope="module")  # Playwright keeps an event loop in this thread: not longer than a file of tests
def chromium() -> Iterator[Any]:
    """A browser. Where everything is tested (CI=1) a missing one is a failure, else the test is skipped."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return _missing("the package playwright: make setup-dev")
    executable = program()
    if not executable:
        return _missing("Chromium: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


def _missing(what: str) -> None:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}")


@contextmanager
def opened(browser: Any, url: str, *, quiet: Sequence[str] = (), **options: Any) -> Iterator[Any]:
    """A page at `url` in a context of its own. `options`: viewport, color_scheme and others of Playwright. `quiet`:
    parts of console errors that the test expects."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    context.set_default_timeout(WAIT)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda problem: said.append(str(problem)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(url)
        page.wait_for_selector(".view:not([aria-busy])")
        yield page
        wrong = [text for text in said if not any(part in text for part in quiet)]
        assert not wrong, wrong
        origin = url.split("/#")[0].rstrip("/") + "/"
        assert all(address.startswith((origin, "data:", "blob:")) for address in asked), asked
    finally:
        context.close()


def until(page: Any, expression: str, arg: Any = None, seconds: float = WAIT / 1000) -> None:
    """Wait until a JavaScript expression, or a function of `arg`, is true. Playwright's own wait_for_function evaluates
    inside the page, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)
