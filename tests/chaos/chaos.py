"""A real run to which everything happens that happens to runs: `python -m tests.chaos.chaos --seed 0 --seconds 180`.

`birl rl` with two engines is started, and started again whenever it has ended before its time. Meanwhile its processes
are killed, frozen, cut off from the disk and from each other. In the end everything in `invariants.py` must hold.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from birl.loops.ledger import audit
from birl.serve.process import free_port
from tests.chaos.invariants import broken
from tests.chaos.processes import Child, Server, Start, about, forked, kill, no_room, preload, room, servers_of, started
from tests.chaos.proxy import Proxy
from tests.tiny import tiny_model_folder

REWARD = """
def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""
GROUP, BOUND, SYNC = 3, 2, 30.0  # episodes, steps, seconds for an update
NO_STEP = 150.0  # seconds without a step that are too many, whatever happens


def given(root: Path) -> Path:
    """Model, data and reward of a run; the folder of the model."""
    (root / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"What is {i} + {i % 3}?", "answer": str(i + i % 3)} for i in range(40)]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_model_folder(root / "model")


def command(root: Path, steps: int, *more: str) -> list[str]:
    return [
        "rl",
        f"model.path={root}/model",
        "model.dtype=bfloat16",
        f"data.train={root}/data.jsonl",
        f"reward.functions={root}/reward.py:digits",
        "rollout.prompts=2",
        f"rollout.group_size={GROUP}",
        "rollout.max_tokens=40",
        f"rollout.max_staleness={BOUND}",
        "rollout.timeout=120",
        "rollout.max_failure_rate=0.9",
        "engine.kind=birl",
        f"weights.timeout={SYNC}",
        "optimizer.lr=1e-3",
        "checkpoint.every=2",
        "checkpoint.keep_last=3",
        "validation.every=0",
        f"steps={steps}",
        "watchdog=90",
        "track.tensorboard=false",
        "track.report=false",
        "track.console=plain",
        "threads=1",
        f"run={root}/run",
        *more,
    ]


