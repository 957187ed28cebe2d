"""A run that is watched: its processes are started, looked after, judged when they end, and ended."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from birl.process import free_port
from tests.chaos.processes import Child, Server, Start, about, kill, servers_of, started
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
        *("rl", f"model.path={root}/model", "model.dtype=bfloat16", f"data.train={root}/data.jsonl"),
        *(f"reward.functions={root}/reward.py:digits", "rollout.prompts=2", f"rollout.group_size={GROUP}"),
        *("rollout.max_tokens=40", f"rollout.max_staleness={BOUND}", "env.timeout=120", "rollout.max_failure_rate=0.9"),
        *("engine.kind=birl", f"weights.timeout={SYNC}", "optimizer.lr=3e-4", "checkpoint.every=2"),
        *("checkpoint.keep_last=3", "validation.every=0", f"steps={steps}", "watchdog=90", "track.tensorboard=false"),
        *("track.report=false", "track.console=plain", "threads=1", f"run={root}/run"),
        *more,
    ]


class Watched:
    """`attach`: the engines are ours, behind proxies, and outlive the learner. `method` is that of the weights,
    `deadline` that of a request [s]. `begin` starts a process. What is told goes to `say`; what must not happen is in
    `problems`."""

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
        self.root, self.folder, self.attach, self.begin, self.say = root, root / "run", attach, begin, say
        self.deadline, self.method = deadline, method
        self.rng, self.clock = random.Random(seed), time.monotonic()
        self.learner: Child | None = None
        self.lives, self.starved = 0, False  # `starved`: its disk was full,
        self.killed = False  # and it was killed, both by us
        self.finished = False
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

    def serve(self, port: int) -> Child:
        words = [f"model.path={self.root}/model", "model.dtype=bfloat16", "engine.max_batch=8", "threads=1"]
        words += [f"volume={self.folder}/weights"] if self.method == "volume" else []
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
        """Judge how: 0, 2 or 3 with a message, as what happens to it may end it before it has saved (without that it is
        143 exactly, test_signals.py), or the signal that was sent from here."""
        assert self.learner is not None
        code, lines, self.learner = self.learner.code, self.learner.output(), None
        (self.root / f"life-{self.lives}.log").write_text("\n".join(lines) + "\n")
        told = next((line for line in lines if line.startswith("birl: ") and not line.startswith("birl: run")), "")
        self.told += [told] if told else []
        what = {-9: "killed", 0: "done", 143: "saved", 2: "stopped with a message", 3: "stopped by the watchdog"}.get(
            code or 0, str(code)
        )
        if code == 2 and "File too large" in told:
            what = "stopped, the disk was full"
        self.ends[what] += 1
        self.tell(f"life {self.lives} {what} (exit code {code}) {told}".rstrip())
        self.vain = self.vain + 1 if code == 2 and not self.starved and self.steps() <= self.before else 0
        early = code == -signal.SIGTERM and self.steps() <= self.before  # nobody listened to it yet
        if code not in (0, 2, 3, 143) and not (code == -signal.SIGKILL and self.killed) and not early:
            self.problems.append(f"life {self.lives} ended with {code}: {lines[-8:]}")
        if code in (2, 3) and not told:
            self.problems.append(f"life {self.lives} ended with {code} and no message: {lines[-8:]}")
        if any("Traceback" in line for line in lines):
            self.problems.append(f"life {self.lives} showed a traceback, see life-{self.lives}.log")
        if code == 0:
            with suppress(OSError, ValueError):
                self.finished = json.loads((self.folder / "summary.json").read_text())["finished"]
        if not self.until(lambda: not servers_of(self.root, 1), 10.0, alone=True):  # orphans belong to init
            self.problems.append(f"life {self.lives} left engines behind")

    def steps(self) -> int:
        with suppress(OSError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
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

    def servers(self) -> list[Server]:
        if self.attach:
            return [Server(child.pid, port) for child, port in self.engines]
        return servers_of(self.root, self.learner.pid) if self.learner else []

    def generating(self) -> Server | None:
        servers = self.servers()
        self.rng.shuffle(servers)
        return next((s for s in servers if s.info().get("running")), None)

    def new_weights(self) -> bool:
        """Wait for a version of the weights to be complete: engines are told at once. With the method direct nothing
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
        return {p.name for p in (shared if self.method == "shared" else self.folder / "weights").glob(pattern)}

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
            saved = self.ends["saved"]
            learner.send(signal.SIGTERM)
            if self.until(lambda: False, seconds) or self.learner is not None:
                self.problems.append(f"it did not stop within {seconds:g} s of SIGTERM: {learner.lines[-5:]}")
                self.killed = True
                learner.send(signal.SIGKILL)
                return
            if lives == self.lives and self.ends["saved"] > saved:
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
