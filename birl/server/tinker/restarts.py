"""Restarts the ranks of `birl tinker` if one of them is lost: a rank out of memory ends all that wait for it. Their
state is on disk, and the listening address is kept."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from socket import SO_ACCEPTCONN, SOL_SOCKET, socket
from types import FrameType

from birl.config import schema
from birl.config.file import to_yaml
from birl.hosts import bind
from birl.process import tied

MOST, WINDOW = 5, 3600.0  # maximum restarts within this many seconds
SOCKET = "BIRL_TINKER_SOCKET"  # environment variable: the child's listening socket


def run(config: schema.Tinker) -> int:
    """Serve until a signal; returns its exit code. Raises `BirlError` for mistakes known before the model is loaded."""
    if config.parallel.size == 1 or "WORLD_SIZE" in os.environ:  # a launcher restarts its ranks itself
        from birl.server.tinker import command

        return command.run(config)
    with bind(config.host, config.port) as sock:
        return supervise([sys.executable, "-m", "birl.server.tinker.command"], to_yaml(config), sock)


def supervise(words: Sequence[str], text: str, sock: socket) -> int:
    """Run `words` with `text` as standard input; restart it if it ends after it has listened at the socket, at most
    MOST times within WINDOW. Returns its exit code."""
    signals, restarts = list[int](), deque[float]()
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if child is not None:
            child.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while True:
        env = os.environ | {SOCKET: str(sock.fileno())}
        child = subprocess.Popen(
            tied(words), stdin=subprocess.PIPE, env=env, pass_fds=[sock.fileno()], start_new_session=True
        )
        if signals:  # received before the child was started
            child.terminate()
        child.communicate(text.encode())
        if signals:
            return 128 + signals[0]
        code = child.returncode
        if code == 0 or not sock.getsockopt(SOL_SOCKET, SO_ACCEPTCONN):
            return code if code >= 0 else 128 - code
        while restarts and time.monotonic() > restarts[0] + WINDOW:
            restarts.popleft()
        if len(restarts) == MOST:
            _say(f"it was started again {MOST} times within {WINDOW / 60:.0f} minutes, and not once more.")
            return code if code >= 0 else 128 - code
        restarts.append(time.monotonic())
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        _say(f"it ended ({how}) and is started again from its folder, restart {len(restarts)} of {MOST}.")


def _say(words: str) -> None:
    print(f"birl tinker: {words}", file=sys.stderr, flush=True)
