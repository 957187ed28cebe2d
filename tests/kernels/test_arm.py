"""The kernels have no instructions of one processor family that another would not compile. `make check-arm` runs their
tests on an emulated ARM processor."""

import shutil
import subprocess
from pathlib import Path

import pytest

from birl.kernels import compiling
from birl.kernels.instructions import ARM

COMPILER = "aarch64-linux-gnu-gcc"


def compiles() -> bool:
    """Whether there is a cross compiler, and its C library."""
    command = [COMPILER, "-xc", "-include", "math.h", "-fsyntax-only", "-"]
    return bool(shutil.which(COMPILER)) and subprocess.run(command, input=b"", capture_output=True).returncode == 0


@pytest.mark.skipif(not compiles(), reason="no cross compiler with a C library: make setup-packages")
@pytest.mark.parametrize("rounded", [True, False])
def test_they_compile_for_arm(rounded: bool, tmp_path: Path) -> None:
    command = [COMPILER, *compiling.FLAGS, f"-march={ARM['neon'].march}", "-DHEAD_DIM=64", *["-DBF16"] * rounded]
    sources = map(str, compiling.SOURCES)
    done = subprocess.run([*command, "-o", str(tmp_path / "k.so"), *sources, "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    header = (tmp_path / "k.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18:20] == b"\xb7\x00"  # EM_AARCH64
