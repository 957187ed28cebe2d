"""Interrupts user code that blocks the event loop: a coroutine that computes or sleeps without `await` would hold up
every episode, the engine and all deadlines.

    loop alive      resets a timer of the process, twice a second
    loop blocked    the timer's signal raises `Blocked` in the user's code, again each second until the loop continues

The signal needs no thread: it also reaches code that holds the GIL, such as a regular expression. C code that never
checks for signals is not reached: `GRACE` seconds later the process ends with the stacks of its threads.
"""

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import FrameType

BEAT = 1.0  # seconds between two interruptions; the timer is reset twice as often
GRACE = 60.0  # seconds that interrupted code may take to end
OWN = str(Path(__file__).parent) + os.sep
CALLING = os.path.join(OWN, "envs", "")  # calls code of the user
PYTHON = (os.path.dirname(os.__file__) + os.sep, "<frozen")
PACKAGES = ("site-packages", "dist-packages")


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
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=stderr)
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
