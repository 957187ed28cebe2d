"""`birl view`: start the server, print its address, open a browser, wait for Ctrl-C."""

import os
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from birl.errors import INTERRUPTED, BirlError
from birl.flags import Flag, taken, whole

if TYPE_CHECKING:
    import uvicorn

    from birl.view.folders import Runs

PORT = 8311
NEXT = 20  # further ports to try if the first is in use
USAGE = (
    "Usage: birl view [RUN ...] [--port N] [--no-browser]\n\n"
    "Serves a live page of runs: curves, comparison, rollouts, timeline. RUN is a run folder or a folder of runs\n"
    "(default: runs). Only this machine can open the page (127.0.0.1). It is read-only and also shows running runs.\n"
    f"--port: default {PORT}, or the next free port. Ctrl-C ends the page; runs are not affected."
)


def _port(text: str) -> int:
    if (number := whole(text)) > 65535:
        raise ValueError
    return number


PORT_FLAG = Flag(name="--port", value="N", takes="a number up to 65535, as in `birl view --port 8311`", read=_port)
QUIET = Flag(name="--no-browser")


def run(words: list[str]) -> int:
    flags, roots = taken("view", words, (PORT_FLAG, QUIET))
    for word in roots:
        if "=" in word and not Path(word).exists():
            raise BirlError(f"{word}: `birl view` takes folders, as in `birl view runs/demo`")
    from birl.view.folders import Runs

    if not roots and not Path("runs").is_dir():
        raise BirlError("There is no folder runs here. Name a run or a folder of runs: `birl view FOLDER`.")
    runs = Runs([Path(root) for root in roots or ["runs"]])
    listener = listen(flags.get(PORT_FLAG.name))
    port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/" + _start(runs, named=bool(roots))
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}" if runs else "No runs yet: the page will show them"
    print(f"birl view: {url}\n{count}. Ctrl-C ends it.", flush=True)
    screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if QUIET.name not in flags and screen:
        threading.Timer(0.3, webbrowser.open, (url,)).start()
    server(runs, listener).run([listener])  # ended by a signal, whose exception asyncio may lose
    return INTERRUPTED


def server(runs: "Runs", listener: socket.socket) -> "uvicorn.Server":
    """The page's server, not started: `.run([listener])` blocks until a signal."""
    import uvicorn

    from birl.server.connections import Patient
    from birl.view.server import app

    return uvicorn.Server(
        uvicorn.Config(
            app(runs, listener.getsockname()[1]), http=Patient, ws="none", lifespan="off", log_level="error",
            access_log=False, server_header=False, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip


def listen(port: int | None) -> socket.socket:
    """A socket on the loopback. `port` None: 8311 or the next free one; 0: any."""
    wanted = [port] if port is not None else range(PORT, PORT + NEXT)
    for number in wanted:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
            listener.listen(128)
            return listener
        except OSError as problem:
            listener.close()
            reason = problem.strerror or str(problem)
    if port is not None:
        raise BirlError(f"--port {port} cannot be used ({reason}). Choose another, or leave --port out.")
    raise BirlError(f"The ports {PORT} to {PORT + NEXT - 1} are all taken. Name a free one with --port N.")


def _start(runs: "Runs", named: bool) -> str:
    """The first view: the curves of runs that were named, else the list."""
    result = list(runs)
    if named and 0 < len(result) <= 8:
        return "#/curves?" + "&".join(f"run={run.id}" for run in result)
    return ""
