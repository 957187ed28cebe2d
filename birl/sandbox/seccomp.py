"""A seccomp filter, assembled by hand: the system calls that a program in the sandbox is refused.

Not with libseccomp, because it is installed inside of the sandbox, by an interpreter without packages, and because a
list of refused calls needs only four instructions of BPF: load, compare, jump, return.
"""

import platform
import struct

from birl.errors import BirlError

# Numbers from the kernel's tables: arch/x86/entry/syscalls/syscall_64.tbl, and include/uapi/asm-generic/unistd.h, which
# arm64 uses. From 424 on they are the same everywhere.
X86_64 = {
    "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "unshare": 272,
    "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "add_key": 248, "request_key": 249,
    "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246, "kexec_file_load": 320,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "reboot": 169, "swapon": 167, "swapoff": 168,
    "syslog": 103, "acct": 163, "quotactl": 179, "name_to_handle_at": 303, "open_by_handle_at": 304, "iopl": 172,
    "ioperm": 173, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "setpgid": 109, "setsid": 112, "kill": 62,
    "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "prlimit64": 302, "setpriority": 141,
    "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251,
    "ioctl": 16, "clone": 56, "memfd_create": 319, "sched_setaffinity": 203, "sched_setscheduler": 144,
    "chmod": 90, "fchmodat": 268, "chown": 92, "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189,
    "removexattr": 197, "lremovexattr": 198, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
    "socketpair": 53, "connect": 42, "bind": 49, "listen": 50, "fcntl": 72, "truncate": 76, "inotify_init": 253,
    "inotify_init1": 294, "fanotify_init": 300, "io_setup": 206, "sync": 162, "syncfs": 306,
}  # fmt: skip
ARM64 = {
    "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "unshare": 97,
    "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "add_key": 217, "request_key": 218,
    "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104, "kexec_file_load": 294,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "reboot": 142, "swapon": 224, "swapoff": 225,
    "syslog": 116, "acct": 89, "quotactl": 60, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "setpgid": 154, "setsid": 157, "kill": 129,
    "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "prlimit64": 261, "setpriority": 140,
    "sched_setparam": 118, "sched_setattr": 274, "ioprio_set": 30,
    "ioctl": 29, "clone": 220, "memfd_create": 279, "sched_setaffinity": 122, "sched_setscheduler": 119,
    "fchmodat": 53, "fchownat": 54,
    "setxattr": 5, "lsetxattr": 6, "removexattr": 14, "lremovexattr": 15, "utimensat": 88,
    "socketpair": 199, "connect": 203, "bind": 200, "listen": 201, "fcntl": 25, "truncate": 45,
    "inotify_init1": 26, "fanotify_init": 262, "io_setup": 0, "sync": 81, "syncfs": 267,
}  # fmt: skip
EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_madvise": 440,
    "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip
MACHINES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, ARM64)}  # AUDIT_ARCH_*

