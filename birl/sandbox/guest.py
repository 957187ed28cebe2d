"""The program beside the program: takes runs from a socket, starts each one confined, watches it, and tells how it went.

It is pid 1 of the sandbox (bubblewrap, zygote) or the parent of the program (landlock, process), and started by
`birl/sandbox/worker.py`. Standard library only. A message is four bytes of length and JSON; bytes are base64.
"""

import base64
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import struct
import sys
import time
from typing import Any

from birl.sandbox import confine

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
TICK = 0.02  # seconds between looks at memory, files and orphans
DRAIN = 1.0  # seconds that reading what is left in the pipes may take
NAMESPACES = ("bubblewrap", "zygote")

Settings = dict[str, Any]
Request = dict[str, Any]


def receive(control: int) -> Any:
    """None where the other side is gone."""
    head = _exactly(control, 4)
    body = _exactly(control, struct.unpack(">I", head)[0]) if head else b""
    return json.loads(body) if body else None


def _exactly(control: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = os.read(control, min(count - len(found), 1 << 20))
        if not part:
            return b""
        found += part
    return bytes(found)


def send(control: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(control, data) :]


# ---- the run ----------------------------------------------------------------------------------------------------------


def run(request: Request, settings: Settings, control: int) -> dict[str, Any]:
    """Start the program in the current folder, and come back when nothing of it is left."""
    _write_files(request["files"], settings["uid"])
    stdin = os.memfd_create("stdin")
    os.write(stdin, base64.b64decode(request["stdin"]))
    os.lseek(stdin, 0, os.SEEK_SET)
    (out, out_end), (err, err_end), (status, status_end) = os.pipe(), os.pipe(), os.pipe()
    confine.prctl(confine.PR_SET_DUMPABLE, 0)  # or the program reads this process's memory
    program = os.fork()
    if program == 0:
        _program(request, settings, (stdin, out_end, err_end), status_end)
    for fd in (stdin, out_end, err_end, status_end):
        os.close(fd)
    watch = Watch(program, request, settings, control, {out: bytearray(), err: bytearray()})
    try:
        watch.until_it_ends()
    finally:
        watch.kill_everything()
    watch.drain()
    problem = os.read(status, 4096).decode(errors="replace")
    for fd in (out, err, status):
        os.close(fd)
    reply = watch.told()
    if problem:
        reply |= {"ending": "error", "detail": problem}
    return reply | {"files": _collect(request["collect"], request["limits"]["file_mb"] << 20)}


class Watch:
    """One running program: what it wrote, whether it went too far, and how it ended."""

    def __init__(
        self, program: int, request: Request, settings: Settings, control: int, pipes: dict[int, bytearray]
    ) -> None:
        self.program = program
        self.limits = request["limits"]
        self.kind = settings["kind"]
        self.own_user = bool(settings["uid"])
        self.watch_memory = request["watch_memory"]
        self.control = control
        self.pipes = pipes
        self.began = time.monotonic()
        self.took = 0.0
        self.status: int | None = None
        self.ending = ""
        self.detail = ""
        self.cut = False

    def until_it_ends(self) -> None:
        poll = select.poll()
        ended = os.pidfd_open(self.program)
        for fd in (*self.pipes, ended):
            poll.register(fd, select.POLLIN)
        poll.register(self.control, select.POLLHUP)
        looked = 0.0
        while not self.ending and self.status is None:
            left = self.began + self.limits["seconds"] - time.monotonic()
            if left <= 0:
                self.stop("timeout", f"took longer than {self.limits['seconds']:g} s")
                break
            for fd, event in poll.poll(min(left, TICK) * 1000 + 1):
                if fd == self.control:
                    self.stop("killed", "nobody waits for it any more")
                elif fd in self.pipes and not self._read(fd):
                    poll.unregister(fd)  # it closed its output, which does not mean that it ends
            self._reap()
            if time.monotonic() - looked > TICK:
                self._look()
                looked = time.monotonic()
        self.took = time.monotonic() - self.began
        os.close(ended)

    def stop(self, ending: str, detail: str) -> None:
        self.ending, self.detail = self.ending or ending, self.detail or detail

    def _read(self, fd: int) -> bool:
        """Whether there may be more."""
        part = os.read(fd, 1 << 16)
        room = self.limits["output_bytes"] - len(self.pipes[fd])
        self.pipes[fd] += part[:room]
        if len(part) > room:
            self.cut = True
            self.stop("output", f"wrote more than {self.limits['output_bytes']} bytes")
        return bool(part)

    def _reap(self) -> None:
        """Orphans too: they come to this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self.program:
                    self.status = status

    def _look(self) -> None:
        """What no limit of the kernel bounds here."""
        if self.watch_memory or (self.kind not in NAMESPACES and not self.own_user):
            members = self._members()
            if self.watch_memory and sum(map(_memory, members)) > self.limits["memory_mb"] << 20:
                self.stop("memory", f"all processes held more than {self.limits['memory_mb']} MiB")
            if len(members) > self.limits["processes"]:
                self.stop("killed", f"more than {self.limits['processes']} processes")
        if self.kind not in NAMESPACES and _size(".") > self.limits["file_mb"] << 20:
            self.stop("output", f"files of more than {self.limits['file_mb']} MiB")

    def _members(self) -> list[int]:
        """All processes of the run: of the namespace, or the descendants of this process."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.kind in NAMESPACES:
            return [pid for pid in pids if pid != os.getpid()]
        parents = {pid: _parent(pid) for pid in pids}
        found, grown = {os.getpid()}, True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            grown = bool(more)
            found |= more
        return list(found - {os.getpid()})

    def kill_everything(self) -> None:
        """Whatever was started, daemons and orphans too. When this returns, none of it lives."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                if self.kind in NAMESPACES:
                    os.kill(-1, signal.SIGKILL)  # all of the namespace but pid 1, which is this process
                else:
                    os.killpg(self.program, signal.SIGKILL)
            if self.kind not in NAMESPACES:
                for pid in self._members():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                while True:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == self.program:
                        self.status = status
                    if not pid:
                        time.sleep(0.001)
                        break
            except ChildProcessError:
                return
        self.stop("error", "processes of the run cannot be killed")

    def drain(self) -> None:
        """What is still in the pipes. Everybody who could write is dead, so that it ends."""
        deadline = time.monotonic() + DRAIN
        for fd in self.pipes:
            while time.monotonic() < deadline and len(self.pipes[fd]) < self.limits["output_bytes"]:
                if not select.select([fd], [], [], 0)[0] or not self._read(fd):
                    break

    def told(self) -> dict[str, Any]:
        out, err = (base64.b64encode(bytes(found)).decode() for found in self.pipes.values())
        status = self.status if self.status is not None else signal.SIGKILL
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number and not self.ending:
            if number == signal.SIGXCPU or (number == signal.SIGKILL and self.took > self.limits["cpu_seconds"]):
                self.stop("timeout", f"used more than {self.limits['cpu_seconds']} s of processor time")
            elif number == signal.SIGXFSZ:
                self.stop("output", f"wrote a file of more than {self.limits['file_mb']} MiB")
            else:
                self.stop("killed", f"ended by signal {number}")
        return {
            "ending": self.ending or "ok", "detail": self.detail, "stdout": out, "stderr": err, "truncated": self.cut,
            "exit_code": None if number else os.WEXITSTATUS(status), "signal": number, "seconds": self.took,
        }  # fmt: skip


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _memory(pid: int) -> int:
    """What a process holds by itself [bytes]: its share of common pages where that may be read."""
    wanted, file = (b"Pss:",), f"/proc/{pid}/smaps_rollup"
    for _ in range(2):
        try:
            with open(file, "rb") as found:
                return sum(int(line.split()[1]) for line in found if line.startswith(wanted)) << 10
        except OSError:
            wanted, file = (b"RssAnon:", b"RssShmem:"), f"/proc/{pid}/status"
    return 0


def _size(folder: str) -> int:
    """Bytes of all files, links not followed; every entry counts as 4096 at least, as folders take room too."""
    total, folders = 0, [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


# ---- files ------------------------------------------------------------------------------------------------------------


def _write_files(files: dict[str, str], owner: int) -> None:
    """Before the program runs, so that nothing here can be a trap of its making. `owner` 0: this process's user."""
    for name, content in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    for folder, _, names in os.walk(".") if owner else ():
        for name in (".", *names):
            os.chown(os.path.join(folder, name), owner, owner)


def _collect(names: list[str], limit: int) -> dict[str, str]:
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


# ---- inside of the program's own process -------------------------------------------------------------------------------


def _program(request: Request, settings: Settings, ends: tuple[int, ...], status: int) -> None:
    """Becomes the program. Never returns."""
    try:
        confine.prctl(confine.PR_SET_DUMPABLE, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, the program goes, and not who watches it
        for place, fd in enumerate(ends):
            os.dup2(fd, place)
        os.dup2(status, 3, inheritable=False)
        os.closerange(4, 1 << 20)
        os.setsid()
        _confined(request, settings)
        command = request["command"]
        if command[0] == "python" and settings["kind"] == "zygote" and command[1:2] and command[1][0] != "-":
            os.close(3)
            _run_python(command[1:])
        if command[0] == "python":
            command = [settings["python"], "-X", "utf8", "-s", "-E", *command[1:]]
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvpe(command[0], command, ENVIRONMENT)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(125)


def _confined(request: Request, settings: Settings) -> None:
    kind, uid = settings["kind"], settings["uid"]
    counted = kind in NAMESPACES or (kind == "landlock" and uid)  # else the kernel counts all of the user's processes
    confine.limit(request["limits"], request["limits"]["processes"] + 2 if counted else 0)
    if kind == "process":
        return
    if kind == "landlock":
        if uid:
            confine.become(uid)
        confine.landlock(os.getcwd(), settings["readable"])
    else:
        confine.drop_capabilities()
    confine.seccomp(base64.b64decode(settings["filter"]))


def _run_python(words: list[str]) -> None:
    """What `python FILE WORDS` does, without a new interpreter."""
    import atexit
    import threading
    import traceback
    import types

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
        code = _exit_code(error.code)
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


def _exit_code(code: Any) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1


# ---- the three ways to stay --------------------------------------------------------------------------------------------


def once(settings: Settings, control: int) -> None:
    """One run, in a sandbox of its own."""
    request = receive(control)
    if request is not None:
        os.chdir("/tmp")
        send(control, run(request, settings, control))


def zygote(settings: Settings, control: int) -> None:
    """Forks for every run into namespaces of its own. What is imported here needs no import there."""
    for name in settings["preload"]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while (request := receive(control)) is not None:
        middle = os.fork()
        if middle == 0:
            _middle(request, settings, control)
        _, status = os.waitpid(middle, 0)
        if status:
            detail = "the process that watches it was killed" if os.WIFSIGNALED(status) else "cannot fork"
            send(control, {"ending": "killed", "detail": detail})


def _middle(request: Request, settings: Settings, control: int) -> None:
    """A namespace of processes begins with the next child: it is pid 1. Never returns."""
    try:
        confine.own_namespaces()
        first = os.fork()
        if first == 0:
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
            confine.own_files(request["limits"]["file_mb"])
            os.chdir("/tmp")
            send(control, run(request, settings, control))
            os._exit(0)
        _, status = os.waitpid(first, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    except BaseException as error:
        send(control, {"ending": "error", "detail": f"{type(error).__name__}: {error}"})
        os._exit(0)


def folders(settings: Settings, control: int) -> None:
    """Every run in a folder of its own, below one that this process removes at its end."""
    import shutil

    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)  # orphans come here, and are killed
    try:
        while (request := receive(control)) is not None:
            place = os.path.join(settings["scratch"], os.urandom(8).hex())
            os.mkdir(place, 0o700)
            os.chdir(place)
            try:
                reply = run(request, settings, control)
            except OSError as error:
                reply = {"ending": "error", "detail": f"{type(error).__name__}: {error}"}
            os.chdir("/")
            shutil.rmtree(place, ignore_errors=True)  # safe against links that are put there meanwhile
            send(control, reply)
    finally:
        shutil.rmtree(settings["scratch"], ignore_errors=True)


def main() -> None:
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    send(control, {"landlock": confine.landlock_version()})
    settings = receive(control)
    if settings is None:
        return
    stay = {"bubblewrap": once, "zygote": zygote}.get(settings["kind"], folders)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stay(settings, control)


if __name__ == "__main__":
    main()
