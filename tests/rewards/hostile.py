"""A server of chat completions and of a reward model that misbehaves as it is told in the text it gets."""

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hostile:
    """`seen`: how often each text came; of a judge's question, its answers with " | " between them. `most`: how many
    requests were open at once. `judge`: what it says to a judge's question, where that is set."""

    port: int
    seen: Counter[str] = field(default_factory=Counter)
    tokens: set[str | None] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)
    judge: Callable[[list[str], dict[str, Any]], str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


#: word in the text -> (status, body, headers)
KINDS: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "500": (500, b"out of memory", {}),
    "400": (400, b"no such model", {}),
    "401": (401, b"who are you", {}),
    "patience": (429, b"busy", {"Retry-After": "3600"}),
    "garbage": (200, b"\xff\xfe<html>", {}),
    "half": (200, b'{"choices": [{"message"', {}),
    "list": (200, b"[]", {}),
    "null": (200, b'{"choices": [{"message": {"content": null}}]}', {}),
    "huge": (200, b"x" * (5 << 20), {}),
    "decline": (200, b'{"choices": [{"message": {"content": null, "refusal": "I may not."}}]}', {}),
    "filter": (200, b'{"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}', {}),
    "moved": (302, b"", {"Location": "http://127.0.0.1:9/other"}),
}


FENCED = re.compile(r"<answer(?:-\d+)?-([0-9a-f]{12})>\n(.*?)\n</answer(?:-\d+)?-\1>", re.DOTALL)


def answers(text: str) -> list[str]:
    """Those that a judge's question shows."""
    return [match[1] for match in FENCED.findall(text)]


@contextlib.contextmanager
def hostile() -> Iterator[Hostile]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            shown = answers(body["messages"][-1]["content"])
            text = " | ".join(shown) or body["messages"][-1]["content"]
            with found.lock:
                found.open += 1
                found.most = max(found.most, found.open)
                found.seen[text] += 1
                found.tokens.add(self.headers["Authorization"])
                found.bodies.append(body)
                number = found.seen[text]
            if found.judge and shown:
                text = f"say:{found.judge(shown, body)}"
            with contextlib.suppress(OSError):
                self.answer(text, number)

        def end_headers(self) -> None:
            """The request is over: a client that has its answer may ask the next before this thread goes on."""
            with found.lock:
                found.open -= 1
            super().end_headers()

        def answer(self, text: str, number: int) -> None:
            for word, (status, data, headers) in KINDS.items():
                if word in text:
                    return self.send(status, data, headers)
            if "busy" in text and number < 3:
                return self.send(429, b"busy", {"Retry-After": "0"})
            if "short" in text and number < 2:
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"cho')
                self.close_connection = True
                return None
            if "hang" in text:
                time.sleep(300)
            time.sleep(0.02)
            said = text.partition("say:")[2] or "Fine.\nScore: 0.25"
            chat = {"choices": [{"message": {"content": said}, "finish_reason": "length" if "cut" in text else "stop"}]}
            return self.send(200, json.dumps(chat | {"data": [{"data": [0.5, float(len(text))]}]}).encode(), {})

        def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Hostile(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
