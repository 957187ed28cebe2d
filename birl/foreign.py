"""Runs user code in this process so that it neither ends the run, nor blocks it, nor changes sampling or training.

`interrupting` interrupts code that blocks the event loop: a coroutine that computes or sleeps without `await` would
hold up every episode, the engine and all deadlines.

    loop alive      resets a timer of the process, twice a second
    loop blocked    the timer's signal raises `Blocked` in the user's code, again each second until the loop continues

The signal needs no thread: it also reaches code that holds the GIL, such as a regular expression. C code that never
checks for signals is not reached: `STUCK` seconds later the process ends with the stacks of its threads.
"""

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from birl.errors import BirlError, TooLong, current_folder, text_of

ENDS = (SystemExit, KeyboardInterrupt)  # a task that raises one ends its loop
GRACE = 5.0  # seconds that code may take to end after it is cancelled
LONGEST = 400  # characters of a described error
OWN = str(Path(__file__).parent) + os.sep
PYTHON = (os.path.dirname(os.__file__) + os.sep, "<frozen")
PACKAGES = ("site-packages", "dist-packages")


@contextmanager
def undone() -> Iterator[None]:
    """Restore the current folder and PyTorch's default dtype and precision afterwards, and add back removed environment
    variables and entries of `sys.path`. For code that runs alone, such as an import; elsewhere tensors name their
    dtypes and paths are absolute."""
    folder, variables, path = current_folder(), dict(os.environ), list(sys.path)
    try:
        yield
    finally:
        with suppress(OSError):  # it was deleted meanwhile
            os.chdir(folder)
        hook()
        os.environ |= variables | os.environ
        sys.path += [place for place in path if place not in sys.path]
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision("highest")


def hook() -> None:
    """Reset Python's hooks for exceptions if they were set to None: otherwise no thread would start."""
    sys.excepthook = sys.excepthook or sys.__excepthook__
    threading.excepthook = threading.excepthook or threading.__excepthook__


def harmless(error: BaseException) -> Exception:
    """The error as an `Exception` that neither ends the run (SystemExit) nor is lost in asyncio (StopIteration)."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, GeneratorExit, *ENDS)):
        return error
    return RuntimeError(f"{type(error).__name__}: {text_of(error)}").with_traceback(error.__traceback__)


def described(error: BaseException, file: str = "") -> str:
    """`file.py:12: ValueError: message` in one line, with the innermost line in `file`, else in the user's code, if
    there is one. birl's own errors have no line."""
    message = next(iter(text_of(error).splitlines()), "")
    if isinstance(error, BirlError | TooLong):
        return message[:LONGEST]
    causes = (one for one in (error.__cause__, error) if one is not None)  # Python wraps a coroutine's StopIteration
    frames = [(f.filename, f.lineno) for one in causes for f in traceback.extract_tb(one.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    try:
        here, real = os.getcwd() + os.sep, os.path.realpath
    except FileNotFoundError:  # the current folder was deleted
        here, real = "", os.path.normpath
    inside = [frame for frame in frames if file and real(frame[0]) == real(file)]
    own = [f for f in frames if not f[0].startswith((OWN, *PYTHON)) and not any(p in f[0] for p in PACKAGES)]
    place = (inside or own or frames)[-1:]
    names = [(os.path.relpath(n) if here and real(n).startswith(here) else n, line) for n, line in place]
    where = "".join(f"{name}:{line}: " for name, line in names)
    return f"{where}{type(error).__name__}{': ' if message else ''}{message}"[:LONGEST]


def attribute(owner: Any, name: str, default: Any = None) -> Any:
    """`getattr` of a user's object; what a property raises is `harmless`."""
    try:
        return getattr(owner, name, default)
    except BaseException as error:
        raise harmless(error) from None


class Late(Exception):
    """The timeout expired before the work was done; has a message if the work is to blame."""


async def within(seconds: float | None, work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` with a timeout. Raises `Late` after so many seconds, errors of `work` as an `Exception`, and
    `CancelledError` only if this task is cancelled. A coroutine that ignores its cancellation is abandoned."""
    hook()
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, so asyncio does not report it
    try:
        await asyncio.wait({task}, timeout=seconds)
        late = not task.done()
    finally:
        hook()
        await stop(task)
    if late:
        raise Late
    if task.cancelled():
        try:
            task.result()
        except asyncio.CancelledError as error:
            raise RuntimeError("it was cancelled from within").with_traceback(error.__traceback__) from None
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


BEAT = 1.0  # seconds between two interruptions; the timer is reset twice as often
STUCK = 60.0  # seconds that interrupted code may take to end
CALLING = os.path.join(OWN, "envs", "")  # calls code of the user


class Blocked(BaseException):
    """Raised in code that blocks the event loop. No subclass of `Exception`: code that retries would swallow it."""


@contextmanager
def interrupting(seconds: float) -> Iterator[None]:
    """(in an event loop) In this context, interrupt user code that blocks the loop for longer than `seconds`. Only in
    the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread() or not 0 < seconds < inf:
        yield
        return
    loop, seconds = asyncio.get_running_loop(), max(seconds, BEAT)
    next_beat: list[asyncio.TimerHandle] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if place := foreign_place(frame):
            raise Blocked(f"{place} held up the event loop for {seconds:g} s: await, or use a plain function")

    def beat() -> None:
        signal.signal(signal.SIGALRM, interrupt)  # the user's code may have set another handler
        signal.setitimer(signal.ITIMER_REAL, seconds, BEAT)
        faulthandler.dump_traceback_later(seconds + STUCK, exit=True, file=stderr)
        next_beat[:] = [loop.call_later(BEAT / 2, beat)]

    stderr = 2  # of the process: `sys.stderr` may be replaced, as in a notebook
    before = signal.getsignal(signal.SIGALRM)
    beat()
    try:
        yield
    finally:
        next_beat[0].cancel()
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def foreign_place(frame: FrameType | None) -> str:
    """`file.py:12 in step` if the innermost code outside of birl is the user's, or was called for it; else empty."""
    result: list[FrameType] = []
    while frame is not None and not frame.f_code.co_filename.startswith(OWN):
        if not frame.f_code.co_filename.startswith(PYTHON) or any(p in frame.f_code.co_filename for p in PACKAGES):
            result.append(frame)
        frame = frame.f_back
    own = [f for f in result if not any(p in f.f_code.co_filename for p in PACKAGES)]
    called = frame is not None and frame.f_code.co_filename.startswith(CALLING)
    return _place((own or result)[0]) if own or (result and called) else ""


def standing() -> str:
    """Current line of the main thread, in the user's code if it is there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return foreign_place(frame) or (_place(frame) if frame else "")


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
