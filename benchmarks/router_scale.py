"""Cost of the real router as the fleet grows: engines and environments are simulated, everything else is the production
code (`birl.engines.router`).

    python -m benchmarks.router_scale [--engines 64 1024 16384] [--open 64] [--requests 100000] [--json FILE]

`--open` episodes per engine are open at once. Each requests answers that take a lognormal time around `--seconds`, one
after the other. The simulated clock stops while any task can run, so that `us a request` is the router's own CPU time
on one core, and `engines at most` = requests a second that it can do x seconds of an answer / open. `start`: until all
engines are ready; `load`: until all have new weights.
"""

import argparse
import asyncio
import json
import random
import resource
import selectors
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from benchmarks.peers import machine
from birl.engines.router import Router
from birl.engines.wire import Info
from birl.models.digests import whole
from birl.types import Completion, Held, SamplingParams, Stop, Update

PARAMS = SamplingParams(max_tokens=8, seed=1)


class Clock(selectors.DefaultSelector):
    """Simulated time, which passes only while all tasks are idle."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


def simulated(main: Coroutine[Any, Any, Any]) -> Any:
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class Engine:
    """Implements `Remote` as far as it is used."""

    def __init__(self, number: int, seconds: float) -> None:
        self.address, self.version, self.seconds = f"http://engine-{number}:8000", 0, seconds
        self.random, self.digest = random.Random(number), "before"

    async def info(self) -> Info:
        return Info(
            **{"engine": "birl", "model": "m", "version": self.version, "digest": self.digest, "dtype": "bfloat16"},
            **{"context": 4096, "vocabulary": 100, "running": 0, "waiting": 0, "paused": False},
            **{"asleep": False, "pid": 1},
        )  # fmt: skip

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        await asyncio.sleep(self.random.lognormvariate(0, 0.5) * self.seconds)
        version = self.version
        return Completion.of((1,) * 8, (0.0,) * 8, (version,) * 8, Stop.LENGTH)

    async def load(self, update: Update) -> Held:
        await asyncio.sleep(1.0)
        self.version = update.version
        self.digest = whole(update.digests)
        return Held(version=update.version, digest=self.digest, seconds=1.0, bytes=0)

    async def close(self) -> None:
        pass


async def measured(engines: int, opened: int, requests: int, seconds: float) -> dict[str, float]:
    made: Any = [Engine(n, seconds) for n in range(engines)]
    router = Router(made, interval=60.0)
    began = time.process_time()
    await router.start(3600.0)
    start = time.process_time() - began
    left = [requests]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def episode(number: int) -> None:
        while left[0] > 0:
            left[0] -= 1
            await router.generate((1, 2, 3), PARAMS, f"episode {number}")

    began = time.process_time()
    await asyncio.gather(*(episode(n) for n in range(min(engines * opened, requests))))
    asked = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    began = time.process_time()
    await router.load(Update(version=1, digests={"w": "1"}, folder="/weights/1"))
    load = time.process_time() - began
    await router.close()
    each = asked / requests
    return {
        "open": min(engines * opened, requests),
        "us_a_request": 1e6 * each,
        "requests_a_second": 1 / each,
        "engines_at_most": seconds / opened / each,
        "kib_an_open_request": memory / min(engines * opened, requests),
        "start_s": start,
        "load_s": load,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", type=int, default=[64, 1024, 16384])
    parser.add_argument("--open", type=int, default=64, help="episodes per engine")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of an answer")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    found = {}
    for engines in args.engines:
        found[engines] = simulated(measured(engines, args.open, args.requests, args.seconds))
        print(f"{engines} engines: " + ", ".join(f"{k} {v:,.4g}" for k, v in found[engines].items()), flush=True)
    if args.json:
        figures = {"name": "router_scale", "engines": found, "seconds": args.seconds, "machine": machine()}
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
