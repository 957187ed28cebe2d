"""Runs reward functions in worker processes or in this process, always with a deadline."""

import asyncio
import contextlib
import inspect
import json
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from birl.envs.calls import Threads, called
from birl.errors import BirlError
from birl.foreign import Late, within
from birl.process import kill
from birl.rewards.functions import Answers, CallFailed, Invocation, failed
from birl.types import Outcome

LINE = 1 << 16  # longest piece of a printed line that is passed on at once [characters]
MOST = 1 << 28  # bytes of one reply
START_TIMEOUT = 120.0  # seconds a worker may take to import the functions
CLOSED = "the rewards were closed"
CALLS = Threads(64, "birl-reward")  # for functions of this process
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)


@dataclass(slots=True)
class Job:
    function: int
    arguments: Mapping[str, Any]
    n: int
    timeout: float
    future: "Future[tuple[Answers, float]]" = field(default_factory=Future)


class Pool:
    """Daemon threads that take jobs from one queue, each with its own worker. They belong to no event loop, and one
    that hangs does not delay the end of the program."""

    def __init__(self, workers: "Sequence[Worker]") -> None:
        self.workers = workers
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.closed = False
        self.started: list[Future[Any]] = [Future() for _ in workers]
        self.threads = [
            threading.Thread(target=self._keep, args=pair, daemon=True)
            for pair in zip(workers, self.started, strict=True)
        ]
        for future, thread in zip(self.started, self.threads, strict=True):
            future.set_running_or_notify_cancel()  # from here no caller can cancel it
            thread.start()

    async def start(self) -> list[Any]:
        return [await asyncio.wrap_future(future) for future in self.started]

    async def run(self, function: int, arguments: Mapping[str, Any], n: int, timeout: float) -> tuple[Answers, float]:
        """Run a call. Returns the answers, and the seconds that the call itself took."""
        if self.closed:
            raise CallFailed(Outcome.ABORTED, CLOSED, isolate=False)
        job = Job(function, arguments, n, timeout)
        self.jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.kill()
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join(timeout=10.0)

    def _keep(self, worker: "Worker", started: "Future[Any]") -> None:
        try:
            started.set_result(worker.start())
        except BaseException as error:
            started.set_exception(error)
        while (job := self.jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                self._do(job, worker)
        worker.end()

    def _do(self, job: Job, worker: "Worker") -> None:
        began = time.monotonic()
        try:
            if self.closed:
                raise CallFailed(Outcome.ABORTED, CLOSED, isolate=False)
            ready(worker)
            began = time.monotonic()  # a restart of the worker does not count
            answers = worker.call(job.function, job.arguments, job.n, job.timeout)
            job.future.set_result((answers, time.monotonic() - began))
        except BaseException as error:
            if isinstance(error, CallFailed):
                error.seconds = min(time.monotonic() - began, job.timeout)
            job.future.set_exception(error)


def ready(worker: "Worker") -> None:
    try:
        worker.start()
    except BirlError as error:
        raise CallFailed(Outcome.ENV_ERROR, f"the worker could not be restarted: {error}", isolate=False) from error


class Worker:
    """A worker process. If a call is late it is killed with all its children, and started again before the next call.

    Example: worker = Worker(["math"], options={}, folder=Path.cwd())
             worker.start()
             worker.call(0, {"completions": ["7"], "gold": ["7"]}, n=1, timeout=10).values == [1.0]
    """

    def __init__(self, specs: list[str], *, options: Mapping[str, Any], folder: Path) -> None:
        self.specs = specs
        self.options = dict(options)
        self.folder = folder
        self.hello: dict[str, Any] | None = None  # first message of the first start: later ones must equal it
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._stderr: deque[str] = deque(maxlen=5)
        self._lock = threading.Lock()
        self._closed = False

    def call(self, function: int, arguments: Mapping[str, Any], n: int, timeout: float) -> Answers:
        request = {"function": function, "arguments": arguments, "n": n, "timeout": timeout}
        reply = self._exchange(request, timeout)
        if reply is None:
            raise CallFailed(Outcome.TIMEOUT, f"took longer than {round(timeout, 1):g} s")
        if isinstance(reply, dict) and "error" in reply:
            raise CallFailed(Outcome.ENV_ERROR, str(reply["error"]), isolate=reply.get("isolate") is True)
        return Answers.received(reply, n)

    def start(self) -> dict[str, Any]:
        """Ensure that the process runs and has imported its functions. Raises `BirlError` if it cannot."""
        if self._process is not None and self._process.poll() is None and self.hello is not None:
            return self.hello
        self.end()
        self._spawn()
        try:
            hello = self._exchange({"options": self.options}, START_TIMEOUT)
        except CallFailed as failure:
            raise BirlError(f"reward {', '.join(self.specs)}: {failure.detail}") from failure
        if hello is None:
            raise BirlError(f"reward {', '.join(self.specs)} took longer than {START_TIMEOUT:.0f} s to import")
        if "problem" in hello:
            self.end()
            raise BirlError(hello["problem"])
        if self.hello is not None and hello != self.hello:
            self.end()
            raise BirlError("the file with the reward function was changed during the run; restart to use the new one")
        self.hello = hello
        return hello

    def kill(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                kill(self._process.pid)

    def end(self) -> None:
        """End the process; leaves no zombie or open pipe. Like `call`, only for the thread that owns this worker."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        kill(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _spawn(self) -> None:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _checkout())))
        with self._lock:
            if self._closed:
                raise BirlError(CLOSED)
            self._buffer = b""
            self._stderr.clear()
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "birl.rewards.worker", *self.specs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=self.folder,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                start_new_session=True,  # its own group: Ctrl-C does not reach it, killpg also kills its children
            )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        threading.Thread(target=self._relay, args=(process,), daemon=True).start()

    def _relay(self, process: "subprocess.Popen[bytes]") -> None:
        """Forward the functions' output to this process's sys.stderr, which a live terminal view can share."""
        assert process.stderr is not None
        # process.stderr is unbuffered: it would be read byte by byte
        lines = partial(open, encoding="utf-8", errors="replace", newline="\n", closefd=False)
        with contextlib.suppress(ValueError, OSError), lines(process.stderr.fileno()) as pipe:  # closed while reading
            while line := pipe.readline(LINE):
                self._stderr.append(line.strip())
                print(line, end="", file=sys.stderr)

    def _exchange(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """Send one line with a new key, and receive the line that begins with it. None after the deadline. A worker
        that failed to reply is ended."""
        process = self._process
        if process is None:
            raise CallFailed(Outcome.ABORTED, CLOSED, isolate=False)
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + timeout
        key = secrets.token_hex(16)
        data = memoryview(json.dumps({**request, "key": key}).encode() + b"\n")
        key = key.encode()
        try:
            while data:
                if not _wait(process, process.stdin.fileno(), select.POLLOUT, deadline):
                    self.end()
                    return None
                data = data[os.write(process.stdin.fileno(), data) :]
            while (line := self._reply(key)) is None:
                if not _wait(process, process.stdout.fileno(), select.POLLIN, deadline):
                    self.end()
                    return None
                got = os.read(process.stdout.fileno(), 1 << 16)
                if not got:
                    raise BrokenPipeError
                self._buffer += got
                if len(self._buffer) > MOST:
                    self.end()
                    raise CallFailed(Outcome.ENV_ERROR, f"the worker replied with over {MOST >> 20} MiB")
        except OSError as error:
            if self._closed:
                raise CallFailed(Outcome.ABORTED, CLOSED, isolate=False) from error
            raise CallFailed(Outcome.ENV_ERROR, self._obituary()) from error
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:  # something else was written in between
            self.end()
            raise CallFailed(Outcome.ENV_ERROR, "the worker's reply was damaged on its way") from error

    def _reply(self, key: bytes) -> bytes | None:
        """The line with this key, if received. Others are discarded: a reward function may write anywhere."""
        if b"\n" not in self._buffer:
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        return next((line.removeprefix(key) for line in lines if line.startswith(key)), None)

    def _obituary(self) -> str:
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        self.end()
        code = process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        last = self._stderr[-1][:400] if self._stderr and (code or 0) >= 0 else ""
        return f"the worker process died ({how}){': ' if last else ''}{last}"


def _checkout() -> str:
    """Folder that birl is imported from if it is not installed: the worker must find it from any folder."""
    folder = str(Path(__file__).parents[2])
    return "" if folder.endswith("-packages") else folder


def _wait(process: "subprocess.Popen[bytes]", descriptor: int, event: int, deadline: float) -> bool:
    """Wait until the pipe is ready. False after the deadline; raises if the process has died without closing the pipe
    (a forked child may still hold it)."""
    poll = select.poll()
    poll.register(descriptor, event)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(min(left, 0.5) * 1000):
            return True
        if process.poll() is not None and not poll.poll(0):
            raise BrokenPipeError
    return False


async def local(
    function: Callable[..., Any],
    turn: AbstractAsyncContextManager[Any],
    arguments: Mapping[str, Any],
    n: int,
    timeout: float,
) -> tuple[Answers, float]:
    """Call a function of this process: a plain one in a thread, its `turn` after that of other calls; a coroutine in
    the event loop, which it must not block. Returns the answers, and the seconds that the call took. Raises
    `CallFailed`.

    A thread that hangs cannot be killed: it is abandoned, and completions are not retried one by one, which would
    abandon more threads."""
    async with turn:
        began, call, hangs = time.monotonic(), Invocation(arguments, n), True

        def work() -> Any:
            nonlocal hangs
            try:
                result = function(**call.arguments)
                hangs = not inspect.isawaitable(result)
                return call.answers(result) if hangs else result
            except CallFailed:
                raise
            except BaseException as error:
                raise failed(error, function) from error

        try:
            result = await within(timeout, called(work, threads=CALLS))
            answers = result if isinstance(result, Answers) else call.answers(result)
            return answers, time.monotonic() - began
        except Late as late:
            detail = f"took longer than {round(timeout, 1):g} s{', and its thread cannot be stopped' if hangs else ''}"
            failure = CallFailed(Outcome.TIMEOUT, str(late) or detail, isolate=not hangs)
        except CallFailed as error:
            failure = error
        except Exception as error:
            failure = failed(error, function)
        failure.seconds = time.monotonic() - began
        raise failure
