"""Writes the files of a run before it starts, and collects files after it has ended. Standard library only, because an
interpreter without packages runs it."""

import base64
import contextlib
import os
import stat

DEEPEST = 64  # depth of nested folders while a program runs
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def write(files: dict[str, str], owner: int) -> None:
    """Write the files before the program runs, so that it cannot set a trap here. `owner` 0: this process's user."""
    for name, content in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    for folder, _, names in os.walk(".") if owner else ():
        for name in (".", *names):
            os.chown(os.path.join(folder, name), owner, owner)


def collect(names: list[str], limit: int) -> dict[str, str]:
    """Collect regular files. No links are followed, files with several hard links are skipped, and pipes are not waited
    for."""
    result, left = {}, limit
    for name in names:
        content = _regular(name.split("/"), left)
        if content is not None:
            result[name] = base64.b64encode(content).decode()
            left -= len(content)
    return result


def _regular(parts: list[str], limit: int) -> bytes | None:
    opened: list[int] = []
    try:
        folder = os.open(".", os.O_DIRECTORY)
        opened.append(folder)
        for part in parts[:-1]:
            folder = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            opened.append(folder)
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        opened.append(file)
        about = os.fstat(file)
        if about.st_mode & 0o170000 != 0o100000 or about.st_nlink != 1 or about.st_size > limit:
            return None
        with open(file, "rb", closefd=False) as content:
            return content.read(limit)
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def size(folder: int, most: int, depth: int = 0) -> int:
    """Total size of the files below an open folder [bytes], without following links; every entry counts as at least
    4096, as folders take space too. Stops above `most`: a program that adds files could keep it busy. Raises `OSError`
    for a folder that cannot be read or is nested too deep."""
    if depth > DEEPEST:
        raise OSError(f"more than {DEEPEST} folders within each other")
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                about = entry.stat(follow_symlinks=False)
                total += max(4096, about.st_blocks * 512)
                if stat.S_ISDIR(about.st_mode):
                    inner = os.open(entry.name, FOLDER, dir_fd=folder)
                    try:
                        total += size(inner, most - total, depth + 1)
                    finally:
                        os.close(inner)
            if total > most:
                break
    return total


def remove(place: str) -> None:
    """Remove a folder with its contents at any depth, without long paths or recursion: a nested folder is moved to the
    top and emptied there. Entries that cannot be removed stay."""
    with contextlib.suppress(OSError):
        os.chmod(place, 0o700)
        top = os.open(place, FOLDER)
        try:
            while names := os.listdir(top):
                if not sum(_removed(name, top, top) for name in names):
                    return
        finally:
            os.close(top)
        os.rmdir(place)


def _removed(name: str, folder: int, top: int) -> bool:
    """Remove an entry of `folder` or move it, if it is a folder, to `top`. Returns whether that worked."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return True
        os.chmod(name, 0o700, dir_fd=folder)  # an ordinary user cannot empty or move a folder without write permission
        if folder != top:
            os.rename(name, os.urandom(8).hex(), src_dir_fd=folder, dst_dir_fd=top)  # rmdir first looks at all below
            return True
        inner = os.open(name, FOLDER, dir_fd=top)
        try:
            for entry in os.listdir(inner):
                _removed(entry, inner, top)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
        return True
    except OSError:
        return False
