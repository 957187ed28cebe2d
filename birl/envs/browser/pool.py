"""k browsers in processes of their own. Each holds several episodes, each episode in a context of its own.

    open(task, seed)     waits until a browser has room, in the order of asking -> a Page
    page.step(action)    what the action did
    page.close()         makes room

Every call has a deadline; a browser that misses it is killed with everything it started, and replaced when the next
episode needs it. The other episodes it held fail; none of them gets a reward.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.waits import waiting

PROGRAM = Path(__file__).parent / "worker"
START = 90.0  # seconds a browser may take to start
QUIT = 5.0  # seconds it may take to end
LINE = 1 << 26  # longest answer [bytes]
#: what a worker gets to see of this process's environment: no keys but those that WebArena's judge needs
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PW_EXTRA_HEADERS", "OPENAI_API_KEY", "OPENAI_BASE_URL")


class Lost(Exception):
    """The browser is gone, and the episodes that it held with it."""


class Browser:
    """One worker process."""

    def __init__(self, python: str, settings: dict[str, Any]) -> None:
        self.python, self.settings = python, settings
        self.open: set[int] = set()
        self.opened = 0
        self.lock = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.ids = count()
        self.folder = ""
        self.tasks: list[asyncio.Task[None]] = []
        self.said: deque[str] = deque(maxlen=3)  # the last lines of stderr

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> dict[str, Any]:
        """What the worker says first. Raises `BirlError`."""
        self.folder = tempfile.mkdtemp(prefix="birl-browser-")
        passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("WA_")}
        self.process = await asyncio.create_subprocess_exec(
            self.python,
            "-s",
            str(PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**passed, "TMPDIR": self.folder, "PYTHONDONTWRITEBYTECODE": "1"},
            limit=LINE,
            start_new_session=True,
        )
        self.said.clear()
        errors = asyncio.create_task(self._listen(self.process))
        try:
            self._write(self.settings)
            line = await asyncio.wait_for(self._reader.readline(), START)
        except TimeoutError:
            await self.kill()
            raise BirlError(f"{self.python}: the browser did not start within {START:g} s.") from None
        except BaseException:
            await self.kill()
            raise
        hello = json.loads(line or "{}")
        if "tasks" not in hello:
            with suppress(TimeoutError):
                await asyncio.wait_for(errors, 1.0)
            await self.kill()
            raise BirlError(_problem(self.python, hello.get("problem") or " ".join(self.said)))
        self.opened = 0
        self.tasks = [errors, asyncio.create_task(self._read(self.process))]
        return hello

    async def call(self, do: str, episode: int, timeout: float, **more: Any) -> dict[str, Any]:
        """The answer. Raises `Lost` where there will be none, `RuntimeError` with what failed."""
        if not self.alive:
            raise Lost("the browser of this episode is gone")
        number = next(self.ids)
        future = self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, "do": do, "episode": episode, **more})
            found = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            await self.kill()
            raise Lost(f"{do} took longer than env.call_timeout={timeout:g} s; the browser was killed") from None
        except OSError as error:
            raise Lost("the browser of this episode is gone") from error
        finally:
            self.answers.pop(number, None)
        if found.get("lost"):
            await self.kill()
            raise Lost(f"the browser crashed: {found['failed']}")
        if "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    async def quit(self) -> None:
        """In good order if it will, by force if not."""
        process = self.process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), QUIT)
        await self.kill()

    async def kill(self) -> None:
        """Leaves no process and no file behind."""
        process, self.process = self.process, None
        if process is None:
            return
        kill_group(process.pid)
        kill_marked(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._end_waits()
        await process.wait()
        kill_marked(self.folder)  # a browser that was just being started
        shutil.rmtree(self.folder, ignore_errors=True)
        current = asyncio.current_task()
        if others := [task for task in self.tasks if task is not current]:
            await asyncio.wait(others, timeout=QUIT)

    @property
    def _reader(self) -> asyncio.StreamReader:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout

    def _write(self, request: dict[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with suppress(ValueError, OSError):
            while line := await process.stdout.readline():
                found = json.loads(line)
                if (future := self.answers.get(found["id"])) is not None and not future.done():
                    future.set_result(found)
        self._end_waits()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with suppress(ValueError, OSError):
            while line := await process.stderr.readline():
                self.said.append(line.decode(errors="replace").strip())

    def _end_waits(self) -> None:
        for future in self.answers.values():
            if not future.done():
                future.set_exception(Lost(f"the browser's process died. It said: {' '.join(self.said)[-300:]}"))


class Page:
    """One episode's hold on a browser."""

    def __init__(self, pool: "Pool", browser: Browser, number: int, first: dict[str, Any]) -> None:
        self.pool, self.browser, self.number, self.first = pool, browser, number, first
        self.process = browser.process

    async def step(self, action: str) -> dict[str, Any]:
        if self.browser.process is not self.process:
            raise Lost("the browser of this episode was lost with another episode's call")
        return await self.browser.call("step", self.number, self.pool.timeout, action=action)

    async def close(self) -> None:
        try:
            if self.browser.process is self.process and self.browser.alive:
                with suppress(Lost):
                    await self.browser.call("close", self.number, self.pool.timeout)
        finally:
            self.pool.leave(self.browser, self.number)


