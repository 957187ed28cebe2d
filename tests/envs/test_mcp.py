"""Tools of MCP servers, for any environment: an episode has its own session, and a server can at most fail it."""

import asyncio
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from birl.config.schema import Env as Keys
from birl.envs.mcp.tools import Servers, servers_of
from birl.envs.mcp.transport import Command, over_pipes
from birl.envs.open import check_world, open_world
from birl.errors import BirlError
from birl.process import free_port
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits
from birl.text.chat import Chat
from birl.types import Message, Outcome, Task, Trajectory
from tests.rollout.scripted import Scripted, session
from tests.tiny import tiny_tokenizer

SERVER = f"python {shlex.quote(str(Path(__file__).with_name('mcp_server.py')))}"
TASK = Task(id="t", prompt=(Message(role="user", content="Say it."),), answer="7")

#: a server as people write them
SHOP = """
import sys
from fastmcp import FastMCP

shop, sold = FastMCP("shop"), []

@shop.tool
def price(fruit: str) -> dict[str, int]:
    "The price of a fruit."
    return {"cents": {"apple": 30, "pear": 50}[fruit]}

@shop.tool
def buy(fruit: str) -> str:
    "Buys a fruit."
    sold.append(fruit)
    return ", ".join(sold)

if sys.argv[1:]:
    shop.run(transport="http", host="127.0.0.1", port=int(sys.argv[1]), show_banner=False)
else:
    shop.run(show_banner=False)
"""


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(episodes: Sequence[Sequence[str]], kind: str = "single_turn", **keys: Any) -> list[tuple[Trajectory, str]]:
    """Episodes at once, by what the model says in each, with the last prompt that it saw."""
    config = Keys(kind=kind, **{"mcp_sandbox": "none", "mcp_timeout": 60.0, **keys})

    async def main() -> list[tuple[Trajectory, str]]:
        chat = Chat(tiny_tokenizer())
        world = await open_world(config, chat.text)
        assert world.turns

        async def one(answers: Sequence[str]) -> tuple[Trajectory, str]:
            engine = Scripted(answers, chat)
            told = await run_episode(world.open(TASK), session(engine, Limits(timeout=120.0), tokens=400))
            return told, chat.decode(engine.prompts[-1]) if engine.prompts else ""

        result = await asyncio.gather(*map(one, episodes))
        await world.close()
        return list(result)

    return asyncio.run(main())


def test_a_call_is_answered_in_the_episodes_own_session() -> None:
    once, twice = play(
        [[called("echo", text="hello"), "Done."], [called("echo", text="a") + called("echo", text="b"), "Done."]],
        mcp=[SERVER],
    )
    for result, _ in (once, twice):
        assert (result.outcome, result.reward, len(result.turns)) == (Outcome.OK, 0.0, 2), result.detail
    assert "Repeats a text, for nobody." in once[1] and "1: hello" in once[1]
    assert "1: a" in twice[1] and "2: b" in twice[1]
    assert [dict(result.parts) for result, _ in (once, twice)] == [
        {"mcp/calls": calls, "mcp/refused": 0.0} for calls in (1.0, 2.0)
    ]
    assert not [p for p in psutil.Process().children(recursive=True) if "mcp_server" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("call", "seen", "refused"),
    [
        (called("echo", text="fail"), "Error: there is none", 1),
        (called("echo", text="refuse"), "Error: text must be longer", 1),
        (called("other"), "Error: there is no tool other; there are echo.", 1),
        (called("echo", text="picture"), "(not text: image/png)", 0),
        (called("echo", text="long"), "aaaa\n(19943 more characters)", 0),
        (called("echo", text="video"), "(not text: video)\n(a resource: file:///a)", 0),
        (called("echo", text="last"), "1: last", 0),  # it ends with its answer
    ],
)
def test_the_model_is_told_what_came_of_its_call(call: str, seen: str, refused: int) -> None:
    ((result, prompt),) = play([[call, "Done."]], mcp=[SERVER], mcp_longest=60)
    assert result.outcome is Outcome.OK and seen in prompt, result.detail
    assert result.parts["mcp/refused"] == refused


@pytest.mark.parametrize(
    ("text", "seconds", "detail"),
    [
        ("die", 60.0, "it ended with exit code 3: the disk is full"),
        ("hang", 1.0, r"it did not answer a call of echo within 1 s \(env.mcp_timeout\)"),
        ("flood", 60.0, "it sent a message of more than 8 MiB"),
        ("break", 60.0, "it did not answer a call of echo: McpError: the database is gone"),
        ("broken", 60.0, "it sent what is no message of MCP: Invalid JSON: .*"),
        ("close", 60.0, "it closed its standard output"),
        ("leave", 60.0, "it ended with exit code 4"),  # a process that it started holds its output open
    ],
)
def test_a_server_that_fails_fails_its_episode_with_the_cause(text: str, seconds: float, detail: str) -> None:
    bad, good = play([[called("echo", text=text), "x"], ["Done."]], mcp=[SERVER], mcp_timeout=seconds)
    assert bad[0].outcome is Outcome.ENV_ERROR and bad[0].reward != bad[0].reward
    assert re.fullmatch(rf"env.mcp: {re.escape(SERVER)}: {detail}\.", bad[0].detail), bad[0].detail
    assert good[0].outcome is Outcome.OK


