"""A stand-in for WebArena's shop, enough for three of its tasks; and a neighbour that nobody may ask."""

import html
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CASE = (
    "/heiying-game-card-case-for-nintendo-switch-switch-oled-game-card-or-micro-sd-memory-cards-portable-switch-game-"
    "memory-card-storage-with-24-game-card-slots-and-24-micro-sd-card-slots-black.html"
)
GUARD = "/dental-night-guard.html"
LOGIN = """<form method=post action=/customer/account/loginPost/>
<label for=e>Email</label><input id=e name=e><label for=p>Password</label><input id=p name=p type=password>
<button>Sign In</button></form>"""


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that is closed resets its connections."""


class Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        shop = (
            f"<a href='{CASE}'>Game card case</a> <a href='{GUARD}'>Night guard</a>"
            f"<img src='http://127.0.0.1:{self.server.neighbour}/pixel.png'>"
            f"<iframe src='http://127.0.0.1:{self.server.neighbour}/frame'></iframe>"
            f"<script>new WebSocket('ws://127.0.0.1:{self.server.neighbour}/socket')</script>"
        )
        self._say(
            LOGIN if self.path.startswith("/customer/account/login") else f"<h1>{html.escape(self.path)}</h1>{shop}"
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append(f"POST {self.path} {body}")
        self._say("welcome")

    def _say(self, text: str) -> None:
        data = f"<!doctype html><title>One Stop Market</title>{text}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[Any, Any]]:
    """The shop and its neighbour; `asked` of each lists the requests that reached it."""
    servers: list[Any] = [Quiet(("127.0.0.1", 0), Site) for _ in range(2)]
    for server in servers:
        server.asked, server.neighbour = [], servers[1].server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
