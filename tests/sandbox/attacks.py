"""What hostile programs do: each tries one thing and prints `BROKEN: ...` for whatever of it works.

They get facts about the outside as JSON on standard input: `port` and `path` of servers, a `secret` file, `token` (in
the environment of the launcher), a `victim` process, a world-writable `folder`, seconds to `sleep` that
make a process known. They are run by `tests/sandbox/hostile.py`, and never without a boundary.
"""

from dataclasses import dataclass, field, replace

from birl.sandbox.protocol import Limits

LIMITS = Limits(seconds=2, cpu_seconds=1, memory_mb=256, processes=20, file_mb=16, output_bytes=1 << 16)
SHORT = replace(LIMITS, seconds=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A program, its limits, how it has to end (any way where that is empty), and files that must not be collected."""

    name: str
    program: str
    endings: tuple[str, ...] = ()
    limits: Limits = LIMITS
    collect: tuple[str, ...] = ()
    after: str = field(default="")  # a second program, run next: it must not find what the first one left


START = """
import ctypes, ctypes.util, json, os, signal, socket, struct, sys, time
from contextlib import suppress
facts = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
def broken(what):
    os.write(1, f"BROKEN: {what}\\n".encode())
def attempt(what, action):
    try:
        found = action()
    except Exception:
        return
    broken(f"{what} {found if isinstance(found, (str, int)) else ''}")
"""

FORK_BOMB = """
count = 0
for _ in range(400):
    try:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        count += 1
    except OSError:
        break
if count > 60:
    broken(f"{count} processes")
"""
MEMORY_OF_CHILDREN = """
reader, writer = os.pipe()
children = []
for _ in range(12):
    child = os.fork()
    if child == 0:
        try:
            held = bytearray(os.urandom(1 << 20)) * 80
            os.write(writer, struct.pack("I", os.getpid()))
        except MemoryError:
            pass
        time.sleep(1.2)
        os._exit(0)
    children.append(child)
time.sleep(1)
os.write(writer, struct.pack("I", 0))  # so that there is something to read
told = {pid for (pid,) in struct.iter_unpack("I", os.read(reader, 100))}
# The kernel may have killed one that held its memory already, to make room for the next.
held = len([child for child in children if child in told and os.waitpid(child, os.WNOHANG) == (0, 0)])
if held * 80 > 320:
    broken(f"{held * 80} MiB at once")
"""
MEMORY = """
held = []
for step in range(64):
    held.append(bytearray(os.urandom(1 << 20)) * 32)
    if step * 32 >= 320:
        broken(f"{step * 32} MiB")
"""
MEMORY_IN_FILES = """
total = 0
for step in range(20):
    try:
        fd = os.memfd_create("x")
    except OSError:
        break
    for _ in range(16):
        total += os.write(fd, bytes(1 << 20)) >> 20
    if total >= 320:
        broken(f"{total} MiB in memory files")
        break
"""
DISK = """
for place in (".", "/tmp", "/dev/shm", "/dev", "/dev/pts", "/var/tmp", "/run", "/mnt", facts["folder"], "/"):
    total = 0
    for name in range(40):
        with suppress(OSError):
            with open(f"{place}/fill{name}", "wb") as file:
                for _ in range(8):
                    total += file.write(bytes(1 << 20)) >> 20
    if total > (64 if place in (".", "/tmp", "/dev/shm") else 0):
        broken(f"{total} MiB in {place}")
"""
FILES = """
for place in ("/dev", "/dev/pts", "/run", "/dev/shm", "/tmp", "."):
    count = 0
    with suppress(OSError):
        for count in range(100000):
            os.close(os.open(f"{place}/{count}", os.O_CREAT | os.O_WRONLY))
    if count > (50000 if place in ("/dev/shm", "/tmp", ".") else 0):
        broken(f"{count} files in {place}")
"""
DEEP = """
total = 0
with suppress(OSError):
    for _ in range(2100):
        os.mkdir("d")
        os.chdir("d")
    for name in range(40):
        with open(str(name), "wb") as file:
            for _ in range(8):
                total += file.write(bytes(1 << 20)) >> 20
        time.sleep(0.02)
if total > 100:
    broken(f"{total} MiB below deep folders")
"""
NETWORK = """
def connect(family, kind, place, data=b"x"):
    def action():
        with socket.socket(family, kind) as link:
            link.settimeout(1)
            link.connect(place) if kind == socket.SOCK_STREAM else link.sendto(data, place)
    return action
def paired(place):
    def action():
        link, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        link.sendto(b"x", place)
    return action
attempt("loopback", connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", facts["port"])))
attempt("unix", connect(socket.AF_UNIX, socket.SOCK_STREAM, facts["path"]))
attempt("abstract", connect(socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + facts["path"]))
for place in (facts["path"] + "-dgram", "\\0" + facts["path"] + "-dgram"):
    attempt("datagram", connect(socket.AF_UNIX, socket.SOCK_DGRAM, place))
    attempt("datagram of a pair", paired(place))
attempt("a name for one of a pair", lambda: socket.socketpair()[0].bind("\\0birl-hostile"))
attempt("udp", connect(socket.AF_INET, socket.SOCK_DGRAM, ("1.1.1.1", 53)))
attempt("tcp", connect(socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 80)))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0)))
attempt("listen", lambda: socket.create_server(("0.0.0.0", 0)))
"""
SECRETS = """
def read(path):
    with open(path, "rb") as file:
        return file.read(1 << 20)
