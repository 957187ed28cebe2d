"""A real run to which everything happens that happens to runs: `python -m tests.chaos.chaos --seed 0 --seconds 180`.

`birl rl` with two engines is started, and started again whenever it has ended before its time. Meanwhile its processes
are killed, frozen, cut off from the disk and from each other. In the end everything in `invariants.py` must hold.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from birl.rollout.ledger import audit
from tests.chaos.events import kinds
from tests.chaos.invariants import broken
from tests.chaos.processes import forked, preload, started
from tests.chaos.watched import BOUND, GROUP, Watched


class Chaos:
    """One run, for which see `Watched`, and what is done to it."""

    def __init__(self, root: Path, seed: int, steps: int, **keys: Any) -> None:
        self.run = Watched(root, seed, steps, **keys)
        self.kinds = kinds(self.run)
        self.events: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def happen(self, kind: str) -> bool:
        """Says whether there was a chance to."""
        detail = self.kinds[kind]()
        done = detail is not None
        (self.events if done else self.missed)[kind] += 1
        self.run.tell(f"{kind}: {detail}" if done else f"({kind}: no chance)")
        return done

    def go(self, seconds: float) -> None:
        """Until the run is finished or the time is over; then it is told to stop, and must."""
        deadline, deck = time.monotonic() + seconds, []
        while not self.run.finished and time.monotonic() < deadline:
            if self.run.vain == 3:
                self.run.problems.append("three lives in a row ended with a message before their first step")
                return
            pause = self.run.rng.uniform(0.5, 4)
            if not self.run.trains() or self.run.until(lambda: time.monotonic() > deadline, pause):
                continue
            deck = deck or self.run.rng.sample(sorted(self.kinds), len(self.kinds))
            self.happen(deck.pop())
            self.run.until(lambda: False, 0.3)
        self.run.finish()

    def check(self) -> list[str]:
        """Everything that must hold, once all processes are gone."""
        parts = [
            str(p) for p in (*self.run.folder.glob("weights/.v*.part"), *self.run.folder.glob("checkpoints/*.part"))
        ]
        return self.run.problems + broken(self.run.folder, BOUND, GROUP) + [f"{p} was left behind" for p in parts]

    def summary(self) -> str:
        width = 36
        rows = [f"{'event':<{width}}   done  no chance"]
        rows += [f"  {kind:<{width - 2}} {self.events[kind]:6} {self.missed[kind]:10}" for kind in self.kinds]
        rows += [f"{'the learner was':<{width}}"] + [
            f"  {what:<{width - 2}} {n:6}" for what, n in self.run.ends.items()
        ]
        if not (self.run.folder / "ledger.jsonl").exists():
            return "\n".join([*rows, "no step was made"])
        found = audit(self.run.folder)
        rows += [f"{'tokens':<{width}}"] + [f"  {why:<{width - 2}} {n:6,}" for why, n in found.tokens.most_common()]
        rows += [f"  {'sampled':<{width - 2}} {found.sampled:6,}", f"lives {self.run.lives}, steps {self.run.step}"]
        return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--attach", action="store_true", help="engines of our own behind proxies that misbehave")
    parser.add_argument("--fork", action="store_true", help="start processes as forks of one that has imported torch")
    parser.add_argument("--method", choices=("reload", "shared", "volume", "direct", "nccl"), default="reload")
    parser.add_argument("--run", type=Path, help="an empty folder for everything; else a temporary one")
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error("it looks at processes in /proc, which only Linux has")
    if args.run and args.run.exists() and any(args.run.iterdir()):
        parser.error(f"--run {args.run} is not empty")
    root = (args.run or Path(tempfile.mkdtemp(prefix="birl-chaos-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    if args.fork:
        preload()
    chaos = Chaos(
        root,
        args.seed,
        args.steps,
        attach=args.attach,
        method=args.method,
        begin=forked if args.fork else started,
        say=lambda text: print(text, flush=True),
    )
    try:
        chaos.go(args.seconds)
    except KeyboardInterrupt:
        print(f"interrupted; what there is of the run is in {root}", file=sys.stderr)
        return 130
    finally:
        chaos.run.close()
    problems = chaos.check()
    print(f"\n{chaos.summary()}\n")
    for problem in problems:
        print(f"BROKEN: {problem}")
    print(f"seed {args.seed}: {f'{len(problems)} problems, see {root}' if problems else 'everything holds'}")
    if not problems and not args.run:
        shutil.rmtree(root)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
