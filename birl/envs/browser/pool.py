"""A pool of k browser processes. Each has several episodes, each episode in a separate context.

    open(task, seed)     waits until a browser has a free slot, in the order of calls -> a Page
    page.step(action)    result of the action
    page.close()         frees the slot

A browser that crashed, hung or is worn out is replaced when the next episode needs it. Its episodes fail; none of them
gets a reward.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from birl.envs.browser.process import Lost, Worker
from birl.waits import waiting


class Browser:
    """Slot for one worker after another. `open`: its episodes; `opened`: number of episodes that the worker has had."""

    def __init__(self, python: str, settings: dict[str, Any]) -> None:
        self.python, self.settings = python, settings
        self.worker: Worker | None = None
        self.open: set[int] = set()
        self.opened = 0
        self.starting: asyncio.Task[Worker] | None = None

    async def ready(self, fresh: bool) -> Worker:
        """A running worker. Cancelling a caller does not cancel the start, which others wait for, too."""
        if self.starting is None and self.worker is not None and self.worker.alive and not fresh:
            return self.worker
        if self.starting is None:
            self.starting = asyncio.create_task(self._start())
            self.starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self.starting)

    async def _start(self) -> Worker:
        try:
            await self._end()
            self.worker, self.opened = await Worker.start(self.python, self.settings), 0
            return self.worker
        finally:
            self.starting = None

    async def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            await worker.quit()

    async def close(self) -> None:
        if self.starting is not None:
            self.starting.cancel()
            await asyncio.wait([self.starting])
        await self._end()


@dataclass(slots=True)
class Page:
    """One episode's page in a browser. `first`: its goal, and the first page; `pictures`: folder of its screenshots."""

    pool: "Pool"
    browser: Browser
    worker: Worker
    number: int
    first: dict[str, Any]
    pictures: str

    def saved(self) -> list[str]:
        """The pictures of this episode, in order."""
        return sorted(map(str, Path(self.pictures).glob("*.png"))) if self.pictures else []

    async def step(self, action: str) -> dict[str, Any]:
        return await self.worker.call("step", self.number, self.pool.timeout, action=action)

    async def close(self) -> None:
        try:
            with suppress(Lost):
                await self.worker.call("close", self.number, self.pool.timeout)
        finally:
            self.pool.leave(self.browser, self.number)


class Pool:
    """`contexts` episodes in each of `workers` browsers, which is replaced after `restart_every` episodes."""

    def __init__(
        self,
        python: str,
        settings: dict[str, Any],
        *,
        workers: int,
        contexts: int,
        restart_every: int,
        timeout: float,
        pictures: str = "",
    ) -> None:
        self.browsers = [Browser(python, settings) for _ in range(workers)]
        self.contexts, self.restart_every, self.timeout, self.pictures = contexts, restart_every, timeout, pictures
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.numbers = count(_next(self.pictures))
        self.hello: dict[str, Any] = {}
        self.closed = False

    async def start(self) -> "Pool":
        """Start the first browser as a check; the others start when they are needed."""
        self.hello = (await self.browsers[0].ready(fresh=False)).hello
        return self

    async def open(self, task: str, seed: int) -> Page:
        number = next(self.numbers)
        with waiting(f"episode on {task}", "room in a browser", "browsers"):
            browser = await self._room(number)
        worker = None
        try:
            fresh = self._worn(browser) and browser.open == {number}
            worker = await browser.ready(fresh)
            browser.opened += 1
            for _ in range(self.contexts if fresh else 0):
                self._wake()  # a new browser has several slots
            pictures = str(Path(self.pictures) / f"{number:06d}-{task}-{seed}") if self.pictures else ""
            more = {"pictures": pictures} if pictures else {}
            first = await worker.call("open", number, self.timeout, task=task, seed=seed, **more)
        except BaseException:
            if worker is not None:
                worker.forget(number)  # a cancelled call continues in the browser
            self.leave(browser, number)
            raise
        return Page(self, browser, worker, number, first, pictures)

    async def _room(self, number: int) -> Browser:
        while True:
            if self.closed:
                raise Lost("the browsers were closed")
            free = [b for b in self.browsers if len(b.open) < (1 if self._worn(b) else self.contexts)]
            if free:
                browser = min(free, key=lambda b: len(b.open))
                browser.open.add(number)
                return browser
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self.waiting:
                    self.waiting.remove(waiter)
                elif not waiter.cancelled():
                    self._wake()  # it was its turn: the next one's
                raise

    def _worn(self, browser: Browser) -> bool:
        return browser.opened >= self.restart_every

    def leave(self, browser: Browser, number: int) -> None:
        browser.open.discard(number)
        self._wake()

    def _wake(self) -> None:
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def close(self) -> None:
        self.closed = True
        while self.waiting:
            self._wake()
        await asyncio.gather(*(browser.close() for browser in self.browsers))


def _next(pictures: str) -> int:
    """Number of the next episode: a resumed run keeps its pictures."""
    if not pictures or not (folder := Path(pictures)).is_dir():
        return 0
    return max((int(n) + 1 for p in folder.iterdir() if (n := p.name.partition("-")[0]).isdigit()), default=0)
