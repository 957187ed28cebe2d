"""Calls user functions so that none blocks the others: coroutines directly, plain functions in a thread. Also resolves
user commands, which run in another folder."""

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

from birl.errors import BirlError, no_file
from birl.foreign import ENDS, harmless

IDLE = 10.0  # seconds that an idle thread waits for work


class Threads:
    """A pool of at most `most` busy daemon threads, started when needed. Unlike with `ThreadPoolExecutor`, a hanging
    thread does not keep the program from ending, nor occupies a slot after its caller has gone."""

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self.waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self.idle = self.started = 0
        self.working: set[Future] = set()
        self.left: set[Future] = set()  # running, without a caller

    def run(self, work: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self.changed:
            self.waiting.append((future, work))
            self._staff()
        return future

    def leave(self, future: Future) -> None:
        """Called if the caller stopped waiting: if it is running, another thread may take its slot."""
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
                if left and self.started > self.most:  # another thread has taken its place
                    self.started -= 1
                    return
            del taken, future, work

    def _take(self) -> tuple[Future, Callable[[], Any]] | None:
        """The next work item; None after an idle time."""
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
    except asyncio.CancelledError as error:  # raised by the function; the episode was not cancelled
        future.set_exception(RuntimeError("it was cancelled from within").with_traceback(error.__traceback__))
    except BaseException as error:
        future.set_exception(harmless(error))


#: Steps are short, and hold the GIL while they compute: many at once would keep it from the event loop.
STEPS = Threads(64, "birl-env")
#: An agent keeps its thread for a whole episode, and mostly waits for the model.
AGENTS = Threads(1024, "birl-agent")
#: Closing must not wait for threads that hang.
CLOSING = Threads(32, "birl-close")


async def called(function: Callable[..., Any], *args: Any, threads: Threads = STEPS) -> Any:
    """Call a plain or async function and return its result. If cancelled, a running thread is abandoned."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        future = threads.run(lambda: function(*args))
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            threads.leave(future)
            raise
        except TimeoutError as error:  # a copy without the function's line
            raise future.exception() or error from None
        return await result if inspect.isawaitable(result) else result
    except ENDS as error:
        raise harmless(error) from error


def full_names(words: list[str], key: str, text: str) -> list[str]:
    """A command with absolute paths of its program and files. Raises `BirlError`, in which `key` is `text`."""
    # Links are not resolved, as a virtual environment's python is one.
    result = [os.path.abspath(w) if os.path.isfile(w) or ("/" in w and os.path.exists(w)) else w for w in words]
    if Path(result[0]).name.startswith("python") and (absent := missing(result[1:])):
        raise BirlError(f"{key}={text}: {no_file(absent)}")
    program = shutil.which(result[0], path=search_path())
    if program is None:
        raise BirlError(f"{key}={text}: there is no program {result[0]}.")
    return [program, *result[1:]]


def missing(arguments: list[str]) -> str:
    """The Python script if it does not exist, else empty; those that exist have absolute paths already."""
    script = next((word for word in arguments if not word.startswith("-")), "")
    module = any(word.startswith(("-m", "-c")) for word in arguments)
    return script if script.endswith(".py") and not module and not os.path.isabs(script) else ""


def search_path() -> str:
    """PATH in which `python` is the interpreter that runs birl."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
