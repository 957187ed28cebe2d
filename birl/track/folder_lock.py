"""Lock of a run folder: one process at a time, also on disks without locks, and always the same configuration."""

import errno
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.file import flatten
from birl.errors import BirlError
from birl.hub import read_config
from birl.regular import check, read_text
from birl.track.runs import COMMAND_KEYS, began_at

try:
    import fcntl
except ImportError:  # Windows: nothing prevents two processes in one folder
    fcntl = None

HOST = socket.gethostname()

# Keys that may change on resume: its length, and limits of memory or time, which change results by rounding
# at most.
FREE = (
    *("steps", "epochs", "resume", "run", "threads", "watchdog"),
    *("learner.tokens_per_microbatch", "learner.gradient_checkpointing", "learner.max_logprob_gap"),
    *("weights.method", "weights.folder", "weights.bucket_mb", "weights.timeout", "weights.canary", "weights.max_gap"),
    *("reward.timeout", "reward.workers", "env.timeout", "rollout.max_failure_rate"),
)
FREE_SECTIONS = ("track.", "checkpoint.", "engine.", "parallel.")


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Lock a run folder against other processes. The lock ends with this process in any case; a file that is left
    behind does not matter. Raises `BirlError` if another process has it."""
    path = run / ".lock"
    try:
        handles = _lock(path)
    except BlockingIOError as error:
        pid, host = "", ""
        with suppress(OSError, ValueError):
            pid, _, host, *_ = (*read_text(path).split("\n"), "", "", "")
        raise BirlError(
            f"{run} is in use by another birl process{f' (pid {pid})' if pid else ''}, and two would overwrite each "
            "other's files. Wait for it, stop it, or choose another folder with run=..."
            + (f" It runs on {host}; if it has ended there, delete {path}." if host not in ("", HOST) else "")
        ) from error
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        for handle in handles:
            os.close(handle)
        with suppress(OSError):
            run.rmdir()  # only when nothing was written into it


def _lock(path: Path) -> list[int]:
    """Open and lock the folder, so that nobody enters when the lock file is deleted, and the file, which gets our pid;
    returns both handles. Raises `BlockingIOError` if one is locked."""
    for _ in range(20):
        with suppress(FileNotFoundError, FileExistsError):  # its last holder may be removing it, and the folder
            path.parent.mkdir(parents=True, exist_ok=True)
            return _try_lock(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _try_lock(path)


def _try_lock(path: Path) -> list[int]:
    handles: list[int] = []
    try:
        if fcntl is not None:
            with suppress(PermissionError):  # a folder that cannot be listed
                handles.append(os.open(path.parent, os.O_RDONLY))
                if not _flock(handles[0]):
                    os.close(handles.pop())  # NFS locks files only
                elif os.fstat(handles[0]).st_ino != path.parent.stat().st_ino:
                    raise FileNotFoundError(path.parent)
        with suppress(FileNotFoundError):
            check(path)
        handles.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        if not _flock(handles[-1]):
            os.close(handles.pop())
            _own(path)
            return handles
        if os.fstat(handles[-1]).st_ino != path.stat().st_ino:
            raise FileNotFoundError(path)
        os.ftruncate(handles[-1], 0)
        os.write(handles[-1], f"{os.getpid()}\n".encode())
    except BaseException:
        for handle in handles:
            with suppress(OSError):
                os.close(handle)
        raise
    return handles


def _flock(handle: int) -> bool:
    """Lock the file without waiting; False if its disk has no locks. Raises `BlockingIOError` if another process has
    it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _own(path: Path) -> None:
    """Take a lock file on a disk without locks: it names the process and machine that have the folder. Raises
    `BlockingIOError` unless that process is known to have ended."""
    text = read_text(path)
    if text and not _ended(text):
        raise BlockingIOError(errno.EAGAIN, "the folder is in use", str(path))
    mine = path.with_name(f".lock-{os.getpid()}-{secrets.token_hex(4)}")
    mine.write_text(f"{os.getpid()}\n{began_at(os.getpid())}\n{HOST}\n")
    try:
        before = path.with_name(f"{mine.name}.before")
        os.rename(path, before)  # if two take it, the rename of one raises FileNotFoundError, and it tries again
        try:
            if read_text(before) != text:  # another process took it meanwhile
                raise BlockingIOError(errno.EAGAIN, "the folder is in use", str(path))
            os.link(mine, path)
        except BlockingIOError:
            os.rename(before, path)
            raise
        finally:
            before.unlink(missing_ok=True)
    finally:
        mine.unlink(missing_ok=True)


def _ended(text: str) -> bool:
    """Whether the process in a lock file has ended, as far as this machine can know."""
    pid, began, host = (*text.split("\n"), "", "", "")[:3]
    if not pid.isdecimal() or (host and host != HOST):
        return not pid.isdecimal()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return bool(began) and began != began_at(int(pid))


def unwritable(run: Path, error: Exception) -> BirlError:
    reason = getattr(error, "strerror", None) or str(error)
    return BirlError(f"Cannot write into the run folder {run}: {reason}. Choose another with run=..., or make room.")


def check_same(run: Path, config: schema.RL | schema.Stage, newest: Path | None) -> None:
    """Raises `BirlError` with the keys that differ. `newest`: the newest checkpoint in `run`."""
    before, now = read_config(run), plain(config)
    if next((name for name, key in COMMAND_KEYS.items() if (key in before) != (key in now)), ""):
        raise BirlError(
            f"{run} belongs to a run of another command than `birl {type(config).__name__.lower()}`. "
            "To start a new run: run=ANOTHER_FOLDER."
        )
    changed = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k) and not _free(k)]
    if changed:
        lines = "\n".join(f"  {k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in changed)
        raise BirlError(
            f"{run} belongs to a run with another configuration:\n{lines}\n"
            "To start a new run: run=ANOTHER_FOLDER. To continue its weights under this configuration: "
            f"run=ANOTHER_FOLDER resume={newest or f'{run}/checkpoints/step-...'}"
        )


def plain(config: schema.RL | schema.Stage) -> dict[str, Any]:
    return json.loads(json.dumps(flatten(config)))


def _free(key: str) -> bool:
    return key in FREE or key.startswith(FREE_SECTIONS)
