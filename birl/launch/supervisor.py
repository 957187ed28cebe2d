"""Keeps the processes of one job running on this machine: `python -m birl.launch.supervisor FILE`.

    engines, then the learner -> an engine that ends is restarted, with backoff
                              -> a learner that fails is restarted, and resumes from its newest checkpoint
                              -> the learner is done, or was stopped: everything ends

It starts only commands of the file, and imports nothing heavy. Its processes end with it in any case.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from birl.engines import names
from birl.errors import MISTAKE, STOPPED, BirlError
from birl.launch import plan as files
from birl.launch.plan import LaunchPlan, ProcessState, State
from birl.process import ProcessGroup
from birl.regular import read_text
from birl.track.runs import last_record

POLL = 0.1  # s between two polls
LONGEST = 30.0  # s, longest delay of a restart
STEADY = 60.0  # s without failure after which an engine's backoff is reset
PATIENCE = 15.0  # s between SIGTERM and SIGKILL; an engine finishes its requests meanwhile
SHOWN = 300  # characters of a process's last line


class Child:
    """A process that can be restarted. Its output is appended to `log`."""

    def __init__(self, role: str, index: int, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.command, self.log, self.env = tuple(command), log, env
        self.part = ProcessState(role=role, index=index, state="waiting")
        self.began = 0.0  # its last start [s of the clock]
        self.process: ProcessGroup | None = None
        self.note("waiting")

    def note(self, state: str, detail: str = "", pid: int = 0, again: int = 0) -> None:
        since, restarts = round(time.time(), 3), self.part.restarts + again
        self.part = replace(self.part, state=state, detail=detail, pid=pid, since=since, restarts=restarts)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> None:
        again = int(self.process is not None)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.env}
        self.process, self.began = ProcessGroup(self.command, log=self.log, env=env), time.time()
        self.note("running", pid=self.pid, again=again)

    async def ended(self) -> int:
        """Wait until the process and its group have ended; returns its exit code."""
        assert self.process is not None
        while (code := self.process.code) is None:
            await asyncio.sleep(POLL)
        self.process.kill()
        self.note("failed" if code else "done", self.process.how())
        return code

    def signal(self, number: int, instead: int = 0) -> None:
        """Signal the process, or a process below it that is the leader."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(instead or self.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def last(self) -> str:
        """The last line of its output."""
        with contextlib.suppress(OSError):
            assert self.process is not None
            lines = [line for line in self.process.tail(4096).splitlines() if line.strip()]
            return lines[-1].strip()[:SHOWN] if lines else "it has printed nothing"
        return "its log cannot be read"


