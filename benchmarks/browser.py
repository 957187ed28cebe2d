"""Episodes per second of env=miniwob against stock BrowserGym, on the same tasks, seeds and actions, in turns.

    python -m benchmarks.browser --rounds 3

Both sides run in `--workers` processes. Stock is BrowserGym as its documentation shows it: `gymnasium.make`, reset,
step, close, with its defaults (a browser for each episode and one for its chat, 0.5 s before each observation, the
task's slow motion). `--browser` is the same program for both.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import verdict
from birl.config.schema import Env
from birl.envs.browser.env import interpreter, program
from birl.envs.open import World, open_world
from birl.types import Message, Task

TASKS = ("click-test", "click-button", "click-link", "enter-text")
ACTION = "click('13')"
GOAL = 4.0

# Run in BrowserGym's own environment. Playwright finds Debian's Chromium in the place of its own.
STOCK = """
import json, os, sys, time
import miniwob
os.environ["MINIWOB_URL"] = "file://" + os.path.join(os.path.dirname(miniwob.__file__), "html", "miniwob") + "/"
import gymnasium, browsergym.miniwob
episodes = json.loads(sys.argv[1])
def play(task, seed):
    env = gymnasium.make(f"browsergym/miniwob.{task}")
    env.reset(seed=seed)
    reward = env.step(ACTION)[1]
    env.close()
    return reward
play(*episodes[0])
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([play(*e) for e in episodes]), flush=True)
"""


def stock(episodes: list[tuple[str, int]], workers: int, python: str, browsers: str) -> tuple[float, list[float]]:
    """Episodes per second after all processes are ready, and the rewards."""
    parts = [episodes[i::workers] for i in range(workers)]
    processes = [
        subprocess.Popen(
            [python, "-c", STOCK.replace("ACTION", repr(ACTION)), json.dumps(part)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PLAYWRIGHT_BROWSERS_PATH": browsers},
        )
        for part in parts
    ]
    for p in processes:
        assert p.stdout is not None
        if p.stdout.readline().strip() != "ready":
            raise SystemExit("stock BrowserGym did not start")
    start = time.perf_counter()
    for p in processes:
        assert p.stdin is not None
        p.stdin.write("\n")
        p.stdin.flush()
    found = [json.loads(p.communicate()[0]) for p in processes]
    seconds = time.perf_counter() - start
    rewards = {e: r for part, values in zip(parts, found, strict=True) for e, r in zip(part, values, strict=True)}
    return len(episodes) / seconds, [rewards[e] for e in episodes]


async def ours(episodes: list[tuple[str, int]], workers: int, options: dict[str, str]) -> tuple[float, list[float]]:
    world = await open_world(Env(kind="miniwob", options={"workers": str(workers), **options}), lambda prompt: "")

    async def play(task: str, seed: int) -> float:
        env: Any = world.open(Task(id=task, prompt="", columns={"task": task, "seed": seed}))
        try:
            await env.start()
            return (await env.step(Message(role="assistant", content=ACTION))).reward
        finally:
            await env.close()

    async def warm(world: World) -> None:
        await asyncio.gather(*(play(*episodes[0]) for _ in range(2 * workers)))

    try:
        await warm(world)
        start = time.perf_counter()
        rewards = await asyncio.gather(*(play(*e) for e in episodes))
        return len(episodes) / (time.perf_counter() - start), rewards
    finally:
        await world.close()


def as_playwrights(browser: str, folder: Path) -> str:
    """A folder where Playwright 1.44 finds `browser` as its own Chromium."""
    place = folder / "chromium-1117" / "chrome-linux"
    place.mkdir(parents=True, exist_ok=True)
    (place / "chrome").unlink(missing_ok=True)
    (place / "chrome").symlink_to(browser)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--episodes", type=int, default=16, help="of stock in each round; birl plays three times as many"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--browser", default="", help="Chromium's program, for both sides")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    browser, python = program(args.browser), interpreter("")
    few = [(TASKS[i % len(TASKS)], i) for i in range(args.episodes)]
    many = [(TASKS[i % len(TASKS)], i) for i in range(3 * args.episodes)]
    found: dict[str, list[float]] = {"ours": [], "stock": []}
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"birl-stock-browser-{os.getpid()}"
    try:
        browsers = as_playwrights(browser, folder)
        for number in range(args.rounds):
            speed, rewards = asyncio.run(ours(many, args.workers, {"browser": browser}))
            theirs, expected = stock(few, args.workers, python, browsers)
            if rewards[: len(few)] != expected:
                raise SystemExit(f"the rewards differ: {rewards[: len(few)]} and {expected}")
            found["ours"].append(speed)
            found["stock"].append(theirs)
            print(f"round {number + 1}: ours {speed:.2f} stock {theirs:.2f} episodes/s", flush=True)
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=False)
    details = {"browser": browser, "workers": args.workers, "episodes": args.episodes}
    sys.exit(
        verdict(
            "browser",
            found["ours"],
            found["stock"],
            goal=args.goal,
            unit="episodes/s",
            lower_is_better=False,
            json_file=args.json,
            details=details,
        )
    )


if __name__ == "__main__":
    main()
