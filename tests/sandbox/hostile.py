"""Are hostile programs stopped? Runs all of `attacks.py` and `forgeries.py`, with things outside for them to find."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from birl.sandbox.code import cases, run_tests
from birl.sandbox.local import LocalSandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox
from tests.sandbox.attacks import ATTACKS, START, Attack
from tests.sandbox.forgeries import FORGERIES, RIGHT, tests_for

CALM = Limits(seconds=60, cpu_seconds=60)  # of programs that do nothing: no verdict depends on the machine's speed
FORGED = "forged test results"
LANES = 4  # programs at once; many of them wait


@contextlib.contextmanager
def outside() -> Iterator[dict[str, Any]]:
    """Servers, a secret, a token in the environment, a process to kill and a folder to write to; and where they are."""
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="birl-outside-")))
        secret = folder / "secret"
        secret.write_text(token)
        secret.chmod(0o600)
        free = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="birl-free-", dir="/var/tmp")))
        free.chmod(0o1777)
        inet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for kind, name in ((socket.SOCK_STREAM, "server"), (socket.SOCK_DGRAM, "server-dgram")):
            for place in (f"{free}/{name}", f"\0{free}/{name}"):
                server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
                server.bind(place)
                if kind == socket.SOCK_STREAM:
                    server.listen()
            (free / name).chmod(0o777)
        os.environ["BIRL_HOSTILE_TOKEN"] = token
        stack.callback(os.environ.pop, "BIRL_HOSTILE_TOKEN", None)
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        yield {
            "port": inet.getsockname()[1],
            "path": f"{free}/server",
            "secret": str(secret),
            "token": token,
            "victim": victim.pid,
            "launcher": os.getpid(),
            "folder": str(free),
        }


async def attack(sandbox: Sandbox, attempt: Attack, facts: dict[str, Any]) -> str:
    """What the attack reached. Empty: it was stopped, nothing of it is left, and the sandbox still works. Safe beside
    others in other sandboxes."""
    facts = {**facts, "sleep": f"3{secrets.randbelow(10**10):010d}"}
    words = json.dumps(facts)
    result = await sandbox.run(
        {"main.py": START + attempt.program}, ["python", "main.py"], attempt.limits, words, attempt.collect
    )
    found = reached(result, attempt, facts)
    if attempt.after:
        second = await sandbox.run({"main.py": attempt.after}, ["python", "main.py"], CALM, words)
        found += [line for line in second.stdout.decode(errors="replace").splitlines() if "BROKEN" in line]
        found += [f"the second program: {second.detail} {second.stderr.decode()[-200:]}"] * (not second.good)
    left = {path.name for path in Path(facts["folder"]).iterdir()} - {"server", "server-dgram"}
    found += [f"{facts['folder']}/{name} was written" for name in left]
    after = await sandbox.run({"main.py": "print(6 * 7)"}, ["python", "main.py"], CALM)
    if not after.good or after.stdout != b"42\n":
        found.append(f"afterwards nothing runs: {after.detail} {after.stderr.decode(errors='replace')[-200:]}")
    return "; ".join(found)


def reached(result: Result, attempt: Attack, facts: dict[str, Any]) -> list[str]:
    found = [line for line in result.stdout.decode(errors="replace").splitlines() if line.startswith("BROKEN")]
    if result.ending is Ending.ERROR:
        found.append(f"the sandbox failed: {result.detail}")
    if attempt.endings and result.ending not in attempt.endings:
        found.append(f"ended as {result.ending}, exit code {result.exit_code}")
    if result.seconds > attempt.limits.seconds + 10:
        found.append(f"took {result.seconds:.1f} s")
    if max(len(result.stdout), len(result.stderr)) > attempt.limits.output_bytes:
        found.append("more output than allowed")
    if not attempt.endings and b"Traceback" in result.stderr and b"MemoryError" not in result.stderr:
        found.append(f"the attack itself failed: {result.stderr.decode(errors='replace')[-300:]}")
    found += [f"{name} was collected" for name in result.files]
    found += survivors(facts)
    return found


def survivors(facts: dict[str, Any]) -> list[str]:
    """Daemons that are still there, and the victim where it is not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if facts["sleep"].encode() in path.read_bytes():
                found.append(f"process {path.parent.name} is still there")
                os.kill(int(path.parent.name), 9)
    if Path(f"/proc/{facts['victim']}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
        found.append("the victim was killed")
    return found


async def forgery(sandbox: Sandbox, name: str) -> str:
    """How much of a test a wrong solution passes. Empty: nothing. `RIGHT`: how it fails."""
    if name == RIGHT:
        report = await run_tests(sandbox, RIGHT, cases(tests_for(RIGHT)), CALM)
        return "; ".join(f"a right solution fails: {v.detail}" for v in report.verdicts if not v.passed)
    solution = FORGERIES[name]
    report = await run_tests(sandbox, solution, cases(tests_for(solution)), Limits(seconds=5))
    return f"{name}: {report.share:.0%} passed" if report.share else ""


async def all_of(kind: str, python: str) -> dict[str, str]:
    """For every attack, and for all forgeries together, what it reached in this kind of sandbox: empty, it was stopped.
    What reached something is tried once more, alone."""
    with outside() as facts:
        tries: dict[str, Callable[[Sandbox], Awaitable[str]]] = {
            **{one.name: lambda sandbox, one=one: attack(sandbox, one, facts) for one in ATTACKS},
            **{name: lambda sandbox, name=name: forgery(sandbox, name) for name in (*FORGERIES, RIGHT)},
        }
        # the lanes take from the end: what waits is begun first
        left = sorted(tries, key=lambda name: any("timeout" in one.endings for one in ATTACKS if one.name == name))
        found: dict[str, str] = {}

        async def lane() -> None:
            async with LocalSandbox(kind, python=python, workers=1) as sandbox:
                while left:
                    name = left.pop()
                    found[name] = await tries[name](sandbox)

        await asyncio.gather(*(lane() for _ in range(LANES)))
        async with LocalSandbox(kind, python=python, workers=1) as sandbox:
            for name in [name for name, what in found.items() if what]:
                found[name] = await tries[name](sandbox)
    forged = "; ".join(filter(None, (found[name] for name in (*FORGERIES, RIGHT))))
    return {**{one.name: found[one.name] for one in ATTACKS}, FORGED: forged}
