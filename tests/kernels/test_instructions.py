"""Which instructions kernels are compiled for, and that every set of them gives what PyTorch gives."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from birl import doctor, kernels
from birl.errors import BirlError
from birl.kernels import compiling, instructions
from birl.kernels.instructions import INSTRUCTIONS, VARIABLE, marches, missing

ROOT = Path(__file__).parents[2]


def test_what_is_wanted_is_compiled_for_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    have = INSTRUCTIONS["avx512"].needs
    monkeypatch.setattr(instructions, "flags", lambda: have)
    assert marches() == ["native"] and missing("avx512_bf16") == ["avx512_bf16", "avx512_vnni"]
    for name, march in {"avx2": "haswell", "avx512": "skylake-avx512"}.items():
        monkeypatch.setenv(VARIABLE, name)
        assert marches() == [march]
    monkeypatch.setenv(VARIABLE, "amx")
    monkeypatch.setattr(compiling, "compiler", lambda: "cc")  # it does not come to that
    with pytest.raises(BirlError, match=r"BIRL_ISA=amx: this processor has no amx_bf16, amx_tile, avx512_bf16\. Leave"):
        kernels.load.__wrapped__(torch.bfloat16, 64)
    assert "BIRL_ISA=amx: this processor" in doctor._kernels(torch)[0].text
    monkeypatch.setenv(VARIABLE, "avx3")
    with pytest.raises(BirlError, match=r"BIRL_ISA=avx3: expected one of amx, .*Did you mean avx2\?"):
        marches()


def test_where_amx_is_not_granted_the_next_best_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have the flags and not the registers."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(instructions, "flags", lambda: INSTRUCTIONS["amx"].needs)
    monkeypatch.setattr(kernels, "problem", lambda: "")
    monkeypatch.setattr(kernels, "build", lambda dtype, head_dim, march: Path(march))
    monkeypatch.setattr(kernels.ctypes, "CDLL", str)

    def kernel(march: str, *_: object) -> str:
        if march == "native":
            raise OSError("the kernel does not grant AMX")
        return march

    monkeypatch.setattr(kernels, "Kernels", kernel)
    assert kernels.load.__wrapped__(torch.bfloat16, 64) == "cooperlake"


PRODUCT = """
#include "tile.h"
void both(const uint16_t *a, const uint16_t *b0, const uint16_t *b1, long blocks, float *sums) {
    product(a, 32, 64, b0, b1, TILE, blocks, sums, 32, 1);
}
"""


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize(("what", "most"), [("product", 4), ("elementwise", 1)])  # with what the loops begin and end
def test_sums_stay_in_registers(name: str, what: str, most: int, tmp_path: Path) -> None:
    """A vector that no register holds is kept in memory: with AVX2 products took 50 times as long."""
    compiler = compiling.compiler()
    if compiler is None or INSTRUCTIONS is not instructions.X86:
        pytest.skip("no C compiler for x86")
    file, assembly = Path(kernels.__file__).with_name(f"{what}.c"), tmp_path / "made.s"
    if what == "product":
        file = tmp_path / "product.c"
        file.write_text(PRODUCT)
    flags = [f for f in compiling.FLAGS if f != "-shared"]
    march = ["-DBF16", "-DHEAD_DIM=64", f"-march={INSTRUCTIONS[name].march}", f"-I{Path(kernels.__file__).parent}"]
    subprocess.run([compiler, *flags, *march, "-S", str(file), "-o", str(assembly)], check=True)
    lines = assembly.read_text().splitlines()
    computed = sum(bool(re.search(r"vfn?m(add|sub)\S*ps|vdpbf16ps|vmulps", line)) for line in lines)
    moved = sum("vmov" in line and bool(re.search(r"\(%r[sb]p\)", line)) for line in lines)
    assert computed > 0 and moved < most * computed


@pytest.mark.parametrize("name", [name for name in INSTRUCTIONS if name != "amx"])
def test_every_set_computes_the_same(name: str) -> None:
    """The tests of kernels, and those of the fused decoder, whose engine has the learner's bits."""
    if kernels.problem() or missing(name):
        pytest.skip(f"no C compiler, or no {name} here")
    files = ("tests/kernels/test_kernels.py", "tests/models/test_decoder.py")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=own | {VARIABLE: name}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
