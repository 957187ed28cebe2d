"""Exit codes of commands, and SIGTERM as an exception."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

MISTAKE = 2  # wrong input, or a run that had to stop
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
STOPPED = (INTERRUPTED, TERMINATED)  # training has saved a checkpoint


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception; code that cleans up after Ctrl-C also cleans up after it."""


def terminate(number: int, frame: FrameType | None) -> None:
    """Handler of SIGTERM. A second signal ends the process, even if the first was caught as an error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def code_of(interrupt: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """In this context SIGTERM raises `Terminated`, unless it is handled or ignored already. Main thread only."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
