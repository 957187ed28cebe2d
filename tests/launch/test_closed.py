"""Who may ask what of the ports that a run opens: nobody from outside without a token, no program of a model at all,
and nobody can have a command run."""

import ast
import asyncio
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from birl.engines import sglang as sglang_process
from birl.engines import vllm as vllm_process
from birl.errors import BirlError
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Limits
from birl.server import serve
from birl.server.dialects import DIALECTS
from birl.server.gateway import Gateway
from birl.server.serve import OPEN, ROUTES
from tests.launch import places
from tests.server.running import Running, config, running

#: every address of an engine. One that is added here has been looked at: does it run anything?
KNOWN = {
    *(("POST", f"/{name}") for name in ("claim", "release", "generate", "load", "join", "leave", "pause", "resume")),
    *(("POST", f"/{name}") for name in ("abort", "sleep", "wake", "v1/chat/completions", "v1/completions")),
    *{("POST", "/v1/responses"), ("POST", "/v1/responses/{id}/cancel"), ("GET", "/v1/responses/{id}/input_items")},
    *{("GET", "/v1/responses/{id}"), ("DELETE", "/v1/responses/{id}")},
    *{("POST", "/v1/responses/input_tokens"), ("POST", "/v1/responses/compact")},
    *(("GET", f"/{name}") for name in ("health", "ready", "info", "digests", "metrics")),
    *(("POST", f"{v}/v1/messages{count}") for v in ("", "/v1") for count in ("", "/count_tokens")),
    *{("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/version")},
    *{
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name:path}"),
        ("PUT", "/stage/{version:int}"),
        ("PUT", "/adapters/{name}"),
        ("POST", "/stage/{version:int}"),
    },
}
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")


@pytest.fixture
def events() -> Iterator[list[str]]:
    """Processes that this one starts, and classes that pickle looks up, while the test runs."""
    found: list[str] = []
    watching = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if watching and (event in STARTS or event == "pickle.find_class"):
            found.append(event)

    sys.addaudithook(hook)  # there is no way to take one away
    yield found
    watching = False


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Running]:
    with running(tiny) as found:
        yield found


def test_no_address_takes_a_command() -> None:
    assert set(ROUTES) == KNOWN
    assert OPEN == ("/health", "/ready")


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_commands_in_every_field_run_nothing(engine: Running, tmp_path: Path, events: list[str]) -> None:
    subprocess.run(["true"])
    pickle.loads(pickle.dumps(Path("x")))
    assert set(events) >= {"subprocess.Popen", "pickle.find_class"}  # the watching works
    engine.generate((1, 9, 4), max_tokens=2)
    events.clear()
    sign = tmp_path / "was-here"
    text = f"$(touch {sign}); `touch {sign}`; __import__('os').system('touch {sign}')"
    fields = ("command", "cmd", "run", "folder", "group", "mode", "session", "sessions", "prompt", "model", "stop")
    talk = [{"role": "user", "content": text, "tool_calls": text}]
    body = {**dict.fromkeys(fields, text), "prompt_ids": [1, 9], "messages": talk, "max_tokens": 2}
    body |= {"version": 1, "digests": {"x": text}}
    asked = {**body, "params": {"max_tokens": 1, "stop": [text]}}
    bodies = [{"json": body}, {"json": asked}, {"content": pickle.dumps(Harm(sign))}]
    answers = []
    for method, path in ROUTES:
        where = re.sub(r"\{(\w+)(:\w+)?\}", lambda m: "1" if m[1] == "version" else "x", path)
        for content in bodies:
            headers = {"birl-run": text.encode().hex()}
            answers.append(engine.http.request(method, where, headers=headers, **content).status_code)
    assert not sign.exists() and events == []
    assert 400 in answers and 200 in answers  # some were refused, some read, none was lost
    assert engine.http.get("/health").status_code == 200


def source(name: str) -> Path:
    return places.ROOT / f"{name.replace('.', '/')}.py"


def imported(module: Path) -> set[str]:
    """The modules of birl.server and birl.engines that one of them imports."""
    packages = ("birl.server", "birl.engines")
    imports = [n for n in ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module in packages}
    return names | {
        node.module for node in imports if node.module and node.module.startswith(("birl.server.", "birl.engines."))
    }