for path in ("/etc/shadow", facts["secret"], "/etc/ssh/sshd_config", "/proc/kcore", "/dev/mem"):
    attempt(path, lambda: len(read(path)))
attempt("folder", lambda: len(os.listdir(os.path.dirname(facts["secret"]))))
attempt("home", lambda: len(os.listdir("/root")))
token = facts["token"].encode()
for pid in range(1, 1 << 16):
    try:
        found = token in read(f"/proc/{pid}/environ") or token in read(f"/proc/{pid}/cmdline")
    except OSError:
        continue
    if found:
        broken(f"the token is in /proc/{pid}")
if any(facts["token"] in value for value in os.environ.values()):
    broken("own environment")
"""
KERNEL = """
for name in ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory"):
    attempt(name, lambda: os.close(os.open(f"/proc/sys/{name}", os.O_WRONLY)))
for name in ("/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/sys/fs/cgroup", "/dev/sda", "/dev/vda", "/dev/kvm"):
    attempt(name, lambda: os.close(os.open(name, os.O_RDWR)))
attempt("cgroup", lambda: os.mkdir("/sys/fs/cgroup/memory/birl-escape"))
attempt("mknod", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
attempt("setuid", lambda: os.setuid(0))
attempt("chroot", lambda: os.chroot("."))
attempt("watching files", lambda: 1 // (libc.inotify_init1(0) >= 0))
attempt("setuid program", lambda: 1 // (libc.prctl(39, 0, 0, 0, 0) == 0))  # PR_GET_NO_NEW_PRIVS
calls = dict(bpf=321, io_uring=425, keyctl=250, add_key=248, userfaultfd=323, perf=298, open_by_handle=304, reboot=169)
calls |= dict(fanotify=300, io_setup=206, sync=162, syncfs=306)
if os.uname().machine == "x86_64":
    for name, number in calls.items():
        if libc.syscall(number, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38):
            broken(f"{name} is let through, errno {ctypes.get_errno()}")
"""
SIGNALS = """
for pid in (facts["victim"], facts["launcher"]):
    attempt(f"signal 0 to {pid}", lambda: os.kill(pid, 0) or "sent")
attempt("SIGKILL", lambda: os.kill(facts["victim"], signal.SIGKILL) or "sent")
import fcntl
reader, writer = os.pipe()
for owner in (facts["victim"], facts["launcher"]):
    def deliver():
        fcntl.fcntl(reader, 10, int(signal.SIGKILL))  # F_SETSIG
        fcntl.fcntl(reader, fcntl.F_SETOWN, owner)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
        os.write(writer, b"x")
        return "by the kernel"
    attempt(f"SIGKILL to {owner}", deliver)
attempt("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(facts["victim"]), signal.SIGKILL) or "sent")
attempt("limits", lambda: __import__("resource").prlimit(facts["victim"], 7, (0, 0)) and "set")
attempt("SIGTERM to the parent", lambda: os.kill(os.getppid(), signal.SIGTERM) if os.getppid() != 1 else 1 / 0)
"""
WATCHER = """
for pid in {1, os.getppid()}:
    for name in ("mem", "environ", "fd/0", "fd/3", "root/etc/passwd", "cwd/x", "maps"):
        attempt(f"/proc/{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").close())
    if libc.ptrace(16, pid, 0, 0) == 0:
        broken(f"ptrace {pid}")
for pid in (os.getppid(), -1):
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
"""
BREAKING = """
import resource
calls = []
for pid in {1, os.getppid()}:
    calls += [lambda n=n: os.kill(pid, n) for n in range(1, 65) if n not in (9, 19)]
    for which in ("AS", "DATA", "STACK", "CPU", "NOFILE", "FSIZE", "MEMLOCK"):
        calls.append(lambda which=which: resource.prlimit(pid, getattr(resource, "RLIMIT_" + which), (1, 1)))
    calls += [lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.setpriority(os.PRIO_USER, 0, 19)]
    calls.append(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    calls.append(lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000"))
    for call in calls:
        with suppress(OSError, ValueError):
            call()
os.write(1, b"x" * 300000)
time.sleep(1000)
"""
DAEMON = """
for way in range(4):
    if way == 3:
        libc.prctl(36, 1, 0, 0, 0)  # its children's orphans go to itself, and not to who watches
    parents = 0x8000 if way == 2 and os.getppid() != 1 and os.uname().machine == "x86_64" else 0  # CLONE_PARENT
    if (libc.syscall(56, parents | 17, 0, 0, 0, 0) if parents else os.fork()) == 0:
        with suppress(OSError):
            os.setsid() if way else None
        for number in range(1, 32):
            if number not in (9, 19, 17):
                signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            os.execvp("sleep", ["sleep", facts["sleep"]])
        os._exit(0)
"""
OUTPUT = """
while True:
    os.write(1, b"x" * 65536)
    os.write(2, b"x" * 65536)
"""
NAMESPACES = """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000):
    if libc.unshare(flag) == 0:
        broken(f"unshare {flag:x}")
    if os.uname().machine == "x86_64":
        pid = libc.syscall(56, flag | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        if pid > 0:
            broken(f"clone {flag:x}")
        arguments = (ctypes.c_uint64 * 8)(flag, 0, 0, 0, 17, 0, 0, 0)
        pid = libc.syscall(435, arguments, 64)
        if pid == 0:
            os._exit(0)
        if pid > 0:
            broken(f"clone3 {flag:x}")
os.makedirs("m", exist_ok=True)
for kind in (b"tmpfs", b"proc", b"sysfs", b"overlay"):
    if libc.mount(kind, b"m", kind, 0, None) == 0:
        broken("mount")
"""
LINKS = """
os.symlink(facts["secret"], "secret")
os.symlink("/etc", "etc")
os.mkfifo("pipe")
os.symlink("/proc/self/environ", "environ")
os.symlink("..", "up")
attempt("hard link", lambda: os.link(facts["secret"], "hard"))
attempt("hard link of a system file", lambda: os.link("/etc/shadow", "hard"))
with open("twice", "w") as file:
    file.write("x")
os.link("twice", "other")
with open("sparse", "wb") as file:
    file.truncate(1 << 23)
os.remove("main.py")
os.symlink(facts["secret"], "main.py")
"""
PLACES = """
PLACES = [".", "/tmp", "/dev/shm", "/run", "/var/tmp", facts["folder"]]
for root, folders, _ in os.walk("/"):
    inner = [name for name in folders if f"{root}/{name}" not in ("//proc", "//usr", "//sys")]
    folders[:] = inner if root.count("/") < 3 else []
    PLACES.append(root)
"""
LEAVE = """
for place in PLACES:
    with suppress(OSError):
        with open(f"{place}/left", "w") as file:
            file.write("x")
for name in ("null", "zero", "full", "random", "urandom", "tty", "pts/ptmx"):
    for change in (lambda: os.utime(f"/dev/{name}", (1234, 1234)), lambda: os.chmod(f"/dev/{name}", 0o604)):
        with suppress(OSError):
            change()
libc.shmget(4711, 4096, 0o1666)
libc.semget(4711, 1, 0o1666)
for root, _, names in os.walk("/proc/sys"):
    for name in names:
        with suppress(OSError):
            with open(f"{root}/{name}", "w") as file:
                file.write("4711")
"""
FIND = """
for place in PLACES:
    if os.path.exists(f"{place}/left"):
        broken(f"{place}/left")
for name in ("null", "zero", "full", "random", "urandom", "tty", "pts/ptmx"):
    about = os.stat(f"/dev/{name}") if os.path.exists(f"/dev/{name}") else None
    if about is not None and (about.st_mtime == 1234 or about.st_mode & 0o777 == 0o604):
        broken(f"/dev/{name} was changed")
if libc.shmget(4711, 4096, 0o666) >= 0 or libc.semget(4711, 1, 0o666) >= 0:
    broken("shared memory")
for root, _, names in os.walk("/proc/sys"):
    for name in names:
        try:
            with open(f"{root}/{name}") as file:
                found = "4711" in file.read().split()
        except (OSError, ValueError):
            continue
        if found:
            broken(f"{root}/{name}")
"""
SLEEP = "time.sleep(1000)"
LATE = """
import atexit, threading
atexit.register(time.sleep, 1000)
threading.Thread(target=time.sleep, args=(1000,)).start()
sys.exit(0)
"""
SILENT = """
for fd in range(3, 64):
    with suppress(OSError):
        os.close(fd)
os.close(0); os.close(1); os.close(2)
time.sleep(1000)
"""
BUSY = """
for number in range(1, 32):
    with suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
OUTSIDE = """
for place in ("/usr", "/usr/bin", "/etc", "/var/tmp", "/root", "/", facts["folder"], os.path.dirname(facts["secret"])):
    attempt(place, lambda: open(f"{place}/birl-hostile", "w").close() or "written")
for place in (facts["secret"], "/usr/bin/env"):
    attempt(f"chmod {place}", lambda: os.chmod(place, 0o777) or "changed")
attempt("remove", lambda: os.remove(facts["secret"]) or "removed")
"""

ATTACKS = (
    Attack(name="fork bomb", program=FORK_BOMB),
    Attack(name="memory, one process", program=MEMORY),
    Attack(name="memory over children", program=MEMORY_OF_CHILDREN),
    Attack(name="memory in memory files", program=MEMORY_IN_FILES),
    Attack(name="disk fill", program=DISK),
    Attack(name="files without end", program=FILES),
    Attack(name="files below deep folders", program=DEEP),
    Attack(name="write outside", program=OUTSIDE),
    Attack(name="network: loopback, unix, other", program=NETWORK),
    Attack(name="host secrets and environment", program=SECRETS),
    Attack(name="core_pattern, devices, kernel calls", program=KERNEL),
    Attack(name="signals to outside", program=SIGNALS),
    Attack(name="the watching process", program=WATCHER),
    Attack(name="breaking the watching process", program=BREAKING, endings=("output", "timeout")),
    Attack(name="daemons that survive", program=DAEMON),
    Attack(name="huge output", program=OUTPUT, endings=("output", "timeout")),
    Attack(name="nested namespaces, mounts", program=NAMESPACES),
    Attack(
        name="links in collected files",
        program=LINKS,
        collect=("secret", "etc/passwd", "pipe", "environ", "up/x", "hard", "twice", "main.py"),
    ),
    Attack(name="something left for the next run", program=PLACES + LEAVE, after=START + PLACES + FIND),
    Attack(name="sleeping forever", program=SLEEP, endings=("timeout",), limits=SHORT),
    Attack(name="closing stdout, then sleeping", program=SILENT, endings=("timeout",), limits=SHORT),
    Attack(name="threads and exit handlers that stay", program=LATE, endings=("timeout",), limits=SHORT),
    Attack(name="busy, all signals ignored", program=BUSY, endings=("timeout",)),
)
