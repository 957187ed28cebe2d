"""The guest: receives runs over a socket, starts each program confined, and reports how it ended.

A request contains hidden tests. The process that becomes the program is forked before the request is read (`Prepared`),
and gets only its order: command, limits and folder. A zygote never reads a request, so that its forks contain nothing
of earlier ones.

It is pid 1 of the sandbox (bubblewrap, zygote) or the parent of the program (landlock, process), started by
`birl/sandbox/worker.py`. Standard library only. A message is four bytes of length and JSON; bytes are base64.
"""

import base64
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

from birl.sandbox import confine, folder
from birl.sandbox.confine import Request, Settings
from birl.sandbox.watch import Watch


def receive(control: int) -> Any:
    """Receive a message; None if the other side has closed."""
    head = _exactly(control, 4)
    body = _exactly(control, struct.unpack(">I", head)[0]) if head else b""
    return json.loads(body) if body else None


def _exactly(control: int, count: int) -> bytes:
    result = bytearray()
    while len(result) < count:
        part = os.read(control, min(count - len(result), 1 << 20))
        if not part:
            return b""
        result += part
    return bytes(result)


def send(control: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(control, data) :]


class Prepared:
    """A forked process that waits for its order to become the program, and the pipes to it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stdin = os.memfd_create("stdin")
        (self.out, out), (self.err, err), (self.status, status) = os.pipe(), os.pipe(), os.pipe()
        order, self.order = os.pipe()
        confine.prctl(confine.PR_SET_DUMPABLE, 0)  # otherwise the program could read this process's memory
        self.pid = os.fork()
        if self.pid == 0:
            confine.become(settings, (self.stdin, out, err), status, order)
        for fd in (out, err, status, order):
            os.close(fd)

    def begin(self, request: Request) -> None:
        """Send it its input and order."""
        content = memoryview(base64.b64decode(request["stdin"]))
        place = 0
        while place < len(content):
            place += os.pwrite(self.stdin, content[place:], place)  # the program shares the file offset, 0
        order = {"command": request["command"], "limits": request["limits"], "folder": os.getcwd()}
        with open(self.order, "w") as pipe:
            json.dump(order, pipe)
        os.close(self.stdin)

    def close(self) -> None:
        for fd in (self.out, self.err, self.status):
            os.close(fd)

    def dismiss(self) -> None:
        """End it without a run."""
        os.close(self.order)
        os.close(self.stdin)
        self.close()
        os.waitpid(self.pid, 0)


def run(prepared: Prepared, request: Request, control: int, began: Callable[[int], None]) -> dict[str, Any]:
    """Run the program in the current folder; returns when all its processes have ended. `began` is called with its
    process id: later errors are attributed to the program. Raises `OSError` for earlier ones."""
    settings = prepared.settings
    try:
        folder.write(request["files"], settings["uid"])
    except OSError:
        prepared.dismiss()
        raise
    began(prepared.pid)
    prepared.begin(request)
    try:
        watch = Watch(prepared.pid, request, settings, control, {prepared.out: bytearray(), prepared.err: bytearray()})
        try:
            watch.until_it_ends()
        finally:
            watch.kill_everything()
        watch.drain()
        reply = watch.told()
        if problem := os.read(prepared.status, 4096).decode(errors="replace"):
            reply |= {"ending": "error", "detail": problem}  # it did not become the program
        prepared.close()
        return reply | {"files": folder.collect(request["collect"], request["limits"]["file_mb"] << 20)}
    except Exception as error:
        detail = f"the process that watches the program failed: {type(error).__name__}: {error}"
        return {"ending": "killed", "detail": detail}


def answer(prepared: Prepared, request: Request, control: int) -> dict[str, Any]:
    try:
        return run(prepared, request, control, lambda pid: send(control, {"began": pid}))
    except OSError as error:
        return failed(error)


def failed(error: OSError) -> dict[str, Any]:
    return {"ending": "error", "detail": f"{type(error).__name__}: {error}"}


def once(settings: Settings, control: int) -> None:
    """Serve one run, in its own sandbox."""
    os.chdir("/tmp")
    prepared = Prepared(settings)
    request = receive(control)
    if request is not None:
        send(control, answer(prepared, request, control))


def zygote(settings: Settings, control: int) -> None:
    """Fork into new namespaces for every run. Modules imported here are available in all forks."""
    for name in settings["preload"]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    ids = os.getuid(), os.getgid()
    requests = select.poll()
    requests.register(control, select.POLLIN | select.POLLRDHUP)
    while not requests.poll()[0][1] & (select.POLLRDHUP | select.POLLHUP):
        first = confine.fork_into_namespaces()
        if first == 0:
            _first(settings, control, ids)
        _, status = os.waitpid(first, 0)
        if status:
            return  # it was killed, and may have sent half a message


def _first(settings: Settings, control: int, ids: tuple[int, int]) -> None:
    """Serve one run as pid 1 of its namespaces. Never returns."""
    try:
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        confine.map_user(*ids)
        prepared = Prepared(settings)
        request = receive(control)
        if request is None:
            os._exit(1)
        try:
            confine.own_files(request["limits"]["file_mb"])
            os.chdir("/tmp")
        except OSError as error:
            send(control, failed(error))
            os._exit(0)
        send(control, answer(prepared, request, control))
        os._exit(0)
    finally:
        os._exit(1)


def folders(settings: Settings, control: int) -> None:
    """Serve runs, each in its own folder, below one that this process removes at its end."""
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)  # orphans are reparented to this process, and killed
    try:
        while True:
            prepared = Prepared(settings)
            if (request := receive(control)) is None:
                break
            place = os.path.join(settings["scratch"], os.urandom(8).hex())
            os.mkdir(place, 0o700)
            os.chdir(place)
            reply = answer(prepared, request, control)
            os.chdir("/")
            folder.remove(place)
            send(control, reply)
    finally:
        folder.remove(settings["scratch"])


def main() -> None:
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a program can send pid 1 only signals that have a handler
    send(control, {"pid": os.getpid(), "landlock": confine.landlock_version()})
    settings = receive(control)
    if settings is None:
        return
    stay = {"bubblewrap": once, "zygote": zygote}.get(settings["kind"], folders)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stay(settings, control)


if __name__ == "__main__":
    main()
