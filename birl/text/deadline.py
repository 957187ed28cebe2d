"""A bound on the time of Python code that others wrote and that cannot be asked to stop, such as a chat template."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from birl.foreign import hook


class Overdue(Exception):
    """The code took too long."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `Overdue` in this thread, wherever its Python code is then. A single call into C is not interrupted."""
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    over = fired = False

    def fire() -> None:
        nonlocal fired
        with lock:
            if not over:
                fired = True
                raise_in(thread, ctypes.py_object(Overdue))

    hook()  # an agent at work beside this may have taken it away
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
