"""Functions of users, called so that one does not hold up the others: coroutines as they are, plain functions in a
thread."""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

THREADS = 64  # plain functions of environments that run at once


class Threads:
    """At most `most` daemon threads, started as they are needed. Unlike `ThreadPoolExecutor`'s, one that hangs does not
    keep the program from ending."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self.idle = self.started = 0

    def run(self, work: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self.changed:
            self.waiting.append((future, work))
            if self.idle >= len(self.waiting) or self.started == self.most:
                self.changed.notify()
            else:
                self.started += 1
                threading.Thread(target=self._serve, daemon=True, name=f"birl-env-{self.started}").start()
        return future

    def _serve(self) -> None:
        while True:
            with self.changed:
                self.idle += 1
                while not self.waiting:
                    self.changed.wait()
                self.idle -= 1
                future, work = self.waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del future, work


_threads = Threads(THREADS)


async def called(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a plain or an async function. Cancelling leaves a thread that runs already to itself."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    found = await asyncio.wrap_future(_threads.run(lambda: function(*args)))
    return await found if inspect.isawaitable(found) else found