# io_uring would bypass the filter; clone3 passes its flags by pointer, so libc must use clone.
REFUSED = (
    *("socket", "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "add_key", "request_key", "keyctl", "bpf", "perf_event_open"),
    *("userfaultfd", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot"),
    *("swapon", "swapoff", "syslog", "acct", "quotactl", "quotactl_fd", "name_to_handle_at", "open_by_handle_at"),
    *("iopl", "ioperm", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret"),
    *("connect", "bind", "listen"),  # not needed by a pair of sockets, and reachable or visible outside
    *("inotify_init", "inotify_init1", "fanotify_init"),  # they report file accesses of others
    *("io_setup", "sync", "syncfs"),  # they use resources shared by the whole machine
)
# Without a namespace that ends all processes: no process may leave the group or outlive it.
REFUSED_WITHOUT_NAMESPACES = ("setsid", "setpgid")
SHARED_MEMORY = ("shmget", "semget", "msgget", "mq_open")  # outlives its creators
# Not covered by Landlock; a program with the user's id could apply them to the user's files.
OF_OWNERS = (
    *("chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "setxattr", "lsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "removexattrat", "utime", "utimes", "futimesat", "utimensat", "truncate"),
)
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
# Limits and priorities of other processes: the monitor has the program's user id. 0 is the caller itself.
OF_THE_CALLER = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
PRIORITIES = ("setpriority", "ioprio_set")  # of a process, a group or a user

NEW_NAMESPACES = 0x7E020080  # CLONE_NEW: USER PID NET IPC UTS CGROUP NS TIME
CONTROLS = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI and TIOCLINUX type into a terminal; FIOSETOWN, SIOCSPGRP
DUTIES = (8, 10, 15, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to anybody; F_NOTIFY: what happens in a folder
NO_STREAM = 0xE  # the bits of SOCK_DGRAM and similar types, which can send to an address without a connection

EPERM, ENOSYS = 1, 38
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
UNLESS = -EQUAL  # of a comparison: refuse unequal values
NUMBER, ARCH, FIRST, SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data; the low half of 64-bit arguments


def assemble(
    *,
    namespaces: bool,
    ipc: bool = True,
    signals: bool = True,
    own_user: bool = True,
    counted: bool = True,
    machine: str = "",
) -> bytes:
    """The filter as an array of struct sock_filter. `namespaces`: the run has its own, at least of processes. `ipc`:
    also of IPC. `signals`: namespaces, another user or Landlock keep signals inside. `own_user`: the program's user id
    owns nothing. `counted`: a control group counts memory, including unnamed files."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise BirlError(f"there is no seccomp filter for {machine}, only for {', '.join(MACHINES)}.")
    audit, table = MACHINES[machine]
    table = {**table, **EVERYWHERE}
    names = [*REFUSED, *(() if namespaces else REFUSED_WITHOUT_NAMESPACES), *(() if signals else SIGNALS)]
    names += SHARED_MEMORY if not (namespaces and ipc) else ()
    names += [*(() if own_user else OF_OWNERS), *(() if counted else ("memfd_create",))]
    program = [
        _op(LOAD, ARCH), _op(EQUAL, audit, skip=1), _op(RETURN, KILL),  # 32-bit calls have other numbers
        _op(LOAD, NUMBER), *_refuse(AT_LEAST, 0x40000000, ENOSYS),  # as have those of x32
        *_refuse(EQUAL, table["clone3"], ENOSYS),
    ]  # fmt: skip
    for name in names:
        if name in table:
            program += _refuse(EQUAL, table[name], EPERM)
    program += _argument(table["clone"], FIRST, ANY_BIT, (NEW_NAMESPACES,))
    program += _argument(table["ioctl"], SECOND, EQUAL, CONTROLS)
    program += _argument(table["fcntl"], SECOND, EQUAL, DUTIES)
    program += _argument(table["socketpair"], SECOND, ANY_BIT, (NO_STREAM,))
    for name in OF_THE_CALLER:
        program += _argument(table[name], FIRST, UNLESS, (0,))
    for name, kind in zip(PRIORITIES, (0, 1), strict=True):  # PRIO_PROCESS, IOPRIO_WHO_PROCESS
        program += _argument(table[name], FIRST, UNLESS, (kind,)) + _argument(table[name], SECOND, UNLESS, (0,))
    return b"".join([*program, _op(RETURN, ALLOW)])


def _op(code: int, value: int, skip: int = 0, other: int = 0) -> bytes:
    """One instruction. For a comparison, `skip` and `other`: instructions to skip if it is true, and if it is false."""
    return struct.pack("=HBBI", code, skip, other, value)


def _refuse(compare: int, value: int, errno: int) -> list[bytes]:
    test = _op(-compare, value, skip=1) if compare < 0 else _op(compare, value, other=1)
    return [test, _op(RETURN, ERRNO | errno)]


def _argument(number: int, place: int, compare: int, values: tuple[int, ...]) -> list[bytes]:
    """Refuse a call if its argument has one of the values; then load the call's number again."""
    tests = [op for value in values for op in _refuse(compare, value, EPERM)]
    return [_op(EQUAL, number, other=len(tests) + 2), _op(LOAD, place), *tests, _op(LOAD, NUMBER)]
