"""The worker process, which computes rewards and may be killed at any time: `python -m birl.rewards.worker SPEC...`.

One JSON object per line. First in: {"options": {...}}; first out: {"functions": [...], "digests": [...]} or {"problem":
...}. Then, for each {"function": index, "arguments": {...}, "n": completions, "timeout": seconds}, one {"values":
[...], "extra": {...}, "logged": {...}} or {"error": ..., "isolate": ...}.

Every request has a new "key", and its reply is a line that begins with it: anything that a reward function, or a
library that it calls, writes to the descriptors is not taken for a reply.
"""

import contextlib
import faulthandler
import inspect
import json
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from birl.errors import BirlError
from birl.named import make_importable
from birl.rewards.functions import CallFailed, Invocation, Parameters, digest, failed, load

GRACE = 5.0  # seconds after a call's deadline until a worker that was not killed ends itself


def claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes of the protocol, inaccessible to reward functions: their output goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def behave() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    with contextlib.suppress(OSError):  # if memory runs out, the kernel kills this process and not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")


def read_requests(pipe: BinaryIO, requests: "queue.SimpleQueue[bytes]") -> None:
    """Read requests in a thread, so that the parent's end is noticed while a reward function runs."""
    for line in pipe:
        requests.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with all processes started by the functions
    os._exit(0)


def respond(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    # A C call that holds the GIL (9**9**9) also blocks the thread that would notice the parent's end; this timer is a C
    # thread and needs no GIL. Writes to descriptor 2: a function may have closed sys.stderr.
    faulthandler.dump_traceback_later(request["timeout"] + GRACE, exit=True, file=2)
    try:
        call = Invocation(request["arguments"], request["n"])
        result = function(**call.arguments)
        if inspect.isawaitable(result):
            result = _run(result)
        return asdict(call.answers(result))
    except CallFailed as failure:
        return {"error": failure.detail, "isolate": failure.isolate}
    except BaseException as error:
        return {"error": failed(error, function).detail, "isolate": True}
    finally:
        faulthandler.cancel_dump_traceback_later()


_loop: Any = None


def _run(awaitable: Any) -> Any:
    global _loop
    if _loop is None:  # one loop for all calls: HTTP clients and locks of a function belong to it
        import asyncio

        _loop = asyncio.new_event_loop()
        asyncio.set_event_loop(_loop)

    async def wait() -> Any:
        return await awaitable

    return _loop.run_until_complete(wait())


def main(specs: list[str]) -> None:
    pipe, replies = claim_pipes()
    behave()
    make_importable(Path.cwd())
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(pipe, requests), daemon=True).start()

    def send(key: str, reply: dict[str, Any]) -> None:
        data = f"\n{key}{json.dumps(reply)}\n".encode()
        while data:
            data = data[replies.write(data) :]

    first = json.loads(requests.get())
    key, options = first["key"], first["options"]
    try:
        functions = [load(spec, options) for spec in specs]
        digests = [digest(spec) for spec in specs]
    except (BirlError, OSError) as error:
        return send(key, {"problem": str(error)})
    send(key, {"functions": [asdict(Parameters.of(function)) for function in functions], "digests": digests})
    while True:
        request = json.loads(requests.get())
        send(request.pop("key"), respond(functions[request["function"]], request))


if __name__ == "__main__":
    main(sys.argv[1:])