def test_what_nobody_asked_for_is_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    ((result, prompt),) = play([[called("echo", text="noise"), "Done."]], mcp=[SERVER])
    assert result.outcome is Outcome.OK and "1: noise" in prompt, result.detail
    assert "validat" not in "".join(capfd.readouterr())  # the client's logs


def test_no_process_of_a_server_is_left() -> None:
    ((result, _),) = play([[called("echo", text="stray"), "Done."]], mcp=[SERVER])
    assert result.outcome is Outcome.OK, result.detail
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if "stray of mcp_s" in str(p.info["cmdline"])]


OWN = """
from birl.text.schema import tool
from birl.types import Feedback, Message

def double(number: int) -> str:
    '''Doubles a number.

    Args:
        number: It.
    '''
    return str(2 * number)

class Own:
    tools = (tool(double),)
    def start(self): return (Message(role="user", content="Double."),)
    def step(self, reply):
        told = tuple(Message(role="tool", content="from the environment", name=c.name) for c in reply.tool_calls)
        return Feedback(messages=told, reward=1.0, done=not told)

def asks(task, base_url): return 1.0
"""


def test_an_environment_answers_its_own_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_tools.py").write_text(OWN)
    both = called("double", number=2) + called("echo", text="b")
    ((result, prompt),) = play([[both, "Done."]], kind="own_tools.py:Own", mcp=[SERVER])
    assert (result.outcome, result.reward) == (Outcome.OK, 2.0), result.detail
    assert "Doubles a number." in prompt and "Repeats a text" in prompt
    assert prompt.index("1: b") < prompt.index("from the environment")
    monkeypatch.setenv("BIRL_TEST_TOOL", "double")
    with pytest.raises(BirlError, match=r"env.mcp: .* has a tool double, as the environment has\."):
        play([["Done."]], kind="own_tools.py:Own", mcp=[SERVER])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mcp": [""]}, "env.mcp: an entry is empty"),
        ({"mcp": ["python 'x"]}, "env.mcp: python 'x: No closing quotation"),
        ({"mcp": ["no-such-program --x"]}, "env.mcp=no-such-program --x: there is no program no-such-program"),
        ({"mcp": ["python gone.py"]}, "env.mcp=python gone.py: there is no file gone.py in"),
    ],
)
def test_a_wrong_entry_is_refused_before_anything_starts(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BirlError, match=said):
        check_world(Keys(**keys))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mcp": ["python -c 'raise SystemExit(4)'"]}, "it ended with exit code 4"),
        ({"mcp": ["python -c 'import time; time.sleep(99)'"], "mcp_timeout": 0.5}, "it did not begin within 0.5 s"),
        ({"mcp": [SERVER, SERVER + " again"]}, r"both have a tool echo"),
        ({"mcp": [SERVER + " twice"]}, r"twice has two of the tool echo"),
        ({"mcp": [SERVER + " bare"]}, r"it did not list its tools: tools.0.inputSchema: Field required"),
        ({"mcp": [SERVER + " old"]}, r"it did not begin: RuntimeError: Unsupported protocol version from the server"),
        ({"mcp": [SERVER + " endless"]}, "or 100 pages of them"),
        ({"mcp": ["http://127.0.0.1:9/mcp"]}, "env.mcp: http://127.0.0.1:9/mcp: ConnectError"),
        ({"mcp": [SERVER], "kind": "own_tools.py:asks"}, "env.kind=own_tools.py:asks is an agent"),
    ],
)
def test_a_server_that_does_not_work_ends_the_run_at_once(
    keys: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_tools.py").write_text(OWN)
    with pytest.raises(BirlError, match=said):
        play([["Done."]], **keys)


async def test_a_session_that_is_cancelled_while_it_ends_leaves_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transport was collected after the loop, in the middle of anything else, with an error there."""
    started: list[Any] = []
    start = asyncio.create_subprocess_exec

    async def noted(*words: str, **more: Any) -> asyncio.subprocess.Process:
        started.append(await start(*words, **more))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    holder, there = (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'], start_new_session=True)",
        tmp_path / "there",
    )
    words = [sys.executable, "-c", f"import subprocess, sys, time\n{holder}\nopen({str(there)!r}, 'w')\ntime.sleep(99)"]

    async def session(begun: asyncio.Event) -> None:
        command = Command(words=words, mark="BIRL_TEST=cancelled", environment=os.environ, folder=str(tmp_path))
        async with over_pipes(command, asyncio.get_running_loop().create_future()):
            begun.set()
            await asyncio.sleep(99)

    begun = asyncio.Event()
    task = asyncio.create_task(session(begun))
    await begun.wait()
    while not there.exists():
        await asyncio.sleep(0.01)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert started[0]._transport.is_closing()


def test_a_confined_server_reaches_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_TEST_USER", "somebody")
    told = {}
    for kind in ("bubblewrap", "landlock", "none"):
        try:
            servers = asyncio.run(servers_of(Keys(mcp=[f"{SERVER} probe"], mcp_sandbox=kind, mcp_timeout=60.0)))
            told[kind] = servers.tools[0]["function"]["description"]
        except BirlError as error:
            told[kind] = str(error)
    assert told.pop("none") == "Repeats a text, for somebody. It could read, write, connect."
    works = {text for text in told.values() if "does not work on this machine" not in text}
    assert works <= {"Repeats a text, for nobody. It could nothing."}, told
    if not works:
        assert not os.environ.get("CI"), told
        pytest.skip(str(told))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    pytest.importorskip("fastmcp")
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path / "shop.py"


@contextmanager
def served(shop: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    child = subprocess.Popen([sys.executable, str(shop), str(port)], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "running on" in line:
            break
    try:
        yield f"http://127.0.0.1:{port}/mcp", child
    finally:
        child.kill()
        child.communicate()


def test_real_servers_of_fastmcp(shop: Path) -> None:
    with served(shop) as (address, _):
        for row in (f"python {shop}", address):
            (good, prompt), (told, wrong) = play(
                [
                    [called("price", fruit="apple"), called("buy", fruit="pear"), "Done."],
                    [called("price", fruit="stone"), "Done."],
                ],
                mcp=[row],
            )
            assert good.outcome is told.outcome is Outcome.OK, (good.detail, told.detail)
            assert '{"cents":30}' in prompt and re.search(r"tool_response>\npear\n", prompt), prompt
            assert "Error: Error calling tool 'price'" in wrong


def test_an_address_that_goes_away_fails_the_episode(shop: Path) -> None:
    async def main(address: str, child: subprocess.Popen[str]) -> None:
        connection = Servers(rows=[address], seconds=60.0, longest=100).connection(0)
        await connection.start()
        child.kill()
        child.wait()
        try:
            await connection.call("price", {"fruit": "apple"})
        finally:
            await connection.close()

    said = r"env.mcp: http://127.0.0.1:\d+/mcp: (ConnectError|ReadError|RemoteProtocolError)"
    with served(shop) as (address, child), pytest.raises(BirlError, match=said):
        asyncio.run(main(address, child))


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, with JSON: compressed below /gzip, elsewhere than asked below /moved."""
    with suppress(asyncio.IncompleteReadError):  # the client has closed
        while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
            path, size = head.split()[1], re.search(r"content-length: (\d+)", head)
            asked = json.loads(await reader.readexactly(int(size[1]))) if size and int(size[1]) else {}
            moved, first = path.startswith("/moved") and not path.endswith("/"), asked.get("method") == "initialize"
            packed = path.startswith("/gzip") and not first
            begun = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}}
            result = begun if first else {"content": [{"type": "text", "text": "here"}]}
            body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode()
            body = b"" if moved or "id" not in asked else gzip.compress(body) if packed else body
            status = "307 X" if moved else "200 X" if body else "202 X"
            more = f"location: {path}/\r\n" * moved + "content-encoding: gzip\r\n" * packed
            about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{more}"
            writer.write(f"HTTP/1.1 {status}\r\n{about}\r\n".encode() + body)


def test_compressed_answers_are_refused_and_redirections_followed() -> None:
    """Only the bytes that came were counted: 100 KB were 100 MB. A redirection, as from /mcp to /mcp/, was an error."""

    async def main() -> None:
        server = await asyncio.start_server(answered, "127.0.0.1")
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers = Servers(rows=[f"{address}/moved/mcp", f"{address}/gzip/mcp"], seconds=60.0, longest=100)
        moved, packed = servers.connection(0), servers.connection(1)
        try:
            await asyncio.gather(moved.start(), packed.start())
            assert (await moved.call("echo", {})).content[0]["text"] == "here"
            with pytest.raises(BirlError, match=r"it compressed an answer \(gzip\), which it was not asked for"):
                await packed.call("echo", {})
        finally:
            await asyncio.gather(moved.close(), packed.close())
            server.close()

    asyncio.run(main())