class Chaos:
    """One run and what is done to it. `attach`: the engines are ours, behind proxies, and outlive the learner. `method`
    is that of the weights, `deadline` that of a request [s]. `begin` starts a process. What is told goes to `say`; what
    must not happen is in `problems`."""

    def __init__(
        self,
        root: Path,
        seed: int,
        steps: int,
        *,
        attach: bool = False,
        method: str = "reload",
        begin: Start = started,
        say: Callable[[str], None] = print,
        deadline: float = 6.0,
    ) -> None:
        self.root, self.run, self.attach, self.begin, self.say = root, root / "run", attach, begin, say
        self.deadline, self.method = deadline, method
        self.rng, self.clock = random.Random(seed), time.monotonic()
        self.learner: Child | None = None
        self.lives, self.killed, self.starved = 0, False, False
        self.finished = False
        self.events: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.told: list[str] = []  # the learner's last words
        self.problems: list[str] = []
        self.engines: list[tuple[Child, int]] = []  # ours, and their ports
        self.proxies: list[Proxy] = []
        self.step, self.before, self.moved = 0, 0, time.monotonic()
        self.vain = 0  # lives in a row that ended with a message, without a step and without a reason
        given(root)
        words = [
            "engine.count=2",
            "engine.max_batch=8",
            "engine.threads=1",
            "engine.start_timeout=120",
            "engine.restarts=1000",
        ]
        if attach:
            ports = [free_port(), free_port()]
            self.engines = [(self.serve(port), port) for port in ports]
            self.proxies = [Proxy(port) for port in ports]
            words = [f"engine.attach=[{','.join(f'http://127.0.0.1:{p.port}' for p in self.proxies)}]"]
        self.words = command(root, steps, f"engine.request_timeout={deadline}", f"weights.method={method}", *words)
        self.kinds: dict[str, Callable[[], str | None]] = {
            "engine killed while it generates": self.kill_generating,
            "engine killed while it loads": self.kill_loading,
            "learner killed": lambda: self.kill_learner(0.0),
            "learner killed while it saves": self.kill_saving,
            "learner killed while it syncs": self.kill_syncing,
            "engine frozen": lambda: self.freeze_engine(self.rng.uniform(0.5, 5)),
            "engine frozen beyond its deadline": lambda: self.freeze_engine(deadline + self.rng.uniform(1, 8)),
            "learner frozen": lambda: self.freeze_learner(self.rng.uniform(0.5, 5)),
            "learner frozen beyond a deadline": lambda: self.freeze_learner(deadline + self.rng.uniform(1, 4)),
            "disk full": lambda: self.fill_disk(self.rng.choice([0, 60_000, 150_000, 1_000_000])),
        }
        if attach:
            self.kinds |= {
                "connections dropped": lambda: self.network("refuse", self.rng.uniform(0, 4)),
                "connections delayed": lambda: self.network("delay", self.rng.uniform(1, 5)),
                "connections silent": lambda: self.network("silent", self.rng.uniform(1, 12)),
                "answer cut in the middle": lambda: self.network("cut", 2.0),
            }

    # ---- processes

    def serve(self, port: int) -> Child:
        words = [f"model.path={self.root}/model", "model.dtype=bfloat16", "engine.max_batch=8", "threads=1"]
        words += [f"volume={self.run}/weights"] if self.method == "volume" else []
        return self.begin(["serve", *words, f"port={port}"])

    def up(self) -> None:
        """Start the learner's next life."""
        self.before = self.steps()
        self.lives += 1
        self.killed = self.starved = False
        self.learner = self.begin(self.words)
        self.moved = time.monotonic()
        self.tell(f"life {self.lives} begins as process {self.learner.pid} behind step {self.step}")

    def tend(self) -> bool:
        """Look at everything; true while the learner lives. Engines of ours are started again where they ended."""
        if (at := self.steps()) != self.step:
            self.step, self.moved = at, time.monotonic()
        for place, (child, port) in enumerate(self.engines):
            if child.code is not None:
                if child.code != -signal.SIGKILL:
                    self.problems.append(f"an engine ended with {child.code}: {child.output()[-3:]}")
                self.engines[place] = (self.serve(port), port)
        if self.learner is None:
            return False
        if self.learner.code is not None:
            self.ended()
            return False
        if time.monotonic() - self.moved > NO_STEP:
            self.problems.append(f"no step for {NO_STEP:g} s; the learner's last words: {self.learner.lines[-5:]}")
            self.killed = True
            self.learner.send(signal.SIGCONT)
            self.learner.send(signal.SIGKILL)
            self.moved = time.monotonic()
        return True

    def ended(self) -> None:
        """Judge how: 0, 2 or 3 with a message, or the signal that was sent from here."""
        assert self.learner is not None
        code, lines, self.learner = self.learner.code, self.learner.output(), None
        (self.root / f"life-{self.lives}.log").write_text("\n".join(lines) + "\n")
        told = next((line for line in lines if line.startswith("birl: ") and line != "birl: run"), "")
        self.told += [told] if told else []
        what = {-9: "killed", 0: "done", 2: "stopped with a message", 3: "stopped by the watchdog"}.get(
            code or 0, str(code)
        )
        if code == 2 and self.starved:
            what = "stopped, the disk was full"
        self.ends[what] += 1
        self.tell(f"life {self.lives} {what} (exit code {code}) {told}".rstrip())
        self.vain = self.vain + 1 if code == 2 and not self.starved and self.steps() <= self.before else 0
        early = code == -signal.SIGTERM and self.steps() <= self.before  # nobody listened to it yet
        if code not in (0, 2, 3) and not (code == -signal.SIGKILL and self.killed) and not early:
            self.problems.append(f"life {self.lives} ended with {code}: {lines[-8:]}")
        if code in (2, 3) and not told:
            self.problems.append(f"life {self.lives} ended with {code} and no message: {lines[-8:]}")
        if any("Traceback" in line for line in lines):
            self.problems.append(f"life {self.lives} showed a traceback, see life-{self.lives}.log")
        if code == 0:
            with suppress(OSError, ValueError):
                self.finished = json.loads((self.run / "summary.json").read_text())["finished"]
        if not self.until(lambda: not servers_of(self.root, 1), 10.0, alone=True):  # orphans belong to init
            self.problems.append(f"life {self.lives} left engines behind")

    def steps(self) -> int:
        with suppress(OSError):
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def until(self, done: Callable[[], object], seconds: float, *, alone: bool = False, every: float = 0.02) -> bool:
        """Wait; false where the learner ended first, or it was not so in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if done():
                return True
            if not alone and not self.tend():
                return False
            time.sleep(every)
        return False

    def tell(self, text: str) -> None:
        self.say(f"{time.monotonic() - self.clock:7.1f} s  step {self.step:4}  {text}")

    # ---- what is done

    def servers(self) -> list[Server]:
        if self.attach:
            return [Server(child.pid, port) for child, port in self.engines]
        return servers_of(self.root, self.learner.pid) if self.learner else []

    def generating(self) -> Server | None:
        servers = self.servers()
        self.rng.shuffle(servers)
        return next((s for s in servers if s.info().get("running")), None)

    def new_weights(self) -> bool:
        """Wait for a version of the weights to be complete: engines are told at once. With direct and nccl nothing
        shows that; they are sent soon after a step."""
        before, at = self.versions("v*"), self.steps()
        if self.method in ("direct", "nccl"):
            found = self.until(lambda: self.steps() > at, 15.0, every=0.001)
            time.sleep(self.rng.uniform(0, 0.2))
            return found
        return self.until(lambda: self.versions("v*") - before, 15.0, every=0.001)

    def versions(self, pattern: str) -> set[str]:
        """Of the weights, as folders."""
        shared = Path(f"/dev/shm/birl-weights-{self.learner.pid if self.learner else 0}")
        return {p.name for p in (shared if self.method == "shared" else self.run / "weights").glob(pattern)}

    def kill_generating(self) -> str | None:
        found: list[Server] = []
        if not self.until(lambda: found.extend(s for s in [self.generating()] if s) or found, 10.0):
            return None
        kill([found[0].pid])
        return f"engine {found[0].port}"

    def kill_loading(self) -> str | None:
        servers = self.servers()
        if not servers or not self.new_weights():
            return None
        time.sleep(self.rng.uniform(0, 0.03))
        chosen = self.rng.choice(servers)
        kill([chosen.pid])
        return f"engine {chosen.port}"

    def kill_learner(self, after: float) -> str | None:
        if self.learner is None:
            return None
        time.sleep(after)
        self.killed = True
        self.learner.send(signal.SIGKILL)
        return f"process {self.learner.pid}"

    def kill_saving(self) -> str | None:
        if not self.until(lambda: [*self.run.glob("checkpoints/*.part")], 15.0, every=0.001):
            return None
        return self.kill_learner(self.rng.uniform(0, 0.04))

    def kill_syncing(self) -> str | None:
        part = self.rng.random() < 0.3 and self.method not in (
            "direct",
            "nccl",
        )  # while the folder is written, or while engines load and prove
        if part and not self.until(lambda: self.versions(".v*.part"), 15.0, every=0.001):
            return None
        if not part and not self.new_weights():
            return None
        return self.kill_learner(self.rng.uniform(0, 0.002 if part else 0.1))

    def freeze(self, pid: int, seconds: float) -> None:
        with suppress(ProcessLookupError):
            Child(pid, lambda: None).send(signal.SIGSTOP)
            self.until(lambda: False, seconds)
            Child(pid, lambda: None).send(signal.SIGCONT)

    def freeze_engine(self, seconds: float) -> str | None:
        chosen = self.generating() or next(iter(self.servers()), None)
        if chosen is None:
            return None
        self.freeze(chosen.pid, seconds)
        return f"engine {chosen.port}, {seconds:.1f} s"

    def freeze_learner(self, seconds: float) -> str | None:
        if self.learner is None:
            return None
        self.freeze(self.learner.pid, seconds)
        return f"{seconds:.1f} s"

    def fill_disk(self, limit: int) -> str | None:
        """Until the learner notices; where nothing it writes is that large, there is room again."""
        if self.learner is None:
            return None
        pid, self.starved = self.learner.pid, True
        no_room(pid, limit)
        self.until(lambda: False, 12.0)
        if self.learner is None:
            return f"no file beyond {limit} bytes"
        room(pid)
        return None

    def network(self, mode: str, seconds: float) -> str | None:
        proxy = self.rng.choice(self.proxies)
        before = proxy.cuts
        proxy.become(mode, self.rng.uniform(0.02, 0.3))
        self.until(lambda: mode == "cut" and proxy.cuts > before, max(seconds, 0.1))
        proxy.become("open")
        return f"engine {proxy.target}, {seconds:.1f} s"

    def happen(self, kind: str) -> bool:
        before = self.lives
        detail = self.kinds[kind]()
        done = detail is not None
        (self.events if done else self.missed)[kind] += 1
        self.tell(f"{kind}: {detail}" if done else f"({kind}: no chance{'' if before == self.lives else ' any more'})")
        return done

    # ---- the whole

    def go(self, seconds: float) -> None:
        """Until the run is finished or the time is over; then it is told to stop, and must."""
        deadline, deck = time.monotonic() + seconds, []
        while not self.finished and time.monotonic() < deadline:
            if self.vain == 3:
                self.problems.append("three lives in a row ended with a message before their first step")
                return
            if not self.trains() or self.until(lambda: time.monotonic() > deadline, self.rng.uniform(0.5, 4)):
                continue
            deck = deck or self.rng.sample(sorted(self.kinds), len(self.kinds))
            self.happen(deck.pop())
            self.until(lambda: False, 0.3)
        self.finish()

    def trains(self) -> bool:
        """Wait for the next step, of a new life where there is none. False where that ended."""
        if self.learner is None:
            self.up()
        at = self.steps()
        return self.until(lambda: self.steps() > at, 120.0) and self.learner is not None

    def finish(self, seconds: float = 150.0) -> None:
        """Stop it as a user does. It may have been started so late that it has to be started once more."""
        for _ in range(3):
            if self.finished:
                return
            if not self.trains():
                continue
            assert self.learner is not None
            self.tell("SIGTERM: save and stop")
            lives, learner = self.lives, self.learner
            done = self.ends["done"]
            learner.send(signal.SIGTERM)
            if self.until(lambda: False, seconds) or self.learner is not None:
                self.problems.append(f"it did not stop within {seconds:g} s of SIGTERM: {learner.lines[-5:]}")
                self.killed = True
                learner.send(signal.SIGKILL)
                return
            if lives == self.lives and self.ends["done"] > done:
                return

    def close(self) -> None:
        """End what is left, and say so where that should not be there."""
        ours = [child for child, _ in self.engines]
        for child in [*ours, *([self.learner] if self.learner else [])]:
            child.send(signal.SIGCONT)
            child.send(signal.SIGKILL)
        for proxy in self.proxies:
            proxy.close()
        deadline = time.monotonic() + 10.0
        while any(child.code is None for child in ours) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.engines = []
        while (left := about(self.root)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid, words in left.items():
            self.problems.append(f"process {pid} is left: {' '.join(words)[:150]}")
        kill([*left])

    def check(self) -> list[str]:
        """Everything that must hold, once all processes are gone."""
        parts = [str(p) for p in (*self.run.glob("weights/.v*.part"), *self.run.glob("checkpoints/*.part"))]
        return self.problems + broken(self.run, BOUND, GROUP) + [f"{p} was left behind" for p in parts]

    def summary(self) -> str:
        width = 36
        rows = [f"{'event':<{width}}   done  no chance"]
        rows += [f"  {kind:<{width - 2}} {self.events[kind]:6} {self.missed[kind]:10}" for kind in self.kinds]
        rows += [f"{'the learner was':<{width}}"] + [f"  {what:<{width - 2}} {n:6}" for what, n in self.ends.items()]
        if not (self.run / "ledger.jsonl").exists():
            return "\n".join([*rows, "no step was made"])
        found = audit(self.run)
        rows += [f"{'tokens':<{width}}"] + [f"  {why:<{width - 2}} {n:6,}" for why, n in found.tokens.most_common()]
        rows += [f"  {'sampled':<{width - 2}} {found.sampled:6,}", f"lives {self.lives}, steps {self.step}"]
        return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--steps", type=int, default=300)
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
        chaos.close()
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
