"""One Chromium for all episodes of a worker, which may access only the benchmark's own pages.

BrowserGym starts a browser for each episode, and a second one for its chat window. Here `launch` returns the existing
browser, and the chat is a list.
"""
# pyright: reportMissingImports=false

import contextlib
import mimetypes
import re
import socketserver
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-features=OverlayScrollbars,ExtendedOverlayScrollbars",  # as BrowserGym: scrollbars are in screenshots
)


class Shared:
    """Replaces Playwright and a browser for BrowserGym. `hosts`: host:port of each site that may be accessed."""

    def __init__(self, playwright: Any, executable: str, hosts: list[str]) -> None:
        self.selectors, self.chromium, self.hosts = playwright.selectors, self, frozenset(hosts)
        # Routes do not cover WebSockets and prefetches; these rules hold for every connection.
        places = [f"{h}{port}" for h in sorted(hosts) for port in ([""] if ":" in h else [":80", ":443"])]
        rules = ", ".join([*(f"MAP {place} {place}" for place in places), "MAP * ~NOTFOUND"])
        self.browser = playwright.chromium.launch(
            executable_path=executable,
            args=[*FLAGS, f"--host-resolver-rules={rules}"],
            ignore_default_args=["--hide-scrollbars"],
        )
        own = "|".join(re.escape(host) for host in sorted(hosts))
        self.foreign = re.compile(rf"^(?!(?:https?|wss?)://(?:{own})(?:[/?#]|$)|about:|data:|blob:)")

    def launch(self, **_: Any) -> "Shared":
        return self

    def new_context(self, **options: Any) -> Any:
        context = self.browser.new_context(**options, service_workers="block", accept_downloads=False)
        context.route(self.foreign, lambda route: route.abort("blockedbyclient"))
        return context

    def close(self) -> None:
        """Does nothing: the browser outlives an episode."""


class Messages:
    """BrowserGym's chat without a window."""

    def __init__(self, **_: Any) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, msg: str) -> None:
        if role != "info":
            self.messages.append({"role": role, "timestamp": time.time(), "message": msg})

    def close(self) -> None:
        pass


class _Pages(socketserver.StreamRequestHandler):
    """Answers GET from memory. A page is a dozen files, and each episode requests all of them: the standard library's
    server takes milliseconds for each."""

    server: Any

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while words := self.rfile.readline(65536).split():
                while self.rfile.readline(65536).strip():
                    pass  # headers
                self.wfile.write(self.server.answer(words[1].decode("latin-1")))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.files = {"/" + str(f.relative_to(folder)): f for f in folder.rglob("*") if f.is_file()}
        self.answers: dict[str, bytes] = {}

    def answer(self, address: str) -> bytes:
        """The response to a request; only files that existed at the start have an address."""
        path = unquote(address.partition("?")[0])
        if path not in self.answers:
            file = self.files.get(path)
            if file is None:
                return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            kind, body = mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
            self.answers[path] = head.encode() + body
        return self.answers[path]


def serve(folder: Path) -> int:
    """Serve the files of `folder` on loopback; returns the port. Pages from file:// could read other files."""
    server = _Server(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]
