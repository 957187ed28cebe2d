"""What nobody can do to a server: keep others waiting, take all its connections, or come in under another name."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from birl.engines.client import Client
from birl.engines.peer import Peer
from birl.errors import BirlError, EngineDown
from birl.server import connections, limits
from birl.text.bounds import LONG
from birl.types import Message, SamplingParams
from tests.server.running import Running, running, slowed, until
from tests.text.test_tools import chat as chat_of
from tests.tiny import CHATML, tiny_model_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_model_folder(tmp_path_factory.mktemp("m") / "tiny")
    with running(folder) as found:
        yield found


EMPTY = {"role": "user", "content": ""}
PICTURE = {"type": "image", "text": "x" * 200_000}
HUGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty messages": ("chat/completions", {"messages": [EMPTY] * 20_000}, "cannot fit into the context"),
    "a role": ("chat/completions", {"messages": [{"role": "u" * 2_000_000, "content": ""}]}, "cannot fit into"),
    "a long role": ("chat/completions", {"messages": [{"role": "u" * 300, "content": "Hi"}]}, "300 characters"),
    "a name": ("chat/completions", {"messages": [EMPTY | {"name": "u" * 300}]}, "300 characters"),
    "calls": (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 20_000}]},
        "cannot fit into the context",
    ),
    "arguments": (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "1" * 99_999}}]}]},
        "characters",
    ),
    "tools": (
        "chat/completions",
        {"messages": [EMPTY], "tools": [{"type": "function"}] * 50_000},
        "50000 tools; at most 1024",
    ),
    "names of tools": (
        "chat/completions",
        {"tools": [{"type": "function", "function": {"name": "a"}}] * 1025},
        "1025 tools; at most 1024",
    ),
    "a wide tool": ("chat/completions", {"tools": [{"type": "function", "more": [0] * 50_000}]}, "keys and values"),
    "a deep tool": ("chat/completions", {"tools": [json.loads('{"a":' * 300 + "1" + "}" * 300)]}, "nested more"),
    "prompts": ("completions", {"prompt": ["x"] * 30_000}, "30000 answers in one request"),
    "a prompt": ("completions", {"prompt": "x" * 200_000}, "200000 characters"),
    "ids": ("completions", {"prompt": [1] * 200_000}, "200000 tokens"),
    "lists": ("completions", {"prompt": [[]] * 300_001}, "more than 300,000 lists, objects and keys"),
    "keys": ("completions", {str(i): 1 for i in range(300_001)}, "more than 300,000 lists, objects and keys"),
    "numbers": ("completions", {"prompt": [1] * 1_200_001}, "or 1,200,000 numbers"),
    "fractions": ("completions", {"prompt": [0.5] * 300_001}, "or 1,200,000 numbers"),
    "marks of text": ("completions", {"prompt": '\\",[{:' * 200_000}, "characters cannot fit"),
    "brackets": ("completions", {"prompt": "[" * 300_001}, "300001 characters cannot fit"),
    "a message of a picture's type": (
        "chat/completions",
        {"messages": [{"type": "image_url", "role": "user", "content": "x" * 200_000}]},
        "200000 characters",
    ),
    "arguments of a picture's type": (
        "messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": PICTURE}]}, EMPTY]},
        "characters cannot fit",
    ),
    "a tool of a picture's type": (
        "chat/completions",
        {"messages": [EMPTY], "tools": [{"type": "function", "function": {"name": "a", "parameters": PICTURE}}]},
        "characters cannot fit",
    ),
    "thoughts of a picture's type": (
        "responses",
        {"input": [{"type": "reasoning", "content": [PICTURE]}, EMPTY]},
        "characters cannot fit",
    ),
    "counted messages of a picture's type": (
        "messages/count_tokens",
        {"messages": [{"type": "image", "role": "user", "content": "x" * 200_000}]},
        "200000 characters",
    ),
    "stop strings": ("completions", {"prompt": "x", "stop": ["x"] * 1000}, "at most 256 strings"),
    "a stop string": ("completions", {"prompt": "x", "stop": ["x" * 9000]}, "at most 4096 characters"),
}


@pytest.mark.parametrize(("path", "sent", "said"), HUGE.values(), ids=HUGE)
def test_what_cannot_fit_is_refused_before_it_is_rendered(server: Running, monkeypatch, path, sent, said) -> None:
    if "stop" not in sent:
        monkeypatch.setattr(server.service.chat, "render", lambda *_: pytest.fail("it was rendered"))
    reply = server.http.post(f"/v1/{path}", json=sent)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text[:300]
    assert len(reply.text) < 1000


def test_more_tokens_than_a_context_are_not_decoded(server: Running) -> None:
    reply = server.http.post("/detokenize", json={"tokens": [1] * 20_000})
    assert reply.status_code == 400 and "tokens: 20000 tokens cannot fit" in reply.json()["error"]["message"]


def test_prompts_are_rendered_beside_the_event_loop(server: Running, monkeypatch) -> None:
    render, begun, go = server.service.chat.render, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert go.wait(20)
        return render(*args)

    monkeypatch.setattr(server.service.chat, "render", slow)
    sent = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    path, long = "/v1/chat/completions", json.dumps(sent) + " " * LONG
    replies: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: replies.append(server.http.post(path, content=long)))
    asking.start()
    assert begun.wait(20)
    assert httpx.get(f"{server.url}/health").status_code == 200  # while it is rendered
    assert httpx.post(server.url + path, json=sent, timeout=15).status_code == 200  # a short one, too
    go.set()
    asking.join(20)
    assert replies[0].status_code == 200


def half(server: Running, text: bytes = b"GET /info HTTP/1.1\r\nHost: 127") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=20)
    found.sendall(text)
    return found


def closed(sock: socket.socket) -> bool:
    """By the server, whatever it said before."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def test_half_a_head_is_not_waited_for(server: Running, monkeypatch) -> None:
    monkeypatch.setattr(connections, "HEAD", 0.2)
    with half(server) as one, half(server, b"") as other:
        assert closed(one) and closed(other)
    monkeypatch.setattr(connections, "KEEP", 0.2)
    with half(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea") as third:
        assert closed(third)
    until(lambda: server.http.get("/health").status_code == 200)


def test_idle_connections_make_room(server: Running, monkeypatch) -> None:
    monkeypatch.setattr(connections.Patient, "most", 4)
    body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    idle = [half(server) for _ in range(12)] + [half(server, body) for _ in range(12)]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert closed(idle[0]) and closed(idle[12])
    for one in idle:
        one.close()
    assert 8 <= connections.room() <= connections.WANTED


def test_half_a_body_is_not_waited_for(server: Running, monkeypatch) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    monkeypatch.setattr(limits, "QUIET", 0.5)
    with half(server, head + b"Content-Length: 9999\r\n\r\n{") as one:
        with contextlib.suppress(OSError):
            for _ in range(100):  # a byte at a time keeps it open no longer
                one.sendall(b" ")
                time.sleep(0.05)
        assert b"408" in one.recv(4096)
    monkeypatch.undo()
    monkeypatch.setattr(connections, "PIECES", 100)
    with half(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200) as one:
        assert one.recv(4096).startswith(b"HTTP/1.1 400")
    with half(server, head + b"a: b\r\n" * 999) as one:
        assert one.recv(4096).startswith(b"HTTP/1.1 400")


def asked(server: Running, http: str = "1.1", **keys: Any) -> socket.socket:
    """A client that has asked, and closes its side of the connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True} | keys)
    head = f"POST /v1/completions HTTP/{http}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    result = half(server, (head + body).encode())
    result.shutdown(socket.SHUT_WR)
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("http", ["1.0", "1.1"])
def test_a_client_that_only_closes_its_own_side_gets_its_answer(server: Running, monkeypatch, http, stream) -> None:
    slowed(monkeypatch, server.service, 0.05)
    monkeypatch.setattr(connections, "PROBE", 0.3)
    with asked(server, http, max_tokens=20, stream=stream) as sock:
        told = b"".join(iter(lambda: sock.recv(4096), b""))
    interim, answer = told.count(connections.CONTINUE), told.replace(connections.CONTINUE, b"")
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer.replace(b" ", b""), told
    assert not interim if http == "1.0" else stream or interim > 1
    until(lambda: server.service.gate.open == 0)


def test_a_client_that_closes_both_sides_is_gone(server: Running, monkeypatch) -> None:
    slowed(monkeypatch, server.service, 0.02)
    engine = server.service.engine
    for later in (False, True):
        before = engine.counters.dropped
        sock = asked(server, stream=False)
        until(lambda: engine.scheduler.busy)
        if later:  # it waited for a while
            monkeypatch.setattr(connections, "PROBE", 0.2)
            time.sleep(0.3)
        assert engine.counters.dropped == before
        sock.close()
        until(lambda b=before: engine.counters.dropped > b and not engine.scheduler.busy, 5.0)


def test_bodies_in_small_pieces_arrive_whole(server: Running) -> None:
    """More of them than are read at a turn."""
    body = json.dumps({"prompt": "a" * 50, "max_tokens": 1}).encode()
    pieces = (bytes([byte]) for byte in body + b" " * 700)
    assert server.http.post("/v1/completions", content=pieces).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(h, 200) for h in ("127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:80", "a.localhost:3")],
        *[
            (h, 403)
            for h in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1")
        ],
    ],
)
def test_another_name_of_this_machine_does_not_come_in(server: Running, host: str, status: int) -> None:
    for path in ("/info", "/metrics", "/v1/models"):
        assert server.http.get(path, headers={"host": host}).status_code == status
    assert server.http.get("/health", headers={"host": host}).status_code == 200


def test_a_body_with_two_lengths_is_refused(server: Running) -> None:
    said = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    with half(server, said + b"\r\n2\r\n{}\r\n0\r\n\r\nGET /info HTTP/1.1\r\nHost: localhost\r\n\r\n") as one:
        reply = b""
        while part := one.recv(4096):
            reply += part
    assert reply.startswith(b"HTTP/1.1 400") and b"Content-Length and Transfer-Encoding" in reply
    assert reply.count(b"HTTP/1.1") == 1


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    client, peer = Client("http://x"), Peer("http://x")
    client._http = httpx.AsyncClient(base_url="http://x", transport=Chunks())
    peer.client = httpx.AsyncClient(base_url="http://x", transport=Chunks())
    for ask in (client.info(), client.generate((1,), SamplingParams(max_tokens=1)), peer.json("GET", "/x")):
        with pytest.raises(EngineDown, match="larger than"):
            await ask


class Chunks(httpx.AsyncBaseTransport):
    """An engine that never stops talking."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100_000):
                yield b"[" * 2**23
            raise AssertionError("all of it was read")

        return httpx.Response(200, content=endless())


def test_a_template_without_end(monkeypatch) -> None:
    monkeypatch.setattr("birl.text.tools.SECONDS", 0.2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(BirlError, match="The chat template took longer"):
        chat_of(loop + CHATML).render((Message(role="user", content="Hi"),))


def test_loading_what_cannot_be_read_stops_nobody(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    folder = tmp_path_factory.mktemp("m")
    os.mkfifo(folder / "model.safetensors")
    with running(tiny_model_folder(folder / "tiny"), request_timeout=0.5) as server:
        reply = server.http.post("/load", json={"version": 1, "folder": str(folder)})
        assert reply.status_code == 409 and "a named pipe" in reply.json()["error"]["message"], reply.text
        with (folder / "big.safetensors").open("wb") as file:
            file.truncate(2**26)
        (folder / "model.safetensors").unlink()
        for path, said in ((str(folder), "67,108,864 bytes of weights, far more"), ("a" * 5000, "File name too long")):
            reply = server.http.post("/load", json={"version": 1, "folder": path})
            assert reply.status_code == 409 and said in reply.json()["error"]["message"], reply.text
        reply = server.http.put("/adapters/x", content=b"\2\0\0\0\0\0\0\0{}")
        assert reply.status_code == 400 and "it has no tensors" in reply.json()["error"]["message"], reply.text
        reply = server.http.put("/adapters/x", content=b"PK\3\4")
        assert "adapters/x is damaged: " in reply.json()["error"]["message"], reply.text
        go, weights = threading.Event(), server.service.engine.weights
        monkeypatch.setattr(weights.__class__, "stage", lambda *_: go.wait(20))
        late: list[httpx.Response] = []
        sent = {"version": 2, "folder": "/"}
        loading = threading.Thread(target=lambda: late.append(server.http.post("/load", json=sent)))
        loading.start()
        assert httpx.get(f"{server.url}/health").status_code == 200
        loading.join(20)
        assert late[0].status_code == 504
        assert httpx.get(f"{server.url}/health").status_code == 200
        go.set()
