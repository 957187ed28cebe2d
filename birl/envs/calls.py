"""Functions of users, called so that one does not hold up the others: coroutines as they are, plain functions in a
thread. And their commands, which are to run in another folder."""

import asyncio
import inspect
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.foreign import ENDS, harmless

IDLE = 10.0  # seconds that a thread waits for more work


class Threads:
    """At most `most` daemon threads at work, started as they are needed. Unlike `ThreadPoolExecutor`'s, one that hangs
    does not keep the program from ending, nor, once its caller has gone, others from working."""

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self.waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self.idle = self.started = 0
        self.working: set[Future] = set()
        self.left: set[Future] = set()  # at work, without a caller

    def run(self, work: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self.changed:
            self.waiting.append((future, work))
            self._staff()
        return future

    def leave(self, future: Future) -> None:
        """Its caller stopped waiting: if it is at work, another thread may take its place."""
        with self.changed:
            if future in self.working:
                self.left.add(future)
                self._staff()

    def _staff(self) -> None:
        if self.idle >= len(self.waiting) or self.started - len(self.left) >= self.most:
            self.changed.notify()
        elif self.waiting:
            self.started += 1
            threading.Thread(target=self._serve, daemon=True, name=self.name).start()

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            future, work = taken
            if future.set_running_or_notify_cancel():
                finish(future, work)
            with self.changed:
                self.working.discard(future)
                left = future in self.left
                self.left.discard(future)
                if left and self.started > self.most:  # another one came in its place
                    self.started -= 1
                    return
            del taken, future, work

    def _take(self) -> tuple[Future, Callable[[], Any]] | None:
        """None: there was nothing to do for a while."""
        with self.changed:
            self.idle += 1
            result = self.changed.wait_for(lambda: self.waiting, IDLE)
            self.idle -= 1
            if not result:
                self.started -= 1
                return None
            future, work = self.waiting.popleft()
            self.working.add(future)
            return future, work


def finish(future: Future, work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except asyncio.CancelledError:  # raised by the function: the episode was not cancelled
        future.set_exception(RuntimeError("it was cancelled from within"))
    except BaseException as error:
        future.set_exception(harmless(error))


#: Steps are short, and hold Python's lock while they compute: many at once would keep it from the event loop.
STEPS = Threads(64, "birl-env")
#: An agent has its thread for a whole episode, and mostly waits for the model.
AGENTS = Threads(1024, "birl-agent")
#: Closing does not wait behind what hangs.
CLOSING = Threads(32, "birl-close")


async def called(function: Callable[..., Any], *args: Any, threads: Threads = STEPS) -> Any:
    """The result of a plain or an async function. Cancelling leaves a thread that runs already to itself."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        future = threads.run(lambda: function(*args))
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            threads.leave(future)
            raise
        return await result if inspect.isawaitable(result) else result
    except ENDS as error:
        raise harmless(error) from error


def full_names(words: list[str], key: str, text: str) -> list[str]:
    """A command whose program and files are named in full. Raises `BirlError`, in which `key` is `text`."""
    # Not resolved, as a virtual environment's python is a link.
    result = [os.path.abspath(w) if os.path.isfile(w) or ("/" in w and os.path.exists(w)) else w for w in words]
    if Path(result[0]).name.startswith("python") and (absent := missing(result[1:])):
        raise BirlError(f"{key}={text}: there is no file {absent} in {Path.cwd()}.")
    program = shutil.which(result[0], path=search_path())
    if program is None:
        raise BirlError(f"{key}={text}: there is no program {result[0]}.")
    return [program, *result[1:]]


def missing(arguments: list[str]) -> str:
    """The script that Python is to run, where it does not exist: those that do have their full names."""
    script = next((word for word in arguments if not word.startswith("-")), "")
    module = any(word.startswith(("-m", "-c")) for word in arguments)
    return script if script.endswith(".py") and not module and not os.path.isabs(script) else ""


def search_path() -> str:
    """`python` is the one that runs birl."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
