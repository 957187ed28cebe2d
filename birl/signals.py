"""Handling of Ctrl-C and SIGTERM."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from birl.errors import Terminated

T = TypeVar("T")

IN_THREADS: list[Callable[[], object]] = []  # stops runs outside of the main thread, which receive no signals


def interrupt() -> None:
    """Stop the runs in other threads (those of notebooks), as the first Ctrl-C does."""
    for stop in tuple(IN_THREADS):
        stop()


class Stop(asyncio.Event):
    """Set when a run has to save and end. `number`: the signal that requested it, SIGINT if there was none."""

    number: int = signal.SIGINT

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, while there is nothing to save: a signal cancels it, waits for its cleanup, and raises
        `KeyboardInterrupt` or `Terminated`."""
        task, stopped = asyncio.create_task(work), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also if something else ends the run
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise Terminated if self.number == signal.SIGTERM else KeyboardInterrupt
        return task.result()


@contextmanager
def saving_signals(stop: Stop) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM sets `stop`, so that the run saves and ends; the second ends the process at once.

    Does not use `loop.add_signal_handler`, which would wait for the loop, and the loop is busy while models load.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            sys.stderr.write("\nStopped at once; checkpoints that were complete stay so.\n")
            os._exit(128 + number)
        sys.stderr.write("\nSaving, then stopping. Once more to stop at once.\n")
        stop.number = number
        stop.set()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop, which may be waiting for the compute thread

    if threading.current_thread() is not threading.main_thread():
        wake = partial(loop.call_soon_threadsafe, stop.set)
        IN_THREADS.append(wake)
        try:
            yield
        finally:
            IN_THREADS.remove(wake)
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
