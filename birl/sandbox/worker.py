"""A worker runs programs, one at a time: starts a guest, talks to it, and ends it with everything in it."""

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from birl.errors import BirlError
from birl.process import kill
from birl.sandbox import command as commands
from birl.sandbox import folder, seccomp
from birl.sandbox.cgroup import MemoryGroup
from birl.sandbox.confine import NAMESPACES, Request
from birl.sandbox.protocol import Ending, Limits, Result, as_bytes, inside

START_TIMEOUT = 20.0  # seconds until a guest must have started
GRACE = 5.0  # seconds after the time limit until a guest that has not ended the run is killed
KEPT = ("zygote", "landlock", "process")  # guests that serve many runs
SIGNALS_STAY_INSIDE = 6  # version of Landlock
NO_BOUNDARY = "sandbox.kind=process is no boundary: the program could do everything that you can do"
PRELOAD = (
    *("json", "math", "cmath", "re", "string", "random", "itertools", "functools", "collections", "heapq", "bisect"),
    *("typing", "dataclasses", "enum", "decimal", "fractions", "statistics", "datetime", "calendar", "copy"),
    *("operator", "io", "ast", "array", "traceback", "contextlib", "hashlib", "textwrap", "threading", "queue"),
    *("atexit", "types", "unittest", "tempfile", "shutil", "inspect", "numbers", "abc", "time", "timeit", "struct"),
    *("socket", "warnings", "birl.sandbox.checker"),
)


class GuestFailed(Exception):
    """The guest did not start, does not answer, or sends invalid messages."""


class GuestSilent(GuestFailed):
    """The guest did not answer within the program's time."""


