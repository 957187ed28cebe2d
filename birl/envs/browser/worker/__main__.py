"""A process with one browser that runs BrowserGym's tasks, called in lines of JSON. It runs in a separate environment,
as BrowserGym needs packages that conflict with birl's: nothing of birl is imported here.

    {"benchmark": "miniwob", ...}                          settings -> {"tasks": [...], "actions": "..."} or {"problem"}
    {"id": 1, "do": "open", "episode": 7, "task": "click-test", "seed": 3}     -> {"id": 1, "goal": ..., "page": ...}
    {"id": 2, "do": "step", "episode": 7, "action": "click('13')"}             -> page, reward, done, error
                                                                               or invalid: why this is no action
    {"id": 3, "do": "close", "episode": 7}                                     -> {}
    anything that fails                                    {"id": ..., "failed": reason, "lost": the browser is gone}

The end of stdin ends it, and all processes that it started.
"""
# pyright: reportMissingImports=false

import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

GRACE = 8.0  # seconds between the end of stdin and a forced end


def main() -> None:
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()

    def answer(reply: dict[str, Any]) -> None:
        wire.write(json.dumps(reply) + "\n")
        wire.flush()

    settings = json.loads(lines.get() or "{}")
    try:
        from player import Player

        player = Player(settings)
    except Exception as error:
        answer({"problem": _first_line(error)})
        return
    answer(player.hello)
    while (line := lines.get()) is not None:
        request = json.loads(line)
        try:
            result = player.do(**{name: value for name, value in request.items() if name != "id"})
        except Exception as error:
            result = {"failed": _first_line(error), "lost": not player.alive}
        answer({"id": request["id"], **result})
    player.quit()


def _read(lines: "queue.SimpleQueue[str | None]") -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)
    threading.Event().wait(GRACE)  # this thread is a daemon: it does not delay an orderly end
    _remove_own_files()
    os.killpg(0, signal.SIGKILL)


def _remove_own_files() -> None:
    """Remove the folder, if it was made for this process."""
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith("birl-browser-"):
        shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]


if __name__ == "__main__":
    try:
        main()
    finally:
        _remove_own_files()
