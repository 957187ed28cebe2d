"""One Chromium for all episodes of a worker, which may reach the benchmark's own pages and nothing else.

BrowserGym starts a browser for each episode, and a second one for its chat window. Here `launch` gives the one browser
that is there already, and the chat is a list.
"""
# pyright: reportMissingImports=false

import functools
import http.server
import re
import threading
import time
from pathlib import Path
from typing import Any

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
    """Stands where BrowserGym expects Playwright, and where it expects a browser. `hosts`: host:port of each site that
    may be reached."""

    def __init__(self, playwright: Any, executable: str, hosts: list[str]) -> None:
        self.selectors, self.chromium, self.hosts = playwright.selectors, self, frozenset(hosts)
        # Routes do not see WebSockets and what the browser fetches in advance; these rules hold for every connection.
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
        """The end of an episode is not the end of the browser."""


class Messages:
    """BrowserGym's chat without a window."""

    def __init__(self, **_: Any) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, msg: str) -> None:
        if role != "info":
            self.messages.append({"role": role, "timestamp": time.time(), "message": msg})

    def close(self) -> None:
        pass


class _Files(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a page is a dozen files: one connection for all of them

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(folder: Path) -> int:
    """The port on loopback where the files of `folder` are. Pages from file:// could read other files."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(folder)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port
