"""`birl rl` with waits: slow environments, answers of very different lengths.

    python -m benchmarks.uneven --wait 0.1 5 --tokens 64 rl data.train=... steps=8

The words after the options are passed to `birl`. Two parts are replaced in this process: every answer gets a random
length (lognormal around `--tokens`, exactly, as end tokens are ignored), and its environment answers after a random
time. Both depend only on the episode, so that compared runs have the same ones. After every step a line of
`engine.jsonl` in the run folder records what the engine has computed so far.

Standard library only above `main`: the reward worker imports this file.
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from typing import Any


def noise(completions: list[str], **_: Any) -> list[float]:
    """0 or 1, by the answer's text: every group has a gradient, but there is nothing to learn."""
    return [float(hashlib.blake2b(c.encode(), digest_size=1).digest()[0] % 2) for c in completions]


def letters(completions: list[str], **_: Any) -> list[float]:
    """Share of the letter a: learned in a few steps even by a random model."""
    return [c.count("a") / max(len(c), 1) for c in completions]


def length(seed: int, tokens: int, sigma: float, longest: int) -> int:
    """Length of an answer [tokens]."""
    return min(max(round(random.Random(seed).lognormvariate(log(tokens), sigma)), 1), longest)


def install(args: argparse.Namespace) -> None:
    from birl.envs import open as envs
    from birl.envs.single_turn import SingleTurn
    from birl.rollout.session import Session
    from birl.train import rl
    from birl.types import Feedback, Message

    generates, finishes = Session._generate, rl.Loop.finish_step

    async def generate(session: Any, engine: Any, prompt: tuple[int, ...], params: Any) -> Any:
        if args.tokens:
            own = length(params.seed, args.tokens, args.sigma, args.longest)
            params = replace(params, max_tokens=own, ignore_eos=True)
        completion = await generates(session, engine, prompt, params)
        waits.seconds = random.Random(params.seed + 1).uniform(*args.wait)  # read before anybody else runs
        return completion

    class waits(SingleTurn):
        seconds = 0.0

        async def step(self, reply: Message) -> Feedback:
            if seconds := waits.seconds:
                await asyncio.sleep(seconds)
            return await super().step(reply)

    async def finish_step(loop: Any, metrics: dict[str, float], reported: float) -> None:
        remotes = getattr(loop.parts.engine, "remotes", None)
        if remotes is None:
            totals = [asdict(loop.parts.engine.counters)]
        else:
            totals = [(await remote.info()).counters for remote in remotes.values()]
        sums = {key: sum(t[key] for t in totals) for key in ("seconds", "tokens", "prefilled")}
        row = {"step": loop.run.step, **sums}
        with (Path(loop.parts.run) / "engine.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        await finishes(loop, metrics, reported)

    Session._generate, envs.SingleTurn, rl.Loop.finish_step = generate, waits, finish_step  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", nargs=2, type=float, default=(0.0, 0.0), metavar=("LEAST", "MOST"), help="[s]")
    parser.add_argument("--tokens", type=int, default=0, help="median length of an answer; 0: as the model ends it")
    parser.add_argument("--sigma", type=float, default=0.0, help="of the logarithm of the length; 0: all are equal")
    parser.add_argument("--longest", type=int, default=512, help="longest answer")
    args, words = parser.parse_known_args()
    from birl.cli import main as birl

    install(args)
    return birl(words)


if __name__ == "__main__":
    sys.exit(main())
