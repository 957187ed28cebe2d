"""Keeps the processes of one job running on this machine: `python -m birl.launch.supervisor FILE`.

    engines, then the learner -> an engine that ends is started again, later each time
                              -> a learner that fails is started again, and goes on from its newest checkpoint
                              -> the learner is done, or it was stopped: everything ends

It starts nothing but what is in the file, and imports nothing heavy. Its processes end with it, however it ends.
"""

import contextlib
import os
import secrets
import signal
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from birl.engines import names
from birl.errors import BirlError
from birl.exits import MISTAKE, STOPPED
from birl.launch import plan as files
from birl.launch.child import Child
from birl.launch.plan import LaunchPlan, State
from birl.regular import read_text
from birl.track.runs import last_record

POLL = 0.1  # s between two looks
LONGEST = 30.0  # s before an engine or the learner is started again, at most
STEADY = 60.0  # s after which an engine counts as well again


class Supervisor:
    """One job from its first process to its last."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan, self.asked, self.told = plan, 0, 0  # how often it was to stop, and the learner has heard that
        self.count = plan.count
        self.learner = self.child("learner", 0)
        self.engines = [self.child("engine", index) for index in range(plan.count)]
        self.leaving: list[Child] = []  # engines that are to end
        self.lives = 0  # of the learner that failed
        self.state, self.detail = "running", ""
        self.written: State | None = None

    def child(self, role: str, index: int) -> Child:
        own = self.plan.learner if role == "learner" else self.plan.engine
        env = {}
        if devices := self.plan.of(role, index):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if role == "learner" and self.plan.threads:
            env["OMP_NUM_THREADS"] = str(self.plan.threads)
        return Child(role, index, own, self.plan.folder / f"{role}-{index}.log", env)

    def run(self) -> int:
        """Returns when nothing is left: 0 where the job is done or was stopped, else 1."""
        if self.plan.engines:
            os.environ.setdefault("BIRL_TOKEN", secrets.token_hex(16))
            forget(self.plan.engines)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        self.say(f"supervises {self.plan.name}")
        try:
            for child in (*self.engines, self.learner):
                self.start(child)
            while self.state == "running":
                self.look()
                self.write()
                time.sleep(POLL)
            for child in self.engines:
                child.end()
            while any(child.alive for child in (*self.engines, *self.leaving)):
                self.sweep()
                self.write()
                time.sleep(POLL)
        finally:
            for child in (self.learner, *self.engines, *self.leaving):
                child.kill()
            self.sweep()
            self.write()
        self.say(f"{self.state}{self.detail and ': '}{self.detail}")
        return 0 if self.state in ("done", "stopped") else 1

    def stop(self, number: int, frame: object) -> None:
        """The first signal lets the learner save and end, the second ends it at once."""
        self.asked += 1

    def look(self) -> None:
        """Check all processes once, and act on the result."""
        if not self.asked and (count := files.wanted(self.plan.folder, self.plan.most_engines())) is not None:
            self.scale(count)
        for engine in self.engines:
            self.mend(engine)
        self.sweep()
        self.follow_learner()

    def follow_learner(self) -> None:
        learner = self.learner
        code = learner.ended()
        if code is None:
            if learner.alive and self.told < self.asked:
                self.told += 1
                learner.signal(signal.SIGTERM, self.leader())
            elif self.asked and not learner.alive:
                self.finish("stopped", "it was to be started again")
            elif learner.due():
                self.begin()
            return
        if code == 0 and not self.asked:
            self.finish("done")
        elif self.asked or code in STOPPED:
            saved = code in (0, *STOPPED) and self.asked < 2  # the second signal ends it at once
            self.finish("stopped", "it has saved" if saved else f"exit code {code}")
        elif code == MISTAKE and latest(self.plan.run)[1] < learner.began:
            self.finish("failed", f"the learner ended with exit code {MISTAKE} before its first step: {learner.last()}")
        elif self.lives >= self.plan.restarts:
            self.finish("failed", f"the learner {learner.detail}, and launch.restarts={self.plan.restarts} is used up")
        else:
            self.lives += 1
            self.say(f"the learner {learner.detail}: {learner.last()}")
            learner.later(min(2.0 ** (self.lives - 1), LONGEST))

    def finish(self, state: str, detail: str = "") -> None:
        self.state, self.detail = state, detail
        self.learner.state, self.learner.detail = state, detail

    def begin(self) -> None:
        """The learner once more, and it waits for as many engines as there are now."""
        if self.plan.engine and self.count != self.plan.count:
            self.learner.command = (*self.plan.learner, f"engine.count={self.count}")
        self.start(self.learner)

    def start(self, child: Child) -> None:
        child.start()
        self.say(f"{child.role} {child.index} is process {child.pid}")

    def mend(self, engine: Child) -> None:
        code = engine.ended()
        if engine.alive and engine.restarts and time.time() - engine.since > STEADY:
            engine.backoff = 1.0
        if code is not None:
            forget(self.plan.engines, engine.pid)
            self.say(f"engine {engine.index} {engine.detail}: {engine.last()}")
            if code == MISTAKE and not self.asked and latest(self.plan.run)[1] < self.learner.began:
                self.finish("failed", f"engine {engine.index} ended with exit code {MISTAKE}: {engine.last()}")
                self.learner.end()
                return
            if not self.asked:
                engine.later(engine.backoff)
                engine.backoff = min(2 * engine.backoff, LONGEST)
        elif engine.due() and not self.asked:
            self.start(engine)

    def scale(self, count: int) -> None:
        """Engines come at the end, and leave from there."""
        if count == self.count:
            return
        self.say(f"{count} engines instead of {self.count}")
        self.count = count
        for engine in self.engines[count:]:
            engine.end()
            self.leaving.append(engine)
        del self.engines[count:]
        taken = {child.index for child in self.leaving if child.alive}
        index = 0
        while len(self.engines) < count:
            if index not in taken | {child.index for child in self.engines}:
                self.engines.append(self.child("engine", index))
                self.start(self.engines[-1])
            index += 1

    def sweep(self) -> None:
        """Engines that were to end, and have; those that do not in time are killed."""
        for engine in (*self.leaving, *(self.engines if self.state != "running" else ())):
            if engine.ended() is not None:
                forget(self.plan.engines, engine.pid)
                engine.state = "stopped"
            elif engine.alive and engine.late():
                engine.kill()
        self.leaving = [engine for engine in self.leaving if engine.alive]

    def leader(self) -> int:
        """Rank 0, where the learner is torchrun: it has the run folder."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(read_text(Path(self.plan.run) / ".lock"))
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            return pid if parent == self.learner.pid else 0
        return 0

    def write(self) -> None:
        children = (self.learner, *self.engines, *self.leaving)
        parts = tuple(child.part() for child in children)
        now = State(state=self.state, pid=os.getpid(), engines=self.count, parts=parts, detail=self.detail)
        if now != self.written:
            try:
                files.write(self.plan.folder / files.STATE, asdict(now))
            except OSError as error:  # a disk that is full, or out of reach: the processes are more important
                self.say(f"state.json could not be written: {error}")
                now = replace(now, state="")
            self.written = now

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def forget(name: str, pid: int = 0) -> None:
    """Engines that were killed have left their names behind: of one, or of all."""
    if not name:
        return
    with contextlib.suppress(OSError):
        for entry in names.entries(name):
            if pid in (0, entry.pid):
                names.forget(entry)


def latest(run: str) -> tuple[int, float]:
    """The last step of a run and when it was over [s of the clock]; zeros where there is none. A line that is half
    written is none."""
    row = last_record(Path(run) / "metrics.jsonl")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(row["step"]), datetime.fromisoformat(row["time"]).timestamp()
    return 0, 0.0


def main(argv: list[str] | None = None) -> int:
    file = Path((sys.argv[1:] if argv is None else argv)[0])
    try:
        plan = files.load(file)
        with files.lock(plan.folder):
            (plan.folder / files.WANTED).unlink(missing_ok=True)
            return Supervisor(plan).run()
    except BirlError as error:
        print(f"birl: {error}", file=sys.stderr)
        return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
