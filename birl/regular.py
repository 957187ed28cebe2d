"""Safe file access: in folders that others may have written, only regular files are opened, and no name leads out of
the folder; files are written completely or not at all, and errors say what to do.

A named pipe would block a reader for ever, a device has no end, and `../` in a manifest, or a link, would read or write
outside of the folder.
"""

import errno
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from birl.errors import BirlError

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotRegular(OSError):
    """The path to read is a pipe, a device, a socket or a folder."""


def inside(folder: Path, name: object) -> Path:
    """The path of file `name` in `folder`, which need not exist. Raises `BirlError` for a name that is absolute or has
    `..`, and for a link out of the folder, except to blobs of the hub's cache, whose snapshots are links."""
    if not is_name(name):
        raise BirlError(
            f"{folder}: the name {name!r} leads out of the folder. It must be a relative path without `..`."
        )
    path, root = folder / str(name), folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise BirlError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'its links lead in a circle'}."
        ) from error
    if not any(target.is_relative_to(one) for one in roots):
        raise BirlError(f"{path} is a link to {target}, outside the folder. Put the file itself into the folder.")
    return path


def is_name(name: object) -> bool:
    """Whether it is a relative path without `..`, on every system."""
    if not isinstance(name, str) or not name or "\0" in name or PureWindowsPath(name).drive:
        return False
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.is_absolute() and bool(path.parts) and ".." not in path.parts


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading. Raises `OSError` at once if it is a pipe, a device, a socket or a folder."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        check(path, os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check(path: Path, about: os.stat_result | None = None) -> None:
    """Raises `OSError` if `path` does not exist or is no regular file. Files of /proc and /sys, which may have no end,
    do not count as regular."""
    about = about or os.stat(path)
    kind = stat.S_IFMT(about.st_mode)
    if kind == stat.S_IFREG and about.st_dev in _kernel():
        raise NotRegular(errno.EINVAL, "the kernel makes it up: it is not a regular file", str(path))
    if kind != stat.S_IFREG:
        raise NotRegular(errno.EINVAL, f"it is {KINDS.get(kind, 'something else')}, not a regular file", str(path))


def check_target(path: Path) -> None:
    """Raises `OSError` if the path to write exists and is no regular file: opening a pipe waits for a reader."""
    with suppress(FileNotFoundError):
        check(path)


def check_new(path: Path) -> None:
    """Raises `BirlError` if the path already exists; a link without a target does."""
    if path.exists() or path.is_symlink():
        raise BirlError(f"{path} exists already. Choose another name or delete it.")


@cache
def _kernel() -> frozenset[int]:
    """Device numbers of /proc and /sys."""
    return frozenset(os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path))


def check_all(folder: Path, links: bool = False) -> None:
    """Raises `BirlError` if an entry of the folder is a pipe, a socket or a device, or, without `links`, a link that
    leads out of it: for libraries that open the files themselves, and would block, or read other places."""
    try:
        for path in sorted(folder.iterdir()):
            if not links:
                inside(folder, path.name)
            with suppress(FileNotFoundError):  # a dangling link
                if not path.is_dir():
                    check(path)
    except OSError as error:
        raise BirlError(f"{error.filename or folder} cannot be read: {error.strerror or error}.") from error


def read_bytes(path: Path) -> bytes:
    """Read a file. Raises `OSError`, as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises `OSError`, and `ValueError` for other encodings."""
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises `OSError`, and `ValueError` if it is not JSON."""
    return parse_json(read_bytes(path))


def parse_json(data: bytes | str) -> Any:
    """`json.loads`, but all errors are `ValueError`, also for text that is nested too deep."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def clear(path: Path) -> None:
    """Remove a folder with its contents, or any other path, as far as possible. `shutil.rmtree` opens the path, and
    would wait for the writer of a pipe."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def discard(path: Path) -> None:
    """`clear` at one moment: the path is renamed first, so that a kill leaves no half of a folder under its name."""
    gone = path.with_name(f"{path.name}.part-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(gone)
    clear(gone)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk, and a path that is no regular file, into a `BirlError` that names file and fix."""
    try:
        yield
    except NotRegular as error:
        raise BirlError(
            f"cannot write {error.filename}: {error.strerror}. Remove it, or name another place."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise BirlError(f"cannot write {path}: {error.strerror}. Name another place.") from error
        raise BirlError(
            f"cannot write {path}: {error.strerror or error}. Free some space (`birl checkpoints` can prune) or make "
            "the folder writable, then start the same command again: the run goes on from its last checkpoint."
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: it has the old or the new content, never a part of it."""
    new = path.with_name(path.name + ".new")
    with writing(path):
        new.unlink(missing_ok=True)
        new.write_bytes(data)
        os.replace(new, path)
