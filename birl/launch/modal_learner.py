"""The learner's container: wait for engines, run the learner, stop it, and report how it ended. Each engine notes its
address every few seconds, and is registered here under the engines' name, for `engine.attach`."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from birl.engines import names
from birl.errors import MISTAKE, STOPPED, BirlError
from birl.launch.modal_container import BEAT, START, ContainerWork, Ended, Notes, Streamed

LIFE = 6  # beats without a new note after which an engine counts as lost
COMMIT = 60.0  # s between two commits of the volume
SAVE = 900.0  # s that a learner may take to save and end
FINAL = (0, MISTAKE, *STOPPED)  # exit codes after which a restart would not help


class Directory:
    """Registers engines with fresh notes under `name` on this machine, and removes those that stopped."""

    def __init__(self, notes: Notes, name: str, count: int, beat: float = BEAT) -> None:
        self.notes, self.name, self.count, self.beat = notes, name, count, beat
        self.entries: dict[int, names.Entry] = {}
        self._heard: dict[int, tuple[object, float]] = {}  # last beat, and the time when it changed
        self._over = threading.Event()

    def look(self) -> None:
        for number in range(self.count):
            note = self.notes.get(f"engine/{number}") or {}
            beat, known = note.get("beat"), self._heard.get(number)
            if known is None:  # may be the last note of an engine that is long gone
                self._heard[number] = (beat, float("-inf"))
            elif beat != known[0]:
                self._heard[number] = (beat, time.monotonic())
            fresh = time.monotonic() - self._heard[number][1] < LIFE * self.beat
            self._keep(number, str(note.get("url", "")) if fresh and note.get("state") == "running" else "")

    def _keep(self, number: int, url: str) -> None:
        entry = self.entries.get(number)
        if entry is not None and entry.address != url:
            names.forget(self.entries.pop(number))
            entry = None
        if entry is not None:
            names.touch(entry)
        elif url:
            self.entries[number] = names.register(self.name, url, os.getpid(), f"engine {number}")

    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.entries]

    def __enter__(self) -> "Directory":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.wait(self.beat):
            try:
                self.look()
            except Exception as error:  # notes out of reach: engines stay registered until their entries expire
                print(f"birl: engines cannot be looked up now: {error}", flush=True)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)
        for entry in self.entries.values():
            names.forget(entry)


def link(work: ContainerWork) -> Path:
    """Create the run folder on the volume, and link it to the path in the command. Raises `BirlError`."""
    place, here = Path(work.place), Path(work.run)
    place.mkdir(parents=True, exist_ok=True)
    if here.is_symlink():
        here.unlink()
    if here.exists() and here.resolve() != place.resolve():
        raise BirlError(f"run={work.run}: is a file or folder of the container already; choose another run=...")
    if not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(place, target_is_directory=True)
    return place


def learn(
    work: ContainerWork,
    notes: Notes,
    *,
    spawn: Callable[[int], object],
    commit: Callable[[], object],
    beat: float = BEAT,
    start: float = START,
) -> int:
    """The learner's container: wait for engines (`spawn(number)` starts a missing one), run the command, and stop it
    when the notes request it. Returns its exit code, or 2 if engines do not start. Raises `Ended` if it is to be
    restarted, as Modal does after any exception."""
    starts = int((notes.get("learner") or {}).get("starts", 0)) + 1

    def note(state: str, detail: str = "") -> None:
        about = {"state": state, "starts": starts, "task": os.environ.get("MODAL_TASK_ID", ""), "detail": detail}
        notes.put("learner", {**about, "time": time.time()})

    note("running", "starting")
    try:
        folder = link(work)
        with Directory(notes, work.engines, work.count, beat) as directory:
            if not await_engines(directory, notes, note, spawn, first=starts == 1, start=start):
                note("stopped")
                notes.put("over", True)
                return 0
            child = Streamed("learner 0", work.command, folder / "launch" / "learner-0.log", {})
            code, why = watch(child, notes, note, commit, work.seconds, beat)
    except BirlError as error:
        print(f"birl: {error}", flush=True)
        note("failed", str(error))
        notes.put("over", True)
        return 2
    finally:
        written(commit)
    if why == "time" and code in (0, *STOPPED):
        note("restarting", "its time limit")
        raise Ended(f"after {work.seconds / 3600:.1f} hours it saved and is started again")
    if code not in FINAL:
        note("restarting", f"exit code {code}")
        raise Ended(f"`{' '.join(work.command)[:200]}` ended with exit code {code}")
    ended = "stopped" if why == "stop" or code in STOPPED else "done" if code == 0 else "failed"
    note(ended, "" if code in (0, *STOPPED) else f"exit code {code}")
    notes.put("over", True)
    return code


def await_engines(
    directory: Directory,
    notes: Notes,
    note: Callable[[str, str], None],
    spawn: Callable[[int], object],
    *,
    first: bool,
    start: float,
) -> bool:
    """Wait until all engines have registered; False if the job is stopped before. Raises `BirlError`."""
    began, spawned = time.monotonic(), False
    while missing := directory.missing():
        waited = time.monotonic() - began
        if notes.get("stop"):
            return False
        if not spawned and (first or waited > 3 * directory.beat):  # else engines of an earlier start exist
            spawned = True
            for number in missing:
                spawn(number)
        if waited > start:
            raise BirlError(
                f"engines {', '.join(map(str, missing))} did not come within {start:g} s. `birl logs RUN engine` shows "
                "why; launch.engine_gpu names their GPU."
            )
        note("running", f"waits for {len(missing)} of {directory.count} engines")
        time.sleep(directory.beat)
    return True


def watch(
    child: Streamed,
    notes: Notes,
    note: Callable[[str, str], None],
    commit: Callable[[], object],
    seconds: float,
    beat: float,
) -> tuple[int, str]:
    """Wait until the child has ended; returns its exit code, and why it was ended: "" (by itself), stop or time."""
    began = committed = time.monotonic()
    while child.alive:
        try:
            note("running", "")
            if notes.get("stop"):
                return child.end(SAVE), "stop"
        except Exception as error:  # network failure: the learner itself continues
            print(f"birl: no word from outside: {error}", flush=True)
        if time.monotonic() - committed > COMMIT:
            committed = time.monotonic()
            written(commit)
        if time.monotonic() - began > seconds:
            return child.end(SAVE), "time"
        child.wait(beat)
    return child.end(10.0), ""


def written(commit: Callable[[], object]) -> None:
    """Commit the volume, so that others see the files. Modal also commits periodically and at the end. While files are
    open, its client raises after the commit, as it cannot reload the volume."""
    try:
        commit()
    except Exception as error:
        print(f"birl: the volume was not written, or not read: {error}", flush=True)
