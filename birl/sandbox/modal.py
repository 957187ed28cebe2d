"""Runs programs in Modal's cloud with the interface of `Sandbox`: each in a new container without a network.

Tested with a stand-in that has the signatures of Modal's client 1.6, never in the cloud itself.
"""

import asyncio
import contextlib
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from birl.errors import BirlError
from birl.sandbox.command import NOBODY, SOURCES
from birl.sandbox.protocol import Ending, Limits, Result
from birl.sandbox.worker import request_of, result_of

APP = "birl-sandbox"
PYTHON = "3.11"
ROOM = 60  # seconds that a container may live beyond its run
WORKERS = 8

# Puts the guest into the container and runs the program, as another user.
START = """
import json, os, sys, tempfile
job = json.load(sys.stdin)
place = tempfile.mkdtemp()
for name, text in job["sources"].items():
    os.makedirs(os.path.dirname(f"{place}/{name}"), exist_ok=True)
    with open(f"{place}/{name}", "w") as file:
        file.write(text)
sys.path.insert(0, place)
from birl.sandbox import confine, guest
confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
folder = tempfile.mkdtemp()
os.chdir(folder)
reply = guest.run(guest.Prepared(job["settings"]), job["request"], os.pipe()[0], lambda pid: None)
sys.stdout.write(json.dumps(reply))
"""


class ModalSandbox:
    """A container for every run. `workers`: concurrent containers.

    Example: sandbox = await ModalSandbox.open(workers=8)
             result = await sandbox.run({"main.py": "print(7)"}, ["python", "main.py"], Limits())
    """

    kind = "modal"

    def __init__(self, client: Any, app: Any, *, workers: int) -> None:
        self.client = client
        self.app = app
        self.workers = workers or WORKERS
        self.image = client.Image.debian_slim(python_version=PYTHON)
        self._turn = asyncio.Semaphore(self.workers)

    @classmethod
    async def open(cls, *, workers: int = 0) -> "ModalSandbox":
        """Connect to Modal. Raises `BirlError` if the client is not installed, or has no valid token."""
        try:
            client = importlib.import_module("modal")
        except ImportError as error:
            raise BirlError("sandbox.kind=modal: modal is not installed; pip install 'birl[modal]'.") from error
        try:
            app = await client.App.lookup.aio(APP, create_if_missing=True)
        except client.exception.Error as error:
            raise BirlError(f"sandbox.kind=modal: {error}; `modal setup` makes a token.") from error
        return cls(client, app, workers=workers)

    async def run(
        self,
        files: Mapping[str, bytes | str],
        command: Sequence[str],
        limits: Limits,
        stdin: bytes | str = "",
        collect: Sequence[str] = (),
    ) -> Result:
        request = request_of(files, command, limits, stdin, collect, watch_memory=True)
        settings = {"kind": self.kind, "python": "python3", "uid": int(NOBODY), "readable": [], "filter": ""}
        sources = {name: path.read_text() if path else "" for name, path in SOURCES.items()}
        job = json.dumps({"sources": sources, "request": request, "settings": settings})
        async with self._turn:
            try:
                async with asyncio.timeout(limits.seconds + ROOM):
                    return await self._run(job, limits)
            except (TimeoutError, self.client.exception.Error) as error:
                detail = f"Modal: {type(error).__name__}: {error}"
                return Result(ending=Ending.ERROR, kind=self.kind, detail=detail)

    async def _run(self, job: str, limits: Limits) -> Result:
        box = await self.client.Sandbox.create.aio(
            app=self.app,
            image=self.image,
            timeout=math.ceil(limits.seconds) + ROOM,
            memory=(limits.memory_mb, limits.memory_mb + 256),
            block_network=True,
        )
        try:
            process = await box.exec.aio("python", "-c", START)
            process.stdin.write(job)
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            output = await process.stdout.read.aio()
            code = await process.wait.aio()
        finally:
            with contextlib.suppress(self.client.exception.Error):
                await box.terminate.aio()
        try:
            reply = json.loads(output)
        except (ValueError, RecursionError):
            # ended by a signal, e.g. if the container is out of memory; with another exit code the sandbox has failed
            ending = Ending.KILLED if code < 0 or code > 128 else Ending.ERROR
            reply = {"ending": ending, "detail": f"the process that watches it ended with exit code {code}"}
        return result_of(reply, self.kind, limits.seconds)

    async def close(self) -> None:
        """Nothing to do: every run ends its own container."""
