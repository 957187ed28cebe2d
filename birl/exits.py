"""How a command ends: its exit codes, and SIGTERM as an exception."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

MISTAKE = 2  # in the input, or a run that had to stop
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
STOPPED = (INTERRUPTED, TERMINATED)  # training has saved before


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whatever cleans up after Ctrl-C cleans up after it."""


def terminate(number: int, frame: FrameType | None) -> None:
    """The second one ends the process by itself, whatever has taken the first for an error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def code_of(interrupt: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, unless it is handled or ignored already. Only the main thread hears signals."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
