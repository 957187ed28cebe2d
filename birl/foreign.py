"""Runs user code in this process so that it neither ends the run, nor blocks it, nor changes sampling or training."""

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from birl.blocked import Blocked
from birl.errors import text_of

ENDS = (SystemExit, KeyboardInterrupt)  # a task that raises one ends its loop
GRACE = 5.0  # seconds that code may take to end after it is cancelled


@contextmanager
def undone() -> Iterator[None]:
    """Restore the current folder and PyTorch's default dtype afterwards, and add back removed environment variables and
    entries of `sys.path`. For code that runs alone, such as an import; elsewhere tensors name their dtypes and paths
    are absolute."""
    folder, variables, path = os.getcwd(), dict(os.environ), list(sys.path)
    try:
        yield
    finally:
        with suppress(OSError):  # it was deleted meanwhile
            os.chdir(folder)
        hook()
        os.environ |= variables | os.environ
        sys.path += [place for place in path if place not in sys.path]
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(torch.float32)


def hook() -> None:
    """Reset Python's hooks for exceptions if they were set to None: otherwise no thread would start."""
    sys.excepthook = sys.excepthook or sys.__excepthook__
    threading.excepthook = threading.excepthook or threading.__excepthook__


def harmless(error: BaseException) -> Exception:
    """The error as an `Exception` that neither ends the run (SystemExit) nor is lost in asyncio (StopIteration)."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, GeneratorExit, *ENDS)):
        return error
    return RuntimeError(f"{type(error).__name__}: {text_of(error)}").with_traceback(error.__traceback__)


class Late(Exception):
    """The timeout expired before the work was done; has a message if the work is to blame."""


async def within(seconds: float | None, work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` with a timeout. Raises `Late` after so many seconds, errors of `work` as an `Exception`, and
    `CancelledError` only if this task is cancelled. A coroutine that ignores its cancellation is abandoned."""
    hook()
    task = asyncio.create_task(work)
    task.add_done_callback(_seen)
    try:
        await asyncio.wait({task}, timeout=seconds)
        late = not task.done()
    finally:
        hook()
        await stop(task)
    if late:
        raise Late
    if task.cancelled():
        raise RuntimeError("it was cancelled from within")
    if (error := task.exception()) is not None:
        raise Late(str(error)) if isinstance(error, Blocked) else harmless(error)
    return task.result()


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks that are still running. After `GRACE` seconds their coroutines are closed; if one ignores that,
    too, the end of the loop does not wait for it."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=GRACE)
    for task in running:
        if not task.done():
            try:
                task.get_coro().close()  # pyright: ignore[reportOptionalMemberAccess]
            except BaseException:
                asyncio._unregister_task(task)  # pyright: ignore  in the docs under "Extending"
            task._log_destroy_pending = False  # pyright: ignore


def _seen(task: asyncio.Task[Any]) -> None:
    """Mark the task's error as retrieved, so that asyncio does not report it: its caller gets it."""
    if not task.cancelled():
        task.exception()


class Overdue(Exception):
    """The code took too long."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Overdue` in this thread after so many seconds, anywhere in its Python code, but not in a call into C."""
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    over = fired = False

    def fire() -> None:
        nonlocal fired
        with lock:
            if not over:
                fired = True
                raise_in(thread, ctypes.py_object(Overdue))

    hook()  # a concurrent agent may have removed it
    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            if fired:
                raise_in(thread, None)  # it may not have been raised yet
