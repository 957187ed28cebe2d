"""Files of a run: put into its folder before it begins, and collected from there when it has ended. Standard library
only, because an interpreter without packages runs it.
"""

import base64
import os


def write(files: dict[str, str], owner: int) -> None:
    """Before the program runs, so that nothing here can be a trap of its making. `owner` 0: this process's user."""
    for name, content in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    for folder, _, names in os.walk(".") if owner else ():
        for name in (".", *names):
            os.chown(os.path.join(folder, name), owner, owner)


def collect(names: list[str], limit: int) -> dict[str, str]:
    """Regular files only. No link is followed on the way, none may have a second name, and no pipe is waited for."""
    found, left = {}, limit
    for name in names:
        content = _regular(name.split("/"), left)
        if content is not None:
            found[name] = base64.b64encode(content).decode()
            left -= len(content)
    return found


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
