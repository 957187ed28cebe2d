"""What the stand-in for Modal's servers keeps in memory, and its calls, which run in processes."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modal_proto import api_pb2

from birl.cache import cache_folder

CONTAINER = Path(__file__).with_name("modal_container.py")


@dataclass
class Call:
    """One call of a function: its input, and what became of it."""

    id: str
    function: str
    method: str
    args: bytes
    result: api_pb2.GenericResult | None = None
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    cancelled: bool = False

    def kill(self) -> None:
        """The container goes, with everything in it, whatever group it is in."""
        if self.process is None or self.process.poll() is not None:
            return
        for number in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()


def descendants(number: int) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(number)], capture_output=True, text=True).stdout.split()
    return [one for child in children for one in (int(child), *descendants(int(child)))]


@dataclass
class Cloud:
    """Everything that there is. `run`: whether calls are run."""

    folder: Path
    run: bool = True
    url: str = ""
    files: str = ""  # address under which files of the volume are read
    asked: list[tuple[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    ids: dict[tuple[str, str], str] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    dicts: defaultdict[str, dict[bytes, bytes]] = field(default_factory=lambda: defaultdict(dict))
    queues: defaultdict[tuple[str, bytes], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    blobs: dict[str, bytes] = field(default_factory=dict)
    mounts: dict[str, dict[str, str]] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    apps: dict[str, str] = field(default_factory=dict)  # id -> state

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    def id(self, kind: str, name: str = "") -> str:
        """The same for the same name; a new one for none."""
        key = (kind, name or f"#{len(self.ids)}")
        return self.ids.setdefault(key, f"{kind}-{len(self.ids):022d}")

    def requests(self, name: str) -> list[Any]:
        return [request for asked, request in self.asked if asked == name]

    def env(self, **more: str) -> dict[str, str]:
        """Of a client. Nothing of what is set on this machine for Modal counts."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MODAL_", "BIRL_"))}
        about = {"MODAL_SERVER_URL": self.url, "MODAL_TOKEN_ID": "ak-test", "MODAL_TOKEN_SECRET": "as-test"}
        return {**kept, **about, "MODAL_CONFIG_PATH": str(self.folder / "none.toml"), **more}

    # --- what a container is

    def start(self, call: Call) -> None:
        threading.Thread(target=self._live, args=(call,), daemon=True).start()

    def _live(self, call: Call) -> None:
        """Started again after a failure, as often as its retry policy says."""
        function = self.functions[call.function]
        while True:
            call.starts += 1
            call.result = None if (found := self._once(call, function)) is None else found
            success = found is not None and found.status == api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
            if success or call.cancelled or call.starts > function.retry_policy.retries:
                call.result = found
                return
            call.result = None

    def _once(self, call: Call, function: Any) -> api_pb2.GenericResult:
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            folder = Path(place)
            self.unpack(function, folder)
            (folder / "args").write_bytes(call.args)
            env = self.env(MODAL_TASK_ID="", **self.environment(function))
            env |= {"PYTHONPATH": str(folder / "root"), "BIRL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
            about = [function.function_name, call.method, str(folder), str(self.volume)]
            words = [sys.executable, str(CONTAINER), *about]
            (work := folder / "root" / "work").mkdir(parents=True, exist_ok=True)
            (folder / "cache").mkdir()
            (folder / "cache" / "kernels").symlink_to(cache_folder("kernels"))  # compiling them takes half a minute
            pipe = subprocess.PIPE
            call.process = subprocess.Popen(words, env=env, cwd=work, stdout=pipe, stderr=subprocess.STDOUT)
            assert call.process.stdout is not None
            for line in call.process.stdout:
                self.logs.append(line.decode(errors="replace"))
            code = call.process.wait()
            out = folder / "result"
            success = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
            if code == 0:
                return api_pb2.GenericResult(status=success, data=out.read_bytes())
            said = out.read_text() if out.exists() else f"exit code {code}"
            return api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE, exception=said)

    def unpack(self, function: Any, folder: Path) -> None:
        """The files of all mounts of the function, under `folder` instead of /."""
        for mount in function.mount_ids:
            for name, digest in self.mounts[mount].items():
                target = folder / name.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.blobs[digest])

    def environment(self, function: Any) -> dict[str, str]:
        return {k: v for secret in function.secret_ids for k, v in self.secrets.get(secret, {}).items()}

    def function_of(self, call: Call) -> str:
        return self.functions[call.function].function_name

    def close(self) -> None:
        for call in self.calls.values():
            call.cancelled = True
            call.kill()
