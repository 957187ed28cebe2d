"""How a process gives up its rights (limits, namespaces, Landlock, seccomp, capabilities), and the last code of birl in
a child of the guest, which does so and becomes the program. `main` does the same for a program that is talked to while
it runs.

Standard library only, no imports of birl: an interpreter without packages imports it.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
MIB = 1 << 20

READ = (1 << 0) | (1 << 2) | (1 << 3)  # Landlock: execute, read files, read folders
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
FILE_RIGHTS = (1 << 0) | (1 << 1) | (1 << 2)
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
NAMESPACES = ("bubblewrap", "zygote")

Settings = dict[str, Any]
Request = dict[str, Any]
Order = dict[str, Any]  # the part of a request that the program may know: command, limits, folder


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def fork_into_namespaces() -> int:
    """Like os.fork, but the child is pid 1 in new namespaces of users, mounts and processes.

    Network and IPC namespaces are bubblewrap's, shared by all runs: both are empty, the filter refuses every call that
    could leave something there, and creating and removing them for each run takes a third of its time.

    os.unshare would need a second fork for the namespace of processes, and forking Python is most of the cost of a run.
    The surrounding calls are those of os.fork.
    """
    python, numbers = ctypes.pythonapi, {"x86_64": 56, "aarch64": 220}  # clone
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | signal.SIGCHLD
    python.PyOS_BeforeFork()
    pid = python.syscall(numbers[os.uname().machine], ctypes.c_ulong(flags), 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return check(pid, "clone")


def map_user(uid: int, gid: int) -> None:
    """Map the ids unchanged into the new user namespace; this process has all capabilities in it."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def mount(kind: str, place: str, flags: int, options: str = "") -> None:
    result = libc.mount(kind.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(result, f"mount {kind} on {place}")


def own_files(file_mb: int) -> None:
    """Mount size-limited memory file systems on all writable places, and a /proc with the run's own processes."""
    check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount private")
    size = f"size={file_mb}m,nr_inodes=16384,mode=0755"
    mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, size)
    mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, size)
    mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    settings = b"/proc/sys"
    check(libc.mount(settings, settings, None, ctypes.c_ulong(MS_BIND), None), "mount /proc/sys")
    places = [*((device, 0) for device in (*DEVICES, "/dev/tty")), ("/dev/pts", MS_NOEXEC)]
    for place, flags in [*places, ("/proc/sys", MS_NODEV | MS_NOEXEC)]:
        flags |= MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID  # changes there would persist in the next run
        check(libc.mount(None, place.encode(), None, ctypes.c_ulong(flags), None), f"mount {place} read-only")


def limit(limits: dict[str, Any], processes: int) -> None:
    """Set resource limits. `processes` 0: no limit here, because the kernel would count all of the user's processes."""
    cpu = limits["cpu_seconds"]
    bounds = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, cpu, cpu + 1),  # SIGXCPU, then SIGKILL if it is ignored
        (resource.RLIMIT_AS, limits["memory_mb"] * MIB, limits["memory_mb"] * MIB),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * MIB, limits["file_mb"] * MIB),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ]
    if processes:
        bounds.append((resource.RLIMIT_NPROC, processes, processes))
    for which, soft, hard in bounds:
        highest = resource.getrlimit(which)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(which, (soft, hard))


def drop_capabilities() -> None:
    """Drop all capabilities from every set; first from the bounding set, as this needs a capability."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # beyond the last known to this kernel, or not allowed: an own user has none anyway
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, bytes(24)), "capset")


def become_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def landlock_version() -> int:
    """Version of Landlock; 0 if the kernel has none, or has it disabled."""
    return max(0, libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def landlock(folder: str, readable: list[str]) -> None:
    """Allow reading only the system's programs and writing only `folder`. Signals and abstract sockets stay inside, if
    the kernel supports that."""
    version = landlock_version()
    if not version:
        raise OSError("this kernel has no Landlock")
    files = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    network = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("=QQQ", files, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    size = ctypes.c_size_t(len(attributes))
    rules = check(libc.syscall(LANDLOCK_CREATE, attributes, size, ctypes.c_uint(0)), "landlock")
    allowed = [(place, READ) for place in (*READABLE, *readable)]
    allowed += [(place, READ | WRITE_FILE | TRUNCATE) for place in DEVICES] + [(folder, files)]
    for place, rights in allowed:
        if os.path.exists(place):
            beneath = os.open(place, os.O_PATH | os.O_CLOEXEC)
            rights &= files if os.path.isdir(place) else files & (FILE_RIGHTS | TRUNCATE)
            rule = struct.pack("=Qi", rights, beneath)
            check(libc.syscall(LANDLOCK_ADD, rules, ctypes.c_int(1), rule, ctypes.c_uint(0)), f"landlock {place}")
            os.close(beneath)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    check(libc.syscall(LANDLOCK_RESTRICT, rules, ctypes.c_uint(0)), "landlock")
    os.close(rules)


def seccomp(program: bytes) -> None:
    """Install an assembled filter, permanently, for this process and all that it starts."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    result = Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    check(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(result), 0, 0), "seccomp")


def become(settings: Settings, ends: tuple[int, ...], status: int, order: int) -> None:
    """Wait for the order and become the program. Never returns."""
    try:
        prctl(PR_SET_DUMPABLE, 1)
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
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets it
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
    limit(limits, limits["processes"] + 2 if counted else 0)
    if uid:
        become_user(uid)
    if kind in NAMESPACES:
        drop_capabilities()
    if kind == "landlock":
        landlock(os.getcwd(), settings["readable"])
    if settings["filter"]:
        seccomp(base64.b64decode(settings["filter"]))


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
        drop_capabilities()  # this process is root
    confined(order["limits"], order)
    command = order["command"]
    try:
        os.execve(command[0], command, order["environment"])
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
