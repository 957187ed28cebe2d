"""The part of Modal's client that the adapter calls: signatures of modal 1.6.4, and a stand-in that obeys them.

The container of the stand-in is a process of this machine, so that what runs in it is the real guest.
"""

import asyncio
import inspect
import sys
from types import SimpleNamespace
from typing import Any

# name -> (parameters that must be given, parameters that may be given, whether it takes any number of words)
SIGNATURES = {
    "App.lookup": (("name",), ("client", "environment_name", "create_if_missing"), False),
    "Image.debian_slim": ((), ("python_version", "force_build"), False),
    "Sandbox.create": (
        (),
        (
            *("app", "name", "tags", "image", "env", "secrets", "network_file_systems", "timeout", "idle_timeout"),
            *("workdir", "gpu", "cloud", "region", "cpu", "memory", "runtime", "block_network"),
            *("outbound_cidr_allowlist", "outbound_domain_allowlist", "_experimental_outbound_policy"),
            *("inbound_cidr_allowlist", "volumes", "pty", "encrypted_ports", "h2_ports", "unencrypted_ports"),
            *("custom_domain", "proxy", "include_oidc_identity_token", "readiness_probe", "verbose"),
            *("experimental_options", "_experimental_enable_snapshot", "_experimental_persistent", "client"),
            *("environment_name", "pty_info", "cidr_allowlist"),
        ),
        True,
    ),
    "Sandbox.exec": (
        (),
        (
            *("stdout", "stderr", "timeout", "workdir", "env", "secrets", "text", "bufsize", "pty", "_pty_info"),
            "pty_info",
        ),
        True,
    ),
    "Sandbox.terminate": ((), ("wait",), False),
    "ContainerProcess.wait": ((), (), False),
    "StreamReader.read": ((), (), False),
    "StreamWriter.write": (("data",), (), False),
    "StreamWriter.write_eof": ((), (), False),
    "StreamWriter.drain": ((), (), False),
}


def shape(function: Any) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = tuple(p.name for p in named if p.default is p.empty)
    return needed, tuple(p.name for p in named if p.default is not p.empty), len(named) < len(found)


def checked(name: str, words: tuple[Any, ...], options: dict[str, Any]) -> None:
    needed, possible, many = SIGNATURES[name]
    assert len(words) == len(needed) or (many and len(words) >= len(needed)), (name, words)
    assert options.keys() <= set(possible), (name, options)


class Call:
    """One function of the client, in its two forms: `f()` and `await f.aio()`."""

    def __init__(self, name: str, action: Any) -> None:
        self.name = name
        self.action = action

    def __call__(self, *words: Any, **options: Any) -> Any:
        checked(self.name, words, options)
        return self.action(*words, **options)

    async def aio(self, *words: Any, **options: Any) -> Any:
        checked(self.name, words, options)
        return await self.action(*words, **options)


class Error(Exception):
    """modal.exception.Error"""


class Modal:
    """The module. `calls`: what was asked. `broken`: what Sandbox.create raises. `living`: containers not ended."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.broken: Exception | None = None
        self.living = 0
        self.exception = SimpleNamespace(Error=Error)
        self.App = SimpleNamespace(lookup=Call("App.lookup", self.lookup))
        self.Image = SimpleNamespace(debian_slim=Call("Image.debian_slim", lambda **_: "image"))
        self.Sandbox = SimpleNamespace(create=Call("Sandbox.create", self.create))

    async def lookup(self, name: str, **options: Any) -> str:
        self.calls.append(("lookup", {"name": name, **options}))
        return "app"

    async def create(self, **options: Any) -> Any:
        self.calls.append(("create", options))
        if self.broken is not None:
            raise self.broken
        self.living += 1
        return SimpleNamespace(
            exec=Call("Sandbox.exec", self.exec), terminate=Call("Sandbox.terminate", self.terminate)
        )

    async def terminate(self) -> None:
        self.living -= 1

    async def exec(self, *words: str) -> Any:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable if words[0] == "python" else words[0], *words[1:]]
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd="/")
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        async def read() -> str:
            return (await stdout.read()).decode()

        return SimpleNamespace(
            stdin=SimpleNamespace(
                write=Call("StreamWriter.write", lambda data: stdin.write(data.encode())),
                write_eof=Call("StreamWriter.write_eof", stdin.write_eof),
                drain=Call("StreamWriter.drain", stdin.drain),
            ),
            stdout=SimpleNamespace(read=Call("StreamReader.read", read)),
            wait=Call("ContainerProcess.wait", process.wait),
        )
