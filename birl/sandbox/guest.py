"""The program beside the program: takes runs from a socket, starts each one confined, and tells how it went.

It is pid 1 of the sandbox (bubblewrap, zygote) or the parent of the program (landlock, process), and started by
`birl/sandbox/worker.py`. Standard library only. A message is four bytes of length and JSON; bytes are base64.
"""

import base64
import contextlib
import gc
import importlib
import json
import os
import signal
import struct
import sys
from typing import Any

from birl.sandbox import confine, folder, program
from birl.sandbox.program import Request, Settings
from birl.sandbox.watch import Watch


def receive(control: int) -> Any:
    """None where the other side is gone."""
    head = _exactly(control, 4)
    body = _exactly(control, struct.unpack(">I", head)[0]) if head else b""
    return json.loads(body) if body else None


def _exactly(control: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = os.read(control, min(count - len(found), 1 << 20))
        if not part:
            return b""
        found += part
    return bytes(found)


def send(control: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(control, data) :]


def run(request: Request, settings: Settings, control: int) -> dict[str, Any]:
    """Start the program in the current folder, and come back when nothing of it is left."""
    folder.write(request["files"], settings["uid"])
    stdin = os.memfd_create("stdin")
    os.write(stdin, base64.b64decode(request["stdin"]))
    os.lseek(stdin, 0, os.SEEK_SET)
    (out, out_end), (err, err_end), (status, status_end) = os.pipe(), os.pipe(), os.pipe()
    confine.prctl(confine.PR_SET_DUMPABLE, 0)  # or the program reads this process's memory
    child = os.fork()
    if child == 0:
        program.become(request, settings, (stdin, out_end, err_end), status_end)
    for fd in (stdin, out_end, err_end, status_end):
        os.close(fd)
    watch = Watch(child, request, settings, control, {out: bytearray(), err: bytearray()})
    try:
        watch.until_it_ends()
    finally:
        watch.kill_everything()
    watch.drain()
    problem = os.read(status, 4096).decode(errors="replace")
    for fd in (out, err, status):
        os.close(fd)
    reply = watch.told()
    if problem:
        reply |= {"ending": "error", "detail": problem}
    return reply | {"files": folder.collect(request["collect"], request["limits"]["file_mb"] << 20)}


def once(settings: Settings, control: int) -> None:
    """One run, in a sandbox of its own."""
    request = receive(control)
    if request is not None:
        os.chdir("/tmp")
        send(control, run(request, settings, control))


def zygote(settings: Settings, control: int) -> None:
    """Forks for every run into namespaces of its own. What is imported here needs no import there."""
    for name in settings["preload"]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while (request := receive(control)) is not None:
        middle = os.fork()
        if middle == 0:
            _middle(request, settings, control)
        _, status = os.waitpid(middle, 0)
        if status:
            detail = "the process that watches it was killed" if os.WIFSIGNALED(status) else "cannot fork"
            send(control, {"ending": "killed", "detail": detail})


def _middle(request: Request, settings: Settings, control: int) -> None:
    """A namespace of processes begins with the next child: it is pid 1. Never returns."""
    try:
        confine.own_namespaces()
        first = os.fork()
        if first == 0:
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
            confine.own_files(request["limits"]["file_mb"])
            os.chdir("/tmp")
            send(control, run(request, settings, control))
            os._exit(0)
        _, status = os.waitpid(first, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    except BaseException as error:
        send(control, {"ending": "error", "detail": f"{type(error).__name__}: {error}"})
        os._exit(0)


def folders(settings: Settings, control: int) -> None:
    """Every run in a folder of its own, below one that this process removes at its end."""
    import shutil

    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)  # orphans come here, and are killed
    try:
        while (request := receive(control)) is not None:
            place = os.path.join(settings["scratch"], os.urandom(8).hex())
            os.mkdir(place, 0o700)
            os.chdir(place)
            try:
                reply = run(request, settings, control)
            except OSError as error:
                reply = {"ending": "error", "detail": f"{type(error).__name__}: {error}"}
            os.chdir("/")
            shutil.rmtree(place, ignore_errors=True)  # safe against links that are put there meanwhile
            send(control, reply)
    finally:
        shutil.rmtree(settings["scratch"], ignore_errors=True)


def main() -> None:
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    send(control, {"pid": os.getpid(), "landlock": confine.landlock_version()})
    settings = receive(control)
    if settings is None:
        return
    stay = {"bubblewrap": once, "zygote": zygote}.get(settings["kind"], folders)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stay(settings, control)


if __name__ == "__main__":
    main()
