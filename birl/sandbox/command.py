"""Command lines that start `guest.py`: in bubblewrap, or directly."""

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from birl.errors import BirlError
from birl.sandbox.protocol import Limits

HERE = Path(__file__).parent
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
NOBODY = "65534"
GUEST = "/run/birl"  # folder of the guest's code inside of bubblewrap
NAMES = ("confine", "folder", "guest", "watch", "checker", "names", "values")
SOURCES = {
    "birl/__init__.py": None,
    "birl/sandbox/__init__.py": None,
    **{f"birl/sandbox/{name}.py": HERE / f"{name}.py" for name in NAMES},
}
LINKS = ("app", "workspace", "logs", "tests", "solution")  # in the root folder, to folders of the run
GUEST_MB = 32  # memory of the guest itself beside the run
FIRST_UID, UIDS = 61200, 4000  # within systemd's range of dynamic users


def program(name: str) -> str:
    """Path of a program. Raises `BirlError` that names its package."""
    result = shutil.which(name, path=SYSTEM_PATH)
    if not result:
        package = {"bwrap": "bubblewrap", "setpriv": "util-linux"}[name]
        raise BirlError(
            f"there is no {name} on this machine: install the package {package} (apt-get install {package})"
        )
    return result


def interpreters() -> list[str]:
    """Python interpreters to try, best first. This process's own has the same version, but may be in a home folder that
    no other user can read."""
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    names = dict.fromkeys((own, "/usr/local/bin/python3", "/usr/bin/python3"))
    return [name for name in names if os.access(name, os.X_OK)]


def readable(python: str) -> list[str]:
    """Folders outside of /usr that an interpreter needs."""
    prefix = str(Path(python).resolve().parent.parent)
    return [] if prefix.startswith("/usr") else [prefix]


def sources(opened: contextlib.ExitStack) -> list[tuple[int, str]]:
    """The guest's code as open files, with their names inside of the sandbox."""
    result = []
    for name, path in SOURCES.items():
        fd = os.memfd_create(name)
        opened.callback(os.close, fd)
        os.write(fd, path.read_bytes() if path else b"")
        os.lseek(fd, 0, os.SEEK_SET)
        result.append((fd, name))
    return result


def plain(python: str, control: int | str, main: str = "guest") -> list[str]:
    """Command of the guest without namespaces; it confines only the program that it starts or becomes."""
    place = str(HERE.parent.parent)
    code = f"import sys; sys.path.insert(0, {place!r}); from birl.sandbox import {main}; {main}.main()"
    return [python, "-I", "-S", "-X", "utf8", "-c", code, str(control)]


def bubblewrap(
    python: str,
    control: int | str,
    sources: Sequence[tuple[int, str]],
    limits: Limits,
    uid: int = 0,
    *,
    keep: bool = False,
    main: str = "guest",
    places: Sequence[str] = (),
) -> list[str]:
    """Command of the guest as pid 1 of a sandbox. `sources`: open files with its code, and their names inside. `keep`:
    it creates namespaces for every run, so that this cannot be forbidden here (each run's filter forbids it). `main`:
    the module of the guest that runs; `places`: other readable paths.

    If this process is root, it first becomes an unprivileged user: for the kernel, root without capabilities in a user
    namespace still owns /proc/sys. bwrap is pid 1's parent, and its environment would be readable in /proc: the caller
    passes an empty one.
    """
    words = []
    if uid:
        words += [program("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    words += [program("bwrap"), "--unshare-all", "--unshare-user", *([] if keep else ["--disable-userns"])]
    words += ["--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    words += ["--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "lib32", "bin", "sbin"):
        if Path(f"/{name}").is_symlink():
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        elif Path(f"/{name}").is_dir():
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    for place in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        words += ["--ro-bind-try", place, place]
    for place in readable(python):
        words += ["--ro-bind", place, place]
    for name in LINKS:  # for programs made for a container
        if not any(place.startswith(f"/{name}/") for place in (*readable(python), *places)):
            words += ["--symlink", f"tmp/{name}", f"/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    if not keep:  # runs of a zygote mount their own
        words += ["--ro-bind-try", "/proc/sys", "/proc/sys"]
    size = str(limits.file_mb << 20)
    words += ["--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"]
    for place in places:  # they may be in /tmp
        words += ["--ro-bind", place, place]
    words += ["--remount-ro", "/dev"]
    for fd, name in sources:
        words += ["--ro-bind-data", str(fd), f"{GUEST}/{name}"]
    words += ["--chdir", "/tmp", "--remount-ro", "/"]
    code = f"import sys; sys.path.insert(0, {GUEST!r}); from birl.sandbox import {main}; {main}.main()"
    return [*words, "--", python, "-I", "-S", "-B", "-X", "utf8", "-c", code, str(control)]