class Supervisor:
    """Runs one job from its first process to its last."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan, self.asked = plan, 0  # number of stop requests
        self.learner = self.child("learner", 0)
        self.engines = [self.child("engine", index) for index in range(plan.count)]
        self.tasks: dict[Child, asyncio.Task[None]] = {}  # of the engines, also of those that are leaving
        self.lives = 0  # number of failures of the learner
        self.state, self.detail = "running", ""
        self.written: State | None = None

    def child(self, role: str, index: int) -> Child:
        own = self.plan.learner if role == "learner" else self.plan.engine
        env: dict[str, str] = {}
        if devices := self.plan.of(role, index):
            names = {"CUDA_VISIBLE_DEVICES", *({"HIP_VISIBLE_DEVICES"} & os.environ.keys())}  # of which HIP's counts
            env |= dict.fromkeys(names, ",".join(devices))
        if role == "learner" and self.plan.threads:
            env["OMP_NUM_THREADS"] = str(self.plan.threads)
        return Child(role, index, own, self.plan.folder / f"{role}-{index}.log", env)

    async def run(self) -> int:
        """Run until all processes have ended; returns 0 if the job is done or was stopped, else 1."""
        if self.plan.engines:
            os.environ.setdefault("BIRL_TOKEN", secrets.token_hex(16))
            forget(self.plan.engines)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        self.say(f"supervises {self.plan.name}")
        try:
            for engine in self.engines:
                self.keep(engine)
            self.start(self.learner)
            learning = asyncio.create_task(self.learn())
            while self.state == "running":
                if not self.asked and (count := files.wanted(self.plan.folder, self.plan.most_engines())) is not None:
                    self.scale(count)
                await self.look(learning)
            learning.cancel()
            self.learner.signal(signal.SIGTERM)  # an engine's mistake ends the job
            for engine in self.engines:
                self.leave(engine)
            while self.tasks:
                await self.look()
        finally:
            for child in (self.learner, *self.engines, *self.tasks):
                child.kill()
            self.write()
        self.say(f"{self.state}{self.detail and ': '}{self.detail}")
        return 0 if self.state in ("done", "stopped") else 1

    async def look(self, *more: "asyncio.Task[None]") -> None:
        """Write the current state; raises the exception of a failed task."""
        for task in (*self.tasks.values(), *more):
            if task.done() and not task.cancelled():
                task.result()
        self.tasks = {child: task for child, task in self.tasks.items() if not task.done()}
        self.write()
        await asyncio.sleep(POLL)

    def stop(self) -> None:
        """The first signal lets the learner save and end, the second kills it."""
        self.asked += 1
        self.learner.signal(signal.SIGTERM, self.leader())

    def start(self, child: Child) -> None:
        child.start()
        self.say(f"{child.part.role} {child.part.index} is process {child.pid}")

    # --- the learner

    async def learn(self) -> None:
        """Run the learner to its end, with restarts. It waits for as many engines as there are at each start."""
        while self.learned(await self.learner.ended()):
            until = time.monotonic() + min(2.0 ** (self.lives - 1), LONGEST)
            self.learner.note("restarting", f"{self.learner.part.detail}; again in {until - time.monotonic():.0f} s")
            while not self.asked and time.monotonic() < until:
                await asyncio.sleep(POLL)
            if self.asked:
                self.finish("stopped", "it was to be started again")
                return
            if self.plan.engine and len(self.engines) != self.plan.count:
                self.learner.command = (*self.plan.learner, f"engine.count={len(self.engines)}")
            self.start(self.learner)

    def learned(self, code: int) -> bool:
        """Whether the learner is to be restarted after it ended with this exit code."""
        learner, how = self.learner, self.learner.part.detail
        if code == 0 and not self.asked:
            self.finish("done")
        elif self.asked or code in STOPPED:
            saved = code in (0, *STOPPED) and self.asked < 2  # the second signal kills it
            self.finish("stopped", "it has saved" if saved else f"exit code {code}")
        elif code == MISTAKE and latest(self.plan.run)[1] < learner.began:
            self.finish("failed", f"the learner ended with exit code {MISTAKE} before its first step: {learner.last()}")
        elif self.lives >= self.plan.restarts:
            self.finish("failed", f"the learner {how}, and launch.restarts={self.plan.restarts} is used up")
        else:
            self.lives += 1
            self.say(f"the learner {how}: {learner.last()}")
        return self.state == "running"

    def finish(self, state: str, detail: str = "") -> None:
        self.state, self.detail = state, detail
        self.learner.note(state, detail)

    def leader(self) -> int:
        """Pid of rank 0 if the learner is torchrun: rank 0 has the run folder."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(read_text(Path(self.plan.run) / ".lock").split()[0])
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            return pid if parent == self.learner.pid else 0
        return 0

    # --- engines

    def keep(self, engine: Child) -> None:
        self.start(engine)
        self.tasks[engine] = asyncio.create_task(self.engine(engine))

    async def engine(self, engine: Child) -> None:
        """Keep an engine running, with backoff, while it is one of the wanted ones."""
        backoff = 1.0
        while True:
            code, index = await engine.ended(), engine.part.index
            forget(self.plan.engines, engine.pid)
            if self.state != "running" or engine not in self.engines:
                engine.note("stopped")
                return
            self.say(f"engine {index} {engine.part.detail}: {engine.last()}")
            if self.asked:
                return
            if code == MISTAKE and latest(self.plan.run)[1] < self.learner.began:
                self.finish("failed", f"engine {index} ended with exit code {MISTAKE}: {engine.last()}")
                return
            backoff = 1.0 if time.time() - engine.began > STEADY else backoff
            engine.note("restarting", f"{engine.part.detail}; again in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST)
            if self.asked:
                return
            self.start(engine)

    def leave(self, engine: Child) -> None:
        """End an engine by SIGTERM, then SIGKILL after a timeout."""
        if engine.alive:
            engine.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(PATIENCE, engine.kill)
        elif engine in self.tasks:
            self.tasks[engine].cancel()
            engine.note("stopped")

    def scale(self, number: int) -> None:
        """Change the number of engines; they are added and removed at the end."""
        if number == len(self.engines):
            return
        self.say(f"{number} engines instead of {len(self.engines)}")
        for engine in self.engines[number:]:
            self.engines.remove(engine)
            self.leave(engine)
        taken = {engine.part.index for engine in self.tasks}
        free = (index for index in count() if index not in taken)
        while len(self.engines) < number:
            self.engines.append(self.child("engine", next(free)))
            self.keep(self.engines[-1])

    # --- state for others

    def write(self) -> None:
        leaving = [engine for engine in self.tasks if engine not in self.engines]
        parts = tuple(child.part for child in (self.learner, *self.engines, *leaving))
        now = State(state=self.state, pid=os.getpid(), engines=len(self.engines), parts=parts, detail=self.detail)
        if now != self.written:
            try:
                files.write(self.plan.folder / files.STATE, asdict(now))
            except BirlError as error:  # a full or unreachable disk must not stop the processes
                self.say(f"state.json could not be written: {error}")
                now = replace(now, state="")
            self.written = now

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def forget(name: str, pid: int = 0) -> None:
    """Remove registered names of killed engines: of one, or of all."""
    if not name:
        return
    with contextlib.suppress(OSError):
        for entry in names.entries(name):
            if pid in (0, entry.pid):
                names.forget(entry)


def latest(run: str) -> tuple[int, float]:
    """Last step of a run and its time [s since 1970]; zeros if there is none. An incomplete line is ignored."""
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
            return asyncio.run(Supervisor(plan).run())
    except BirlError as error:
        print(f"birl: {error}", file=sys.stderr)
        return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
