"""The lock of a run folder: one process at a time writes into it, also where the disk has no locks."""

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from birl.errors import BirlError
from birl.regular import check, read_text
from birl.track.runs import began_at

try:
    import fcntl
except ImportError:  # not on Windows: there, nothing keeps two processes out of one folder
    fcntl = None

HOST = socket.gethostname()


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep other processes out of a run folder. The lock ends with this process, however that ends; only its file may
    be left, which is no obstacle. Raises `BirlError` where another one has it."""
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
    """Open files that are locked: the folder, so that nothing gets in when the lock file is deleted, and the file, with
    our pid in it. Raises `BlockingIOError` where one is taken."""
    for _ in range(20):
        with suppress(FileNotFoundError, FileExistsError):  # its last holder may remove it, and the folder, right now
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
    """Whether the file is locked now; False where its disk has no locks. Raises `BlockingIOError` where another process
    has it."""
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
    """Take a lock file where there are no locks: it says which process of which machine has the folder. Raises
    `BlockingIOError` unless that process is known to have ended."""
    text = read_text(path)
    if text and not _ended(text):
        raise BlockingIOError(errno.EAGAIN, "the folder is in use", str(path))
    mine = path.with_name(f".lock-{os.getpid()}-{secrets.token_hex(4)}")
    mine.write_text(f"{os.getpid()}\n{began_at(os.getpid())}\n{HOST}\n")
    try:
        before = path.with_name(f"{mine.name}.before")
        os.rename(path, before)  # of two that find it free, one fails here: FileNotFoundError, and looks again
        try:
            if read_text(before) != text:  # another one took it between
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
    """Whether the process that a lock file names has ended, as far as can be known here."""
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
