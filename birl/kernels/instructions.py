"""The instruction sets that kernels are compiled for, best first, and those of the processor."""

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from birl.errors import BirlError, did_you_mean

VARIABLE = "BIRL_ISA"
NATIVE = "native"  # all instruction sets that the compiler detects on this processor


@dataclass(frozen=True, slots=True)
class Instructions:
    """`march`: the compiler's name of a processor that has them; `needs`: the flags in /proc/cpuinfo without which a
    program that uses them is killed."""

    march: str
    needs: frozenset[str]


AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "adx"}
#: by the names that `gemm_start` returns (gemm.c)
X86 = {
    "amx": Instructions("sapphirerapids", AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"}),
    "avx512_bf16": Instructions("cooperlake", AVX512 | {"avx512_bf16", "avx512_vnni"}),
    "avx512": Instructions("skylake-avx512", AVX512),
    "avx2": Instructions("haswell", AVX2),
}
ARM = {"neon": Instructions("armv8-a", frozenset({"asimd"}))}
INSTRUCTIONS = ARM if platform.machine() in ("aarch64", "arm64") else X86


def marches() -> list[str]:
    """Targets to compile for, in the order of trials: that of `BIRL_ISA` if it is set, else this processor, and the
    next best if the operating system does not grant AMX. Raises `BirlError` for an unknown name, and for instructions
    that the processor lacks."""
    name, have = os.environ.get(VARIABLE, ""), flags()
    if not name:
        return [NATIVE, "cooperlake"] if "amx_bf16" in have else [NATIVE]
    if name not in INSTRUCTIONS:
        raise BirlError(
            f"{VARIABLE}={name}: expected one of {', '.join(INSTRUCTIONS)}.{did_you_mean(name, INSTRUCTIONS)}"
        )
    if lacking := missing(name):
        raise BirlError(f"{VARIABLE}={name}: this processor has no {', '.join(lacking)}. Leave {VARIABLE} out.")
    return [INSTRUCTIONS[name].march]


def best() -> str:
    """The best instruction set of the processor, or that of `BIRL_ISA`; empty if it has none of them."""
    return os.environ.get(VARIABLE, "") or next((name for name in INSTRUCTIONS if not missing(name)), "")


def missing(name: str) -> list[str]:
    """Flags of these instructions that the processor lacks."""
    return sorted(INSTRUCTIONS[name].needs - flags())


def flags() -> frozenset[str]:
    """Flags of this processor, by their names in Linux."""
    return frozenset(_fact("flags", "Features").split())


def processor() -> str:
    """Name of the processor."""
    return _fact("model name", "Processor") or platform.processor() or platform.machine()


def _fact(*names: str) -> str:
    return next((value for name, value in _facts().items() if name in names), "")


@cache
def _facts() -> dict[str, str]:
    """Entries of the first processor in /proc/cpuinfo: reading them for hundreds takes a while."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
