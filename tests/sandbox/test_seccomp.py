"""The filter, run by a small interpreter of BPF: which calls it lets through, on both machines."""

import struct

import pytest

from birl.errors import BirlError
from birl.sandbox import seccomp

ALLOW, KILL, EPERM, ENOSYS = seccomp.ALLOW, seccomp.KILL, seccomp.ERRNO | 1, seccomp.ERRNO | 38
TABLES = {"x86_64": seccomp.X86_64, "aarch64": seccomp.ARM64}


def outcome(program: bytes, number: int, *args: int, arch: int) -> int:
    """What the kernel would answer."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *args, *[0] * (6 - len(args)))
    lines = list(struct.iter_unpack("=HBBI", program))
    place, loaded = 0, 0
    tests = {
        seccomp.EQUAL: lambda value: loaded == value,
        seccomp.AT_LEAST: lambda value: loaded >= value,
        seccomp.ANY_BIT: lambda value: bool(loaded & value),
    }
    while True:
        code, skip, other, value = lines[place]
        place += 1
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            loaded = struct.unpack_from("=I", data, value)[0]
        else:
            place += skip if tests[code](value) else other


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def ask(machine: str, name: str | int, *args: int, **options: bool) -> int:
    arch, table = seccomp.MACHINES[machine]
    number = name if isinstance(name, int) else {**table, **seccomp.EVERYWHERE}[name]
    program = seccomp.assemble(machine=machine, **{"namespaces": True, **options})
    return outcome(program, number, *args, arch=arch)


def test_ordinary_calls_pass(machine: str) -> None:
    for number in {"x86_64": (0, 1, 2, 9, 39, 57, 59, 60, 231), "aarch64": (56, 63, 64, 93, 94, 172, 221, 222)}[
        machine
    ]:
        assert ask(machine, number) == ask(machine, number, namespaces=False, signals=False, own_user=False) == ALLOW


def test_what_is_always_refused(machine: str) -> None:
    assert {ask(machine, name) for name in seccomp.REFUSED if name in TABLES[machine]} == {EPERM}
    assert ask(machine, "clone3") == ENOSYS and ask(machine, 0x40000001) == ENOSYS


def test_threads_and_children_pass_but_namespaces_do_not(machine: str) -> None:
    assert ask(machine, "clone", 0x003D0F00) == ask(machine, "clone", 17) == ALLOW  # a thread, and fork
    for bit in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(machine, "clone", bit | 17) == EPERM
    assert ask(machine, "ioctl", 1, 0x5401) == ALLOW and ask(machine, "ioctl", 1, 0x5412) == EPERM


def test_what_namespaces_would_contain(machine: str) -> None:
    for name in ("setsid", "shmget"):
        assert (ask(machine, name), ask(machine, name, namespaces=False)) == (ALLOW, EPERM)
    assert ask(machine, "shmget", ipc=False) == EPERM
    assert ask(machine, "ioctl", 1, 0x5412, namespaces=False) == EPERM
    assert (ask(machine, "kill"), ask(machine, "kill", signals=False)) == (ALLOW, EPERM)
    assert (ask(machine, "fchmodat"), ask(machine, "fchmodat", own_user=False)) == (ALLOW, EPERM)
    assert (ask(machine, "memfd_create"), ask(machine, "memfd_create", counted=False)) == (ALLOW, EPERM)


@pytest.mark.parametrize("namespaces", [True, False])
def test_limits_and_priorities_of_the_caller_alone(machine: str, namespaces: bool) -> None:
    for name in seccomp.OF_THE_CALLER:
        assert [ask(machine, name, pid, namespaces=namespaces) for pid in (0, 1, 77)] == [ALLOW, EPERM, EPERM], name
    for name, own in zip(seccomp.PRIORITIES, (0, 1), strict=True):
        asked = [(own, 0), (own, 1), (own + 1, 0), (3, 0)]
        assert [ask(machine, name, *words, namespaces=namespaces) for words in asked] == [ALLOW, *[EPERM] * 3], name


def test_calls_of_another_machine_end_the_program(machine: str) -> None:
    program = seccomp.assemble(namespaces=True, machine=machine)
    assert outcome(program, 1, arch=0x40000003) == KILL  # i386, whose numbers mean other calls


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(BirlError, match="no seccomp filter for riscv64"):
        seccomp.assemble(namespaces=True, machine="riscv64")
