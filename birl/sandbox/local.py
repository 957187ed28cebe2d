"""A sandbox on this machine, with several workers of one kind."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from birl.allocator import cores
from birl.sandbox.protocol import Ending, Limits, Result
from birl.sandbox.worker import Worker

_slots = itertools.count()  # of all sandboxes of this process: concurrent programs must not share a user id


class LocalSandbox:
    """Runs at most `workers` programs at once; others wait, and their time limit starts when they start.

    Example: async with LocalSandbox("zygote", python="/usr/bin/python3", workers=2) as sandbox:
                 result = await sandbox.run({"main.py": "print(7)"}, ["python", "main.py"], Limits())
    """

    def __init__(self, kind: str, *, python: str, workers: int = 0) -> None:
        self.kind = kind
        self.python = python
        self.workers = workers or cores()
        self._workers = [Worker(kind, python=python, slot=next(_slots)) for _ in range(self.workers)]
        self._free = list(self._workers)
        self._turn = asyncio.Semaphore(len(self._workers))
        self._closed = False

    async def run(
        self,
        files: Mapping[str, bytes | str],
        command: Sequence[str],
        limits: Limits,
        stdin: bytes | str = "",
        collect: Sequence[str] = (),
    ) -> Result:
        async with self._turn:
            if self._closed:
                return Result(ending=Ending.ERROR, kind=self.kind, detail="the sandbox was closed")
            worker = self._free.pop()
            try:
                return await worker.run(files, command, limits, stdin, collect)
            finally:
                self._free.append(worker)

    async def close(self) -> None:
        """End all workers and their programs."""
        self._closed = True
        for worker in self._workers:
            await worker.close()

    async def __aenter__(self) -> "LocalSandbox":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
