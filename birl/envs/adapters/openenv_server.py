"""The server of an OpenEnv environment: one that runs, or one that is started and ended here."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from birl.envs.adapters.package import unknown
from birl.errors import BirlError
from birl.process import free_port, kill, tied
from birl.rewards.requests import LOCAL

STARTS = 60.0  # seconds a server may take
ANSWERS = 3.0  # seconds until a server that should run must answer
ENDS = 10.0  # seconds until it is killed
OWN = {"metadata", "done", "reward"}  # what every action or observation has


class Server:
    """Where the environments are. `action` is the field that takes the reply, `see` the one that the model sees; empty
    where the reply is all of the action, or the model sees all, as JSON."""

    def __init__(self, url: str, process: subprocess.Popen | None = None) -> None:
        self.url, self.process = url.rstrip("/"), process
        self.action = self.see = ""

    def ready(self) -> None:
        """Wait until it answers. Raises `BirlError`."""
        end = time.monotonic() + (STARTS if self.process else ANSWERS)
        while True:
            if self.process is not None and self.process.poll() is not None:
                raise BirlError(f"env.command: the server ended with status {self.process.returncode}.")
            try:
                if self.ask("health", 5).is_success:
                    return
                problem = "its /health is no success"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() > end:
                raise BirlError(f"env.url={self.url}: no OpenEnv server answers there ({problem}).")
            time.sleep(0.1)

    def learn(self, action: str, see: str) -> None:
        """Which fields are text, of what the server says that it takes and gives. Raises `BirlError`."""
        result = self.ask("schema", 30).raise_for_status().json()
        self.action = text_field(result["action"], "env.action", action)
        self.see = text_field(result["observation"], "env.see", see)

    def ask(self, path: str, seconds: float) -> httpx.Response:
        """Without a proxy where it is on this machine, as OpenEnv's own client does."""
        return httpx.get(f"{self.url}/{path}", timeout=seconds, trust_env=urlsplit(self.url).hostname not in LOCAL)

    def close(self) -> None:
        """The end of a server that was started here, and of what it started, whether it still runs or not."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDS)
        kill(self.process.pid)
        self.process.wait()
        self.process = None


def started(command: str) -> Server:
    """A server on a free port, which ends with the thread that starts it."""
    if "{port}" not in command:
        raise BirlError(f"env.command={command}: it needs {{port}} where the server takes its port.")
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    if words[0] == "python":
        words[0] = sys.executable  # the one that has the package
    if shutil.which(words[0]) is None:
        raise BirlError(f"env.command={command}: there is no program {words[0]}.")
    process = subprocess.Popen(tied(words), start_new_session=True, stdin=subprocess.DEVNULL)
    return Server(f"http://127.0.0.1:{port}", process)


def text_field(schema: dict[str, Any], key: str, chosen: str) -> str:
    """The field that was chosen, or the only one that is text, if nothing else must be given."""
    fields = {name: f for name, f in schema.get("properties", {}).items() if name not in OWN}
    if chosen and chosen not in fields:
        raise unknown(key, chosen, fields)
    texts = [name for name, f in fields.items() if f.get("type") == "string"]
    needed = set(schema.get("required", ())) - set(texts)
    return chosen or (texts[0] if len(texts) == 1 and not needed else "")
