"""The last code of birl in a child of the guest: it gives up its rights and becomes the program. `main` does the same
for a program that is talked to while it runs.

Standard library only, because an interpreter without packages runs it.
"""

import base64
import contextlib
import json
import os
import signal
import sys
from typing import Any

from birl.sandbox import confine

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
NAMESPACES = ("bubblewrap", "zygote")

Settings = dict[str, Any]
Request = dict[str, Any]
Order = dict[str, Any]  # the part of a request that the program may know: command, limits, folder


def become(settings: Settings, ends: tuple[int, ...], status: int, order: int) -> None:
    """Wait for the order and become the program. Never returns."""
    try:
        confine.prctl(confine.PR_SET_DUMPABLE, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel kills the program, not its monitor
        for place, fd in enumerate(ends):
            os.dup2(fd, place)
        order = os.dup(order)  # not one of the descriptors replaced below
        os.dup2(status, 3, inheritable=False)
        os.dup2(order, 4, inheritable=False)
        os.closerange(5, 1 << 20)
        os.setsid()
        with open(4) as pipe:
            text = pipe.read()
        if not text:
            os._exit(125)  # no run, or it failed before it started
        _run(json.loads(text), settings)
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(125)


def _run(order: Order, settings: Settings) -> None:
    os.chdir(order["folder"])
    confined(order["limits"], settings)
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets it
    command = order["command"]
    if command[0] == "python" and settings["kind"] == "zygote" and command[1:2] and command[1][0] != "-":
        os.close(3)
        run_python(command[1:])
    if command[0] == "python":
        command = [settings["python"], "-X", "utf8", "-s", "-E", *command[1:]]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, ENVIRONMENT)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def confined(limits: dict[str, Any], settings: Settings) -> None:
    kind, uid = settings["kind"], settings["uid"]
    counted = kind in NAMESPACES or uid  # otherwise the kernel counts all of the user's processes
    confine.limit(limits, limits["processes"] + 2 if counted else 0)
    if uid:
        confine.become(uid)
    if kind in NAMESPACES:
        confine.drop_capabilities()
    if kind == "landlock":
        confine.landlock(os.getcwd(), settings["readable"])
    if settings["filter"]:
        confine.seccomp(base64.b64decode(settings["filter"]))


def run_python(words: list[str]) -> None:
    """Run `python FILE WORDS` without a new interpreter."""
    import atexit
    import builtins
    import threading
    import traceback
    import types

    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # from the module `site`, which -S leaves out
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=words[0], __builtins__=__builtins__)
    sys.modules["__main__"] = module
    code = 0
    try:
        with open(words[0], "rb") as file:
            source = file.read()
        exec(compile(source, words[0], "exec"), module.__dict__)  # this is the sandbox
    except SystemExit as error:
        told = error.code is not None and not isinstance(error.code, int)
        code = 1 if told else int(error.code or 0)
        if told:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, frames)
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 120
    os._exit(code & 255)


def main() -> None:
    order = json.loads(sys.argv[1])
    os.chdir(order["folder"])
    if os.geteuid() == 0 and order["kind"] not in NAMESPACES:
        confine.drop_capabilities()  # this process is root
    confined(order["limits"], order)
    command = order["command"]
    try:
        os.execve(command[0], command, order["environment"])
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
