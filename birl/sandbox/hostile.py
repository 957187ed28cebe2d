"""Are hostile programs stopped? Runs all of `attacks.py` in a sandbox, with things outside for them to find."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from birl.sandbox.attacks import ATTACKS, FORGED, FORGERIES, START, Attack
from birl.sandbox.code import cases, run_tests
from birl.sandbox.open import AUTO, open_sandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox

CALM = Limits(seconds=5)


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
        for place in (f"{free}/server", f"\0{free}/server"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(place)
            server.listen()
        (free / "server").chmod(0o777)
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        os.environ["BIRL_HOSTILE_TOKEN"] = token
        stack.callback(os.environ.pop, "BIRL_HOSTILE_TOKEN")
        yield {
            "port": inet.getsockname()[1],
            "path": f"{free}/server",
            "secret": str(secret),
            "token": token,
            "victim": victim.pid,
            "launcher": os.getpid(),
            "folder": str(free),
            "sleep": f"3{int(token[:6], 16):08d}",
        }


async def attack(sandbox: Sandbox, attempt: Attack, facts: dict[str, Any]) -> str:
    """What the attack reached. Empty: it was stopped, nothing of it is left, and the sandbox still works."""
    words = json.dumps({**facts, "token": facts["token"]})
    before = set(Path("/var/tmp").iterdir())
    result = await sandbox.run(
        {"main.py": START + attempt.program}, ["python", "main.py"], attempt.limits, words, attempt.collect
    )
    found = reached(result, attempt, facts)
    if attempt.after:
        second = await sandbox.run({"main.py": attempt.after}, ["python", "main.py"], CALM, words)
        found += [line for line in second.stdout.decode(errors="replace").splitlines() if "BROKEN" in line]
        found += [f"the second program: {second.stderr.decode()[-200:]}"] * (not second.good)
    found += [f"{path} was written" for path in set(Path("/var/tmp").iterdir()) - before]
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
    if result.seconds > attempt.limits.seconds + 1:
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


async def forgeries(sandbox: Sandbox) -> str:
    """Which wrong solutions pass a test. Empty: none, and a right one passes all of them."""
    found = []
    for name, solution in FORGERIES.items():
        report = await run_tests(sandbox, solution, cases(FORGED), CALM)
        found += [f"{name}: {report.share:.0%} passed"] * (report.share > 0)
    right = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"
    report = await run_tests(sandbox, right, cases(FORGED), CALM)
    found += [f"a right solution fails: {v.detail}" for v in report.verdicts if not v.passed]
    return "; ".join(found)


async def table(kinds: tuple[str, ...] = AUTO) -> dict[str, dict[str, str]]:
    """For every attack, what it reached in each kind of sandbox."""
    found: dict[str, dict[str, str]] = {attempt.name: {} for attempt in ATTACKS} | {"forged test results": {}}
    with outside() as facts:
        for kind in kinds:
            sandbox = await open_sandbox(kind, workers=1)
            try:
                for attempt in ATTACKS:
                    found[attempt.name][kind] = await attack(sandbox, attempt, facts)
                found["forged test results"][kind] = await forgeries(sandbox)
            finally:
                await sandbox.close()
    return found


def main(words: list[str]) -> int:
    """Print the table. 0 when everything was stopped."""
    kinds = tuple(words) or AUTO
    found = asyncio.run(table(kinds))
    print(f"| attack | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for name, results in found.items():
        print(f"| {name} | {' | '.join('stopped' if not results[k] else '**not stopped**' for k in kinds)} |")
    broken = [(name, kind, what) for name, results in found.items() for kind, what in results.items() if what]
    for name, kind, what in broken:
        print(f"{kind}: {name}: {what}", file=sys.stderr)
    return 1 if broken else 0
