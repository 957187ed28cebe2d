"""The learner in its container: waits for its engines, runs, is stopped, and says how it ended."""

import os
import subprocess
import time
from collections.abc import Callable

from birl.errors import BirlError
from birl.exits import MISTAKE, STOPPED
from birl.launch.modal_engines import Directory
from birl.launch.modal_roles import BEAT, START, ContainerWork, Ended, Notes, Streamed, link

COMMIT = 60.0  # s between two writes of the volume
SAVE = 900.0  # s that a learner may take to save and end
FINAL = (0, MISTAKE, *STOPPED)  # exit codes after which another start would change nothing


def learn(
    work: ContainerWork,
    notes: Notes,
    *,
    spawn: Callable[[int], object],
    commit: Callable[[], object],
    beat: float = BEAT,
    start: float = START,
) -> int:
    """The learner's container: waits for engines (`spawn(number)` starts one that is not there), runs the command, and
    stops it when the notes say so. Returns its exit code, or 2 where engines do not come. Raises `Ended` where it is to
    be started again, as Modal does after any exception."""
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
    """Until all are there; False where the job is stopped before. Raises `BirlError`."""
    began, spawned = time.monotonic(), False
    while missing := directory.missing():
        waited = time.monotonic() - began
        if notes.get("stop"):
            return False
        if not spawned and (first or waited > 3 * directory.beat):  # else it has engines from an earlier start
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
    """Until the child has ended: its exit code, and why it was ended: "" (by itself), stop or time."""
    began, committed = time.monotonic(), time.monotonic()
    while child.process.poll() is None:
        try:
            note("running", "")
            if notes.get("stop"):
                return child.end(SAVE), "stop"
        except Exception as error:  # the network: the learner itself goes on
            print(f"birl: no word from outside: {error}", flush=True)
        if time.monotonic() - committed > COMMIT:
            committed = time.monotonic()
            written(commit)
        if time.monotonic() - began > seconds:
            return child.end(SAVE), "time"
        try:
            child.process.wait(beat)
        except subprocess.TimeoutExpired:
            continue
    return child.wait(10.0), ""


def written(commit: Callable[[], object]) -> None:
    """The volume as others see it. Modal writes it from time to time and at the end anyway; and while files are open on
    it, its client raises after it has written, as it cannot read what others wrote."""
    try:
        commit()
    except Exception as error:
        print(f"birl: the volume was not written, or not read: {error}", flush=True)