class Worker:
    """Runs programs one after another. `zygote`, `landlock` and `process` keep their guest; `bubblewrap` starts a new
    one for every run.

    The kernel kills a guest in bubblewrap when the *thread* that started it ends: use a long-lived thread.

    Example: worker = Worker("bubblewrap", python="/usr/bin/python3", slot=0)
             result = await worker.run({"main.py": b"print(1)"}, ["python", "main.py"], Limits(), b"", ())
             await worker.close()
    """

    def __init__(self, kind: str, *, python: str, slot: int) -> None:
        self.kind = kind
        self.python = python
        foreign = kind != "process" and os.geteuid() == 0
        self.uid = commands.FIRST_UID + (os.getpid() * 16 + slot) % commands.UIDS if foreign else 0
        self.group = MemoryGroup.make(f"birl-sandbox-{os.getpid()}-{slot}-{os.urandom(3).hex()}")
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._scratch = ""
        self._program = 0  # process id of a started program, as seen by the guest

    async def run(
        self,
        files: Mapping[str, bytes | str],
        command: Sequence[str],
        limits: Limits,
        stdin: bytes | str,
        collect: Sequence[str],
    ) -> Result:
        """Run a program. Raises `BirlError` for an empty command or an invalid file name."""
        began, self._program = time.monotonic(), 0
        request = request_of(files, command, limits, stdin, collect, watch_memory=self.group is None)
        try:
            if self.group is not None:
                self.group.limit(limits.memory_mb + commands.GUEST_MB)
            reply = await self._ask(request, limits)
        except GuestFailed as error:
            ending = self._ending_of(error)
            await self._end()
            return result_of({"ending": ending, "detail": str(error)}, self.kind, time.monotonic() - began)
        except BaseException:
            self.kill()
            raise
        if self._out_of_memory() and reply["ending"] != "error":
            reply |= {"ending": "memory", "detail": f"all processes together needed more than {limits.memory_mb} MiB"}
        self._program = 0  # it has ended completely
        if self.kind not in KEPT:
            await self._end()
        return result_of(reply, self.kind, time.monotonic() - began)

    def kill(self) -> None:
        """Kill the guest and everything in it; returns when it has ended."""
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()  # a guest without namespaces then kills its run and exits
        if process is not None:
            if self.kind in NAMESPACES:
                process.kill()
            try:
                process.wait(timeout=GRACE + 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._kill_what_is_left()
        if self._scratch:
            folder.remove(self._scratch)
            self._scratch = ""

    def _kill_what_is_left(self) -> None:
        """Kill the rest of a run whose guest was killed. In namespaces all processes have ended with pid 1; elsewhere
        the filter keeps every process in the program's group."""
        program, self._program = self._program, 0
        if self.group is not None:
            self.group.kill()
        elif program and self.kind not in NAMESPACES:
            kill(program)

    async def close(self) -> None:
        await self._end()
        if self.group is not None:
            self.group.remove()

    async def _end(self) -> None:
        """Close the connection, so that the guest exits; kill it if it does not."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
        deadline = time.monotonic() + 1.0
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.0005)
        self.kill()

    def _ending_of(self, error: GuestFailed) -> Ending:
        """Ending of a run whose guest failed: after the program has started, this is attributed to the program."""
        if self._out_of_memory():
            return Ending.MEMORY
        if not self._program:
            return Ending.ERROR
        return Ending.TIMEOUT if isinstance(error, GuestSilent) else Ending.KILLED

    def _out_of_memory(self) -> bool:
        return self.group is not None and self.group.killed()

    async def _ask(self, request: Request, limits: Limits) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # it ended while idle: not caused by this program
        if self._control is None:
            await self._start(limits)
        assert self._control is not None
        try:
            async with asyncio.timeout(limits.seconds + GRACE):
                await _send(self._control, request)
                reply = await _receive(self._control, limits)
                if "began" in reply:
                    self._program = int(reply["began"])
                    reply = await _receive(self._control, limits)
                return reply
        except TimeoutError:
            raise GuestSilent("the process that watches the program does not answer") from None

    async def _start(self, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._control = ours
        with theirs, contextlib.ExitStack() as opened, tempfile.TemporaryFile() as errors:
            words, sources = self._words(theirs.fileno(), limits, opened)
            if self.group is not None:
                words = [*self.group.join, *words]
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={"PATH": commands.SYSTEM_PATH},  # otherwise visible inside in /proc/1/environ
                pass_fds=(theirs.fileno(), *sources),
                cwd="/",
                start_new_session=self.kind not in NAMESPACES,  # it cleans up after a launcher whose group is killed
            )
            theirs.close()
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    hello = await _receive(ours, limits)
                    if self.kind in NAMESPACES and hello.get("pid") != 1:
                        raise GuestFailed("it has no namespace of processes")
                    await _send(ours, self._settings(int(hello.get("landlock", 0))))
            except (TimeoutError, GuestFailed) as error:
                self.kill()
                errors.seek(0)
                why = errors.read(2000).decode(errors="replace").strip() or str(error) or "it does not answer"
                raise GuestFailed(f"{self.kind} cannot be started: {why}") from None

    def _words(self, control: int, limits: Limits, opened: contextlib.ExitStack) -> tuple[list[str], list[int]]:
        if self.kind not in NAMESPACES:
            self._scratch = tempfile.mkdtemp(prefix="birl-sandbox-")
            os.chmod(self._scratch, 0o711)
            return commands.plain(self.python, control), []
        sources = commands.sources(opened)
        keep = self.kind == "zygote"
        words = commands.bubblewrap(self.python, control, sources, limits, self.uid, keep=keep)
        return words, [fd for fd, _ in sources]

    def _settings(self, landlock: int) -> dict[str, Any]:
        namespaces = self.kind in NAMESPACES
        alone = namespaces or bool(self.uid)
        program = seccomp.assemble(
            namespaces=namespaces,
            ipc=self.kind == "bubblewrap",
            signals=alone or landlock >= SIGNALS_STAY_INSIDE,
            own_user=alone,
            counted=self.group is not None,
        )
        return {
            "kind": self.kind,
            "python": self.python,
            "readable": commands.readable(self.python),
            "uid": 0 if namespaces else self.uid,
            "scratch": self._scratch,
            "filter": "" if self.kind == "process" else _text(program),
            "preload": PRELOAD,
        }


def request_of(
    files: Mapping[str, bytes | str],
    command: Sequence[str],
    limits: Limits,
    stdin: bytes | str,
    collect: Sequence[str],
    *,
    watch_memory: bool,
) -> Request:
    """The request to a guest. Raises `BirlError`."""
    if not command:
        raise BirlError("command is empty: name a program, as in ['python', 'main.py'].")
    return {
        "files": {inside(name): _text(as_bytes(content)) for name, content in files.items()},
        "command": list(command),
        "limits": {name: getattr(limits, name) for name in limits.__slots__},
        "stdin": _text(as_bytes(stdin)),
        "collect": [inside(name) for name in collect],
        "watch_memory": watch_memory,
    }


def result_of(reply: dict[str, Any], kind: str, seconds: float) -> Result:
    """Parse a guest's reply. It is untrusted, as hostile programs run there."""
    try:
        return Result(
            ending=Ending(reply["ending"]),
            kind=kind,
            stdout=base64.b64decode(reply.get("stdout", "")),
            stderr=base64.b64decode(reply.get("stderr", "")),
            exit_code=None if reply.get("exit_code") is None else int(reply["exit_code"]),
            signal=int(reply.get("signal", 0)),
            seconds=float(reply.get("seconds", seconds)),
            truncated=bool(reply.get("truncated", False)),
            files={str(name): base64.b64decode(content) for name, content in reply.get("files", {}).items()},
            detail=str(reply.get("detail", "")),
            warning=NO_BOUNDARY if kind == "process" else "",
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Result(ending=Ending.ERROR, kind=kind, detail=f"the guest talks nonsense: {error}")


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def _send(control: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    try:
        await asyncio.get_running_loop().sock_sendall(control, struct.pack(">I", len(body)) + body)
    except OSError as error:
        raise GuestFailed(f"the sandbox has ended: {error}") from error


async def _receive(control: socket.socket, limits: Limits) -> dict[str, Any]:
    """Receive one message. It is untrusted: its size is bounded, and it must be a JSON object."""
    most = 2 * limits.output_bytes * 4 // 3 + (limits.file_mb << 20) * 4 // 3 + (1 << 16)
    (size,) = struct.unpack(">I", await _exactly(control, 4))
    if size > most:
        raise GuestFailed(f"a message of {size} bytes")
    try:
        message = json.loads(await _exactly(control, size))
    except (ValueError, RecursionError) as error:
        raise GuestFailed("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise GuestFailed("a message that is no object")
    return message


async def _exactly(control: socket.socket, count: int) -> bytes:
    result = bytearray()
    loop = asyncio.get_running_loop()
    while len(result) < count:
        try:
            part = await loop.sock_recv(control, min(count - len(result), 1 << 18))
        except OSError as error:
            raise GuestFailed(f"the sandbox has ended: {error}") from error
        if not part:
            raise GuestFailed("the sandbox has ended")
        result += part
    return bytes(result)