class Pool:
    """`contexts` episodes in each of `workers` browsers, which is replaced after `restart_every` episodes."""

    def __init__(
        self,
        python: str,
        settings: dict[str, Any],
        *,
        workers: int,
        contexts: int,
        restart_every: int,
        timeout: float,
        pictures: str = "",
    ) -> None:
        self.browsers = [Browser(python, settings) for _ in range(workers)]
        self.contexts, self.restart_every, self.timeout, self.pictures = contexts, restart_every, timeout, pictures
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.numbers = count()
        self.hello: dict[str, Any] = {}
        self.closed = False

    async def start(self) -> "Pool":
        """The first browser tells whether all is well; the others start when they are needed."""
        self.hello = await self.browsers[0].start()
        return self

    async def open(self, task: str, seed: int) -> Page:
        number = next(self.numbers)
        with waiting(f"episode on {task}", "room in a browser", "browsers"):
            browser = await self._room(number)
        try:
            async with browser.lock:
                if browser.alive and browser.opened >= self.restart_every and browser.open == {number}:
                    await browser.quit()
                if not browser.alive:
                    await browser.kill()
                    await browser.start()
            browser.opened += 1
            more = {"pictures": str(Path(self.pictures) / f"{number:06d}-{task}-{seed}")} if self.pictures else {}
            first = await browser.call("open", number, self.timeout, task=task, seed=seed, **more)
        except BaseException:
            # A cancelled call goes on in the browser: its context is closed behind it.
            if browser.alive and not self.closed:
                with suppress(OSError, AssertionError):
                    browser._write({"id": next(browser.ids), "do": "close", "episode": number})
            self.leave(browser, number)
            raise
        return Page(self, browser, number, first)

    async def _room(self, number: int) -> Browser:
        while True:
            if self.closed:
                raise Lost("the browsers were closed")
            free = [b for b in self.browsers if self._has_room(b)]
            if free:
                browser = min(free, key=lambda b: (len(b.open), not b.alive))
                browser.open.add(number)
                return browser
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self.waiting:
                    self.waiting.remove(waiter)
                elif not waiter.cancelled():
                    self._wake()  # it had been its turn: the next one's
                raise

    def _has_room(self, browser: Browser) -> bool:
        worn = browser.alive and browser.opened >= self.restart_every
        return len(browser.open) < (1 if worn else self.contexts)

    def leave(self, browser: Browser, number: int) -> None:
        browser.open.discard(number)
        self._wake()

    def _wake(self) -> None:
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def close(self) -> None:
        self.closed = True
        for _ in range(len(self.waiting)):
            self._wake()
        await asyncio.gather(*(browser.quit() for browser in self.browsers))


def _problem(python: str, said: str) -> str:
    if "No module named" in said or not said:
        return (
            f"Browser tasks need BrowserGym, in an environment of its own: run `make setup-browser`, or name an "
            f"interpreter that has it, env.python=PATH. ({python}: {said or 'ended without a word'})"
        )
    return said.removeprefix("LookupError: ").strip("'\"")


def kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_marked(folder: str) -> None:
    """Every process whose command line names the worker's folder: Playwright gives Chromium a group of its own, which
    the kill of the worker's does not reach, and a profile in this folder."""
    if sys.platform != "linux" or not folder:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if folder.encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
