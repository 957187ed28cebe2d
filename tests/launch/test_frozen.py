"""The file system of a run stands still for a while, as one over a network does whose server is gone: whoever writes
waits in the kernel, where no signal reaches it. Then it is back, and nobody must have drawn the wrong conclusion.

It is ext4 in a file, frozen with `fsfreeze`: that takes root and loop devices."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from birl.cli import main
from birl.rollout.ledger import audit
from tests.launch.jobs import ENGINES, SMALL, Launched, alive

STANDS_STILL = float(os.environ.get("BIRL_FROZEN", "12"))  # s; longer than two beats of the engines' names
SIZE = 256  # MiB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE << 20)
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    if mkfs is None or subprocess.run([mkfs, "-q", image], capture_output=True).returncode:
        pytest.skip("mkfs.ext4 is not there (apt-get install e2fsprogs)")
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("mounting a file needs root and a loop device")
    try:
        try:
            freeze(place)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("fsfreeze is not there, or not allowed")
        freeze(place, thaw=True)
        yield place
    finally:
        freeze(place, thaw=True)
        subprocess.run(["umount", "-l", place], check=True, timeout=30)


def freeze(place: Path, *, thaw: bool = False) -> None:
    if thaw and shutil.which("fsfreeze") is None:
        return
    subprocess.run(["fsfreeze", "-u" if thaw else "-f", place], capture_output=True, timeout=30, check=not thaw)


@pytest.mark.skipif(sys.platform != "linux", reason="file systems are frozen on Linux only")
def test_a_run_bears_that_its_file_system_stands_still(
    tiny: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run folder, names of the engines and new weights are all there; every step writes to it."""
    monkeypatch.setenv("BIRL_CACHE", str(disk / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = ("engine.count=2", "rollout.max_staleness=1", "weights.method=reload", "steps=100000")
    job = Launched("local", "rl", tiny, disk, *SMALL, *ENGINES, *words, "checkpoint.every=5", "checkpoint.keep_last=2")
    try:
        job.launch()
        job.wait(lambda: job.step > 7)
        processes = {job.state.pid, *job.pids()}
        assert len(processes) == 4
        began, step = time.monotonic(), job.step
        freeze(disk)
        time.sleep(STANDS_STILL)
        stood = job.step - step
        freeze(disk, thaw=True)
        thawed, step = time.monotonic(), job.step
        job.wait(lambda: job.step > step + 6)  # over a checkpoint
        again = time.monotonic() - thawed
        assert stood <= 1 and all(map(alive, processes)) and {job.state.pid, *job.pids()} == processes
        assert main(["stop", str(job.run)]) == 0
        found, steps = audit(job.run), [row["step"] for row in job.rows()]
        assert not found.problems and found.lives == 1 and steps == [*range(1, len(steps) + 1)]
        assert all(row.get("weights/gap", 0) == 0 for row in job.rows())
        with capsys.disabled():
            print(f"\n  stood still {thawed - began:.1f} s; seven steps further after {again:.1f} s")
            print(f"  tokens: {dict(found.tokens)}; load {os.getloadavg()}")
    finally:
        freeze(disk, thaw=True)
        job.end()
