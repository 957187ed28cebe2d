"""Every hostile program is stopped in every kind of sandbox, and leaves the sandbox at work. Nothing here is skipped: a
machine without bubblewrap, user namespaces or Landlock fails these tests, and the message says what to install."""

import asyncio
import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from birl.sandbox.local import LocalSandbox
from birl.sandbox.open import AUTO, open_sandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox
from tests.sandbox import __main__ as program
from tests.sandbox import hostile
from tests.sandbox.attacks import ATTACKS, START, Attack


@pytest.fixture(scope="module")
def facts() -> Iterator[dict[str, Any]]:
    with hostile.outside() as found:
        yield found


@pytest.fixture(scope="module", params=AUTO)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    opened = asyncio.run(open_sandbox(request.param, workers=1))
    assert opened.kind == request.param
    yield opened
    asyncio.run(opened.close())


def test_every_hostile_program_is_stopped(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, LocalSandbox)
    found = asyncio.run(hostile.all_of(sandbox.kind, sandbox.python))
    assert not {name: what for name, what in found.items() if what}


async def test_the_input_of_an_earlier_run_is_not_in_memory(sandbox: Sandbox) -> None:
    secret = "5ecret-of-the-1st!"  # a multiple of three letters, so that its base64 repeats, too
    encoded = base64.b64encode(secret.encode()).decode()
    program = f"""
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for words in map(str.split, maps):
        low, high = (int(end, 16) for end in words[0].split("-"))
        try:
            memory.seek(low)
            held = memory.read(high - low)
        except (OSError, ValueError, OverflowError):
            continue
        for mark in ({secret[::-1]!r}[::-1].encode(), {encoded[::-1]!r}[::-1].encode()):
            if b"" in held.split(mark)[1:-1]:  # twice in a row; once is this program's own
                print("FOUND")
"""
    files = {"main.py": "print(len(input()))"}
    for _ in range(3):
        assert (await sandbox.run(files, ["python", "main.py"], Limits(), secret * 200)).stdout == b"3600\n"
    result = await sandbox.run({"main.py": program}, ["python", "main.py"], Limits())
    if sandbox.kind == "landlock":
        assert b"Permission denied: '/proc/self/maps'" in result.stderr
    else:
        assert (result.stdout, result.stderr) == (b"", b"")


@pytest.mark.parametrize("name", ["host secrets and environment", "network: loopback, unix, other", "write outside"])
def test_the_same_attack_succeeds_without_a_boundary(facts: dict[str, Any], name: str) -> None:
    """An attack that never worked would be stopped by anything."""

    async def run() -> Result:
        sandbox = await open_sandbox("process", workers=1)
        attack = next(attack for attack in ATTACKS if attack.name == name)
        try:
            program = START + attack.program.replace('"/usr", "/usr/bin", "/etc", "/var/tmp", "/root", "/", ', "")
            program = program.replace('"/usr/bin/env"', 'facts["secret"]')
            return await sandbox.run({"main.py": program}, ["python", "main.py"], Limits(), json.dumps(facts))
        finally:
            await sandbox.close()

    result = asyncio.run(run())
    assert result.ending is Ending.OK and b"BROKEN" in result.stdout and "no boundary" in result.warning


def test_the_table_shows_what_gets_through(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = Attack(name="getting through", program="broken('it is out')")
    monkeypatch.setattr(hostile, "ATTACKS", (attempt,))
    monkeypatch.setattr(hostile, "FORGERIES", {"the right one": "def add(a, b):\n    return 3"})
    assert program.main(["landlock"]) == 1
    printed = capsys.readouterr()
    assert "| getting through | **not stopped** |" in printed.out and "BROKEN: it is out" in printed.err
    assert "the right one: 100% passed" in printed.err
    assert program.main(["process"]) == 2 and "no boundary" in capsys.readouterr().err


def test_a_survivor_is_noticed(facts: dict[str, Any]) -> None:
    facts = {**facts, "sleep": f"3{os.getpid():010d}"}
    process = subprocess.Popen(["sleep", facts["sleep"]])
    time.sleep(0.2)
    found = hostile.survivors(facts)
    process.kill()
    process.wait()
    assert found == [f"process {process.pid} is still there"]


def test_the_table_of_the_docs_has_these_attacks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.partition("| attack |")[2].partition("\n\n")[0].splitlines()]
    assert [row[0] for row in rows[2:]] == [*(attack.name for attack in ATTACKS), "forged test results"]
    assert {cell for row in rows[2:] for cell in row[1:]} == {"stopped"} and len(rows[0]) == len(AUTO)