def test_what_answers_requests_cannot_start_anything() -> None:
    """Neither the server of an engine nor the gateway of agents, nor any module of birl.server and birl.engines
    that they import, nor any that the table of dialects names."""
    dialects = [place for places in DIALECTS.values() for place in places]
    todo, reached = ["birl.server.serve", "birl.server.gateway", *dialects], set[str]()
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imported(source(name))
    assert {f"birl.server.{name}" for name in ("native", "openai", "service", "gateway_responses")} <= reached
    bad = {"eval", "exec", "compile", "__import__", "system", "popen", "Popen", "spawn", "fork", "check_output"}
    modules = {"subprocess", "pickle", "marshal", "shelve", "pty"}
    for name in reached:
        for node in ast.walk(ast.parse(source(name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("birl.process"), name
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & modules, name
            if isinstance(node, ast.Call) and ast.unparse(node.func) != "re.compile":
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert called not in bad, f"{name}.py:{node.lineno} calls {called}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", socket.gethostname()])
def test_an_engine_off_loopback_wants_a_token(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is loaded: there is no model."""
    monkeypatch.delenv("BIRL_TOKEN", raising=False)
    with pytest.raises(BirlError, match="BIRL_TOKEN"):
        serve.run(config(tmp_path, host=host))


def test_every_address_wants_the_token(tiny: Path) -> None:
    with running(tiny, token="right") as found:
        for method, path in ROUTES:
            where = re.sub(r"\{(\w+)(:\w+)?\}", lambda m: "1" if m[1] == "version" else "x", path)
            for said in ("", "Bearer wrong", "Bearer", "right"):
                headers = {"authorization": said} if said else {}
                status = httpx.request(method, found.url + where, headers=headers, timeout=20).status_code
                assert (status == 401) != (path in OPEN), (method, path, headers, status)
        assert found.http.get("/info").status_code == 200


async def test_the_gateway_is_on_loopback_and_behind_secrets() -> None:
    gateway = Gateway(None)  # type: ignore[arg-type]
    await gateway.start()
    try:
        assert gateway._server is not None
        (sock,) = [s for server in gateway._server.servers for s in server.sockets]
        assert sock.getsockname()[0] == "127.0.0.1"
        async with httpx.AsyncClient(timeout=10) as http:
            for path in ("/", "/v1/models", "/s//v1/models", "/s/x/v1/models", "/s/x/v1/chat/completions"):
                assert (await http.get(gateway._url + path)).status_code == 404, path
    finally:
        await gateway.close()


def test_engines_of_others_are_started_on_loopback() -> None:
    """Their controls are guarded by no token."""
    common = {"model": "m", "port": 1, "python": "python", "dtype": "bfloat16", "tensor_parallel": 1}
    for words in (vllm_process.command(**common), sglang_process.command(**common, token="", cpu=True)):
        assert words[words.index("--host") + 1] == "127.0.0.1"


REACH = """
import json, socket, sys, urllib.request
port, addresses = int(sys.argv[1]), sys.argv[2:]
reached = []
for address in addresses:
    try:
        with socket.create_connection((address, port), timeout=2):
            reached.append(address)
    except OSError:
        pass
    try:
        urllib.request.urlopen(f"http://{address}:{port}/health", timeout=2).read()
        reached.append("http " + address)
    except OSError:
        pass
print(json.dumps(reached))
"""


def test_a_program_of_a_model_reaches_no_engine(engine: Running) -> None:
    port = str(httpx.URL(engine.url).port)
    words = [port, "127.0.0.1", "localhost", "127.1.2.3", socket.gethostname()]
    plain = subprocess.run([sys.executable, "-I", "-c", REACH, *words], capture_output=True, text=True, timeout=30)
    assert "http 127.0.0.1" in plain.stdout, plain.stderr  # outside of the sandbox it does

    async def main() -> str:
        sandbox = await open_sandbox("auto", workers=1)
        try:
            result = await sandbox.run({"main.py": REACH}, ["python", "main.py", *words], Limits(seconds=20))
            assert result.good, result.stderr
            return result.stdout.decode()
        finally:
            await sandbox.close()

    assert asyncio.run(main()) == "[]\n"
    assert engine.http.get("/health").status_code == 200
