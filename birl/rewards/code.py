"""Unit-test reward: runs programs in a sandbox, which lives as long as the worker process."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from birl.config.schema import Sandbox as Keys
from birl.errors import BirlError
from birl.rewards.text import THOUGHT
from birl.sandbox.code import Case, cases, last_block, run_tests
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Limits, Sandbox

_open: dict[tuple[Any, ...], Sandbox] = {}


async def code(
    completions: list[str],
    tests: Sequence[Any],
    partial: bool = True,
    sandbox: Mapping[str, Any] | None = None,
    **_: Any,
) -> list[float]:
    """Fraction of the row's `tests` that the answer's program passes; 0 without a program. `partial` False: 1 if it
    passes all, else 0. The program is the last ```python block after the thinking.

    Example: await code(["```python\nprint(input())\n```"], tests=[[{"input": "7", "output": "7"}]]) == [1.0]
    """
    keys = Keys(**(sandbox or {}))
    for index, test in enumerate(tests):
        if test is None:
            raise BirlError(f"tests is None for completion {index}: `code` needs the row's column `tests`.")
    wanted = [cases(test) for test in tests]
    programs = [last_block(THOUGHT.sub("", completion)) for completion in completions]
    opened = await _sandbox(keys)
    lanes = asyncio.Semaphore(max(1, keys.workers))
    at_once = max(1, keys.workers // max(1, sum(map(bool, programs))))

    async def share(program: str, own: list[Case]) -> float:
        if not program.strip():
            return 0.0
        async with lanes:
            limits = replace(Limits(), seconds=keys.seconds, memory_mb=keys.memory_mb)
            report = await run_tests(opened, program, own, limits, seconds=keys.total_seconds, at_once=at_once)
        return report.share if partial else float(report.share == 1)

    return list(await asyncio.gather(*map(share, programs, wanted)))


def prepare(sandbox: Mapping[str, Any] | None = None, **_: Any) -> None:
    """Run the trial runs of the sandbox before the first call: no call's deadline is long enough for them. If they
    fail, the calls report the error."""
    keys = Keys(**(sandbox or {}))

    async def run() -> None:
        await (await open_sandbox(keys.kind, workers=1)).close()

    with contextlib.suppress(BirlError):
        asyncio.run(run())


async def _sandbox(keys: Keys) -> Sandbox:
    """The sandbox, opened once in each worker process. When the process ends, in any way, everything in it ends too."""
    wanted = (keys.kind, keys.workers)
    if wanted not in _open:
        _open[wanted] = await open_sandbox(keys.kind, workers=keys.workers)
    return _open[wanted]
