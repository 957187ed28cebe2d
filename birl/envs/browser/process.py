"""A worker process, from its start to its end; it is never restarted. Every call of it has a deadline.

It runs episodes in one browser (`birl/envs/browser/worker`), and is called in lines of JSON. A worker that misses a
deadline is killed with everything it started.
"""

import asyncio
import json
import os
import shutil
import tempfile
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.process import end_strays, kill

PROGRAM = Path(__file__).parent / "worker"
START = 90.0  # seconds a worker may take to start
QUIT = 5.0  # seconds it may take to end
LINE = 1 << 26  # longest reply [bytes]
# environment variables of a worker: no keys except those that WebArena's judge needs
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PW_EXTRA_HEADERS", "OPENAI_API_KEY", "OPENAI_BASE_URL")


class Lost(Exception):
    """The browser has ended, and its episodes with it."""


class Worker:
    """`hello` is its first message: the available tasks, and the actions."""

    def __init__(self, process: asyncio.subprocess.Process, python: str, folder: str) -> None:
        self.process, self.python, self.folder = process, python, folder
        self.hello: dict[str, Any] = {}
        self.killed = False
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.ids = count()
        self.stderr: deque[str] = deque(maxlen=3)  # the last lines of stderr
        self.tasks = [asyncio.create_task(self._listen())]

    @classmethod
    async def start(cls, python: str, settings: dict[str, Any]) -> "Worker":
        """Start a worker. Raises `BirlError` with what is missing, `Lost` if it was killed."""
        passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("WA_")}
        folder = tempfile.mkdtemp(prefix="birl-browser-")
        try:
            pipe, own = asyncio.subprocess.PIPE, {"TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
            process = await asyncio.create_subprocess_exec(
                python, "-s", str(PROGRAM), stdin=pipe, stdout=pipe, stderr=pipe, env={**passed, **own}, limit=LINE,
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        worker = cls(process, python, folder)
        try:
            await worker._meet(settings)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def _meet(self, settings: dict[str, Any]) -> None:
        assert self.process.stdout is not None
        self._write(settings)
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), START)
        except TimeoutError:
            raise BirlError(f"{self.python}: the browser did not start within {START:g} s.") from None
        self.hello = json.loads(line or "{}")
        if "tasks" in self.hello:
            self.tasks.append(asyncio.create_task(self._read()))
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(self.process.wait(), *self.tasks), 1.0)
        if (self.process.returncode or 0) < 0:
            raise Lost("the browser's process was killed while it started")
        raise BirlError(_problem(self.python, self.hello.get("problem") or " ".join(self.stderr)))

    @property
    def alive(self) -> bool:
        return not self.killed and self.process.returncode is None

    async def call(self, do: str, episode: int, timeout: float, **more: Any) -> dict[str, Any]:
        """The reply. Raises `Lost` if there will be none, `RuntimeError` with the error."""
        if not self.alive:
            raise Lost("the browser of this episode is gone")
        number = next(self.ids)
        future = self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, "do": do, "episode": episode, **more})
            result = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            await self.kill()
            raise Lost(f"{do} took longer than env.call_timeout={timeout:g} s; the browser was killed") from None
        finally:
            self.answers.pop(number, None)
        if result.get("lost"):
            await self.kill()
            raise Lost(f"the browser crashed: {result['failed']}")
        if "failed" in result:
            raise RuntimeError(result["failed"])
        return result

    def forget(self, episode: int) -> None:
        """Close an episode without waiting for it."""
        if self.alive:
            self._write({"id": next(self.ids), "do": "close", "episode": episode})

    async def quit(self) -> None:
        """End in an orderly way if possible, else by force."""
        if self.alive and self.process.stdin is not None:
            self.process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), QUIT)
        await self.kill()

    async def kill(self) -> None:
        """End all of its processes and remove its files. A second call waits for the first one."""
        self.killed = True
        if self.process.returncode is None:
            kill(self.process.pid)
        end_strays(self.folder, "cmdline")  # Playwright gives Chromium a separate process group, and a profile there
        self._end_waits()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), QUIT)
        end_strays(self.folder, "cmdline")  # a browser that was being started
        shutil.rmtree(self.folder, ignore_errors=True)
        if others := [task for task in self.tasks if task is not asyncio.current_task()]:
            await asyncio.wait(others, timeout=QUIT)

    def _write(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError, OSError):
            while line := await self.process.stdout.readline():
                result = json.loads(line)
                if (future := self.answers.get(result["id"])) is not None and not future.done():
                    future.set_result(result)
        self._end_waits()

    async def _listen(self) -> None:
        assert self.process.stderr is not None
        with suppress(ValueError, OSError):
            while line := await self.process.stderr.readline():
                self.stderr.append(line.decode(errors="replace").strip())

    def _end_waits(self) -> None:
        for future in self.answers.values():
            if not future.done():
                future.set_exception(
                    Lost(f"the browser's process died. Its last output: {' '.join(self.stderr)[-300:]}")
                )


def _problem(python: str, output: str) -> str:
    if "No module named" in output or not output:
        return (
            f"Browser tasks need BrowserGym, in an environment of its own: run `make setup-browser`, or name an "
            f"interpreter that has it, env.python=PATH. ({python}: {output or 'ended without a word'})"
        )
    return output.removeprefix("LookupError: ").strip("'\"")
