"""A container's limits count, whichever version of control groups it has."""

import os
from pathlib import Path

import pytest

from birl import allocator

GIB = 2**30
V2, V1 = "0::/a/b\n", "9:name=systemd:/\n4:memory:/a/b\n1:cpu,cpuacct:/a/b\n0::/\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores and 100 GiB, of which 80 are free."""
    monkeypatch.setattr(allocator, "PROC", tmp_path / "proc")
    monkeypatch.setattr(allocator, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    write(tmp_path, "proc/meminfo", f"MemTotal: {100 * 2**20} kB\nMemAvailable: {80 * 2**20} kB\n")
    return tmp_path


def write(folder: Path, name: str, text: object) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}".rstrip() + "\n" if text else "")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {}, 64),
        (V2, {"a/b/cpu.max": "max 100000"}, 64),
        (V2, {"a/b/cpu.max": "800000 100000"}, 8),
        (V2, {"a/b/cpu.max": "800000 100000", "a/cpu.max": "250000 100000"}, 2),
        (V2, {"cpu.max": "300000 100000"}, 3),  # in a container the own folder is the top
        (V2, {"unified/a/b/cpu.max": "400000 100000"}, 4),
        (V2, {"a/b/cpu.max": "50000 100000"}, 1),
        (V2, {"a/b/cpu.max": "99999900000 100000"}, 64),
        (V2, {"a/b/cpu.max": "what"}, 64),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": -1, "cpu/a/b/cpu.cfs_period_us": 100000}, 64),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": 600000, "cpu/a/b/cpu.cfs_period_us": 100000}, 6),
        (V1, {"cpu/cpu.cfs_quota_us": 150000, "cpu/cpu.cfs_period_us": 100000}, 1),
        ("", {"cpu.max": "300000 100000"}, 64),
    ],
)
def test_a_quota_of_processor_time_is_so_many_cores(system: Path, groups: str, files: dict[str, object], expected: int):
    write(system, "proc/self/cgroup", groups)
    for name, text in files.items():
        write(system / "groups", name, text)
    assert allocator.cores() == expected


@pytest.mark.parametrize(
    ("groups", "files", "total", "free"),
    [
        (V2, {}, 100, 80),
        (V2, {"a/b/memory.max": "max", "a/b/memory.current": 9 * GIB}, 100, 80),
        (V2, {"a/b/memory.max": 16 * GIB, "a/b/memory.current": 9 * GIB}, 16, 7),
        (V2, {"a/memory.max": 16 * GIB, "a/memory.current": 9 * GIB, "a/memory.stat": f"inactive_file {GIB}"}, 16, 8),
        (
            V1,
            {"memory/a/b/memory.limit_in_bytes": 9223372036854771712, "memory/a/b/memory.usage_in_bytes": GIB},
            100,
            80,
        ),
        (V1, {"memory/memory.limit_in_bytes": 8 * GIB, "memory/memory.usage_in_bytes": 9 * GIB}, 8, 0),
    ],
)
def test_a_limit_of_memory_counts(system: Path, groups: str, files: dict[str, object], total: int, free: int) -> None:
    write(system, "proc/self/cgroup", groups)
    for name, text in files.items():
        write(system / "groups", str(Path(name).with_name("memory.stat")), "cache 0")
        write(system / "groups", name, text)
    assert allocator.system_memory() == (total * GIB, free * GIB)


def test_threads_are_no_more_than_the_quota(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from birl.parallel.machine import compute_thread

    write(system, "proc/self/cgroup", V2)
    write(system / "groups", "a/b/cpu.max", "100000 100000")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for variable, threads, expected in (("", 0, 1), ("2", 0, 2), ("", 2, 2)):
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
            with compute_thread(threads) as pool:
                assert pool.submit(torch.get_num_threads).result() == expected
    finally:
        torch.set_num_threads(before)
