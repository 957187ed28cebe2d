"""Compiles the kernels, once for each source, compiler and processor, into a cache."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from birl.cache import alone, cache_folder, sweep
from birl.kernels.instructions import NATIVE, flags, marches, processor

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.c"))
FLAGS = ["-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fvisibility=hidden", "-w"]


def problem() -> str:
    """Reason why this machine has no kernels; empty if it has. Raises `BirlError` for an invalid BIRL_ISA."""
    if os.environ.get("BIRL_KERNELS", "1") == "0":
        return "switched off by BIRL_KERNELS=0"
    if not sys.platform.startswith("linux"):
        return "only built on Linux"
    if compiler() is None:
        return "no C compiler (install gcc, or set CC)"
    try:
        build(torch.bfloat16, 64, marches()[0])
    except (OSError, subprocess.SubprocessError) as error:
        return f"they do not compile: {error}"
    return ""


def compiler() -> str | None:
    wanted = os.environ.get("CC")
    return next((path for name in (wanted, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)


def build(dtype: torch.dtype, head_dim: int, march: str = NATIVE) -> Path:
    """Compile, unless cached: about a second. Raises `OSError` or `SubprocessError`."""
    command = [
        compiler() or "cc",
        *FLAGS,
        f"-march={march}",
        f"-DHEAD_DIM={head_dim}",
        *(["-DBF16"] if dtype == torch.bfloat16 else []),
    ]
    identity = hashlib.sha256(repr((command, _version(command[0]), processor(), sorted(flags()))).encode())
    for file in (*SOURCES, *sorted(HERE.glob("*.h"))):
        identity.update(file.read_bytes())
    root = cache_folder("kernels")
    target = root / f"{identity.hexdigest()[:24]}.so"
    if intact(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with alone(target):
        if intact(target):  # another process has compiled them meanwhile
            return target
        if target.exists():
            print(f"birl: {target} is damaged.", file=sys.stderr)
        sweep(root, "tmp*")
        began = time.monotonic()
        what = f"{str(dtype).removeprefix('torch.')} and heads of {head_dim}"
        print(f"birl: compiling kernels for {what}, once for this processor,", file=sys.stderr, end=" ", flush=True)
        try:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                made = Path(folder, "kernels.so")
                whole = [*command, "-o", str(made), *map(str, SOURCES), "-lm"]
                done = subprocess.run(whole, capture_output=True, text=True, timeout=600)
                if done.returncode:
                    raise OSError(next(iter(done.stderr.strip().splitlines()), "the compiler failed"))
                data = made.read_bytes()
                made.write_bytes(data + hashlib.sha256(data).digest())
                made.replace(target)
        finally:
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return target


def intact(file: Path) -> bool:
    """Whether a cached file ends with the SHA-256 of the rest. A part of one would end the process when it is loaded,
    and other bytes would compute something else."""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return data[-32:] == hashlib.sha256(data[:-32]).digest()


def _version(program: str) -> tuple[int, int] | None:
    """Size and time of the compiler's file: another version of it may round differently."""
    try:
        file = Path(shutil.which(program) or program).stat()
    except OSError:
        return None
    return file.st_size, file.st_mtime_ns
