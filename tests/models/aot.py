"""Compile every Triton kernel for a card that is not there, with the arguments that birl's own launchers give it:

    python -m tests.models.aot sm_90

Prints one JSON line for each binary: its kernel, element type, arguments, registers, bytes of stack (spilled registers)
and shared memory, read from what was compiled. Without TRITON_INTERPRET; triton's wheel has all that it needs.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

from birl.engine import truncation
from birl.kernels.tensors import PAGE
from birl.models import (
    digest_kernels,
    digests,
    fused,
    fused_kernels,
    logprobs,
    paged_kernels,
    paged_triton,
    sample_kernels,
)

#: H, K, width of a key and of a value: Qwen2.5 0.5B, Qwen2.5 7B, Llama 8B, Gemma, one key head for all, Phi-2, Phi-3,
#: DeepSeek-V3
ATTENTION = [
    (14, 2, 64, 64), (28, 4, 128, 128), (32, 8, 128, 128), (8, 4, 256, 256), (32, 1, 128, 128), (32, 32, 80, 80),
    (32, 32, 96, 96), (128, 128, 192, 128),
]  # fmt: skip
CUOBJDUMP = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"


class Card:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, name: str) -> None:
        amd = name.startswith("gfx")
        self.target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def tensor(kind: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def launches(kind: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls that launch every kernel in every specialisation that models of today need."""
    single, rows = torch.float32, 48
    norms = [(size, fused.LLAMA) for size in (128, 896, 1536, 4096, 8192)]
    for size, form in (*norms, (2560, fused.GEMMA), (4096, fused.OLMO)):
        x, rstd = tensor(kind, rows, size), tensor(single, rows)
        for other in (x, None):
            yield lambda x=x, other=other, form=form: fused.launch_add_norm(x, other, x[0], 1e-6, form)
            yield lambda x=x, r=rstd, other=other, form=form: fused.launch_norm_backward(x, x[0], r, x, other, form)
    for heads, kv_heads, size, wide in ATTENTION:
        qkv, turned = tensor(kind, rows, heads + 2 * kv_heads, size), heads + kv_heads
        halves = () if size != wide else (size // 2, size // 4)  # no fused layer has unequal widths
        for half, pairs in zip(halves, (False, size == 128), strict=False):
            angles = tensor(kind, rows, half)
            yield lambda q=qkv, a=angles, n=turned, p=pairs: fused.launch_rotary(q, a, a, n, 1.0, p)
        yield lambda h=heads, k=kv_heads, d=size, e=wide: attention(kind, h, k, d, e)
    for size, form in ((64, fused.LLAMA), (128, fused.LLAMA), (256, fused.GEMMA)):
        qkv, weight, angles = tensor(kind, rows, 48, size), tensor(kind, size), tensor(kind, rows, size // 2)
        how = fused.Heads(8, 1e-6, form)
        yield lambda q=qkv, w=weight, a=angles, h=how: fused.launch_heads(q, w, w, a, a, h)
        yield lambda q=qkv, w=weight, a=angles, h=how: fused.launch_heads_backward(q, w, w, a, a, q, h)
    places = tensor(torch.int64, rows)
    for shape in ((8, 128), (2, 64), (3, 96)):
        yield lambda s=shape: fused.launch_sum_copies(tensor(kind, rows, *s), places, places)
    for gelu in (False, True):
        yield lambda g=gelu: fused.launch_swiglu(tensor(kind, rows, 2 * 4864), g)
        yield lambda g=gelu: fused.launch_swiglu_backward(tensor(kind, rows, 2 * 4864), tensor(kind, rows, 4864), g)
    logits, grad, targets, one = (
        tensor(single, rows, 151_936), tensor(kind, rows, 151_936), tensor(torch.int64, rows), tensor(single, rows)
    )  # fmt: skip
    yield lambda: logprobs.launch_logprobs(logits, targets, 1.0, one, one, one)
    for by_logp, by_entropy in ((one, None), (None, one), (one, one)):
        yield lambda a=by_logp, b=by_entropy: logprobs.launch_logprobs_backward(
            logits, grad, targets, one, one, a, b, 0, 1.0
        )
    yield lambda: digests.launched(tensor(torch.uint8, digests.PIECE), tensor(torch.int64, 281))
    three = tensor(single, rows, 3)
    for words in (50_257, 151_936, 262_144):
        every = tensor(single, rows, words)
        for limits, given, room in ((None, None, 0), (three, None, 0), (three, targets, 0), (three, None, 1024)):
            yield lambda e=every, a=limits, b=given, c=room: truncation.launch_sample(e, one, one, a, b, c)


def attention(kind: torch.dtype, heads: int, kv_heads: int, size: int, wide: int) -> None:
    """Rows of two sequences alone, and others in tiles."""
    q, k, v = tensor(kind, 48, heads, size), tensor(kind, 48, kv_heads, size), tensor(kind, 48, kv_heads, wide)
    keys, values = (tensor(kind, 100, kv_heads, PAGE, x) for x in (size, wide))
    pages = paged_triton.Pages(keys, values, tensor(torch.int32, 48, 32), tensor(torch.int32, 48))
    rows = paged_triton.Rows([(0, 1, 70), (1, 46, 64), (47, 1, 9)])
    paged_triton.paged_attention(q, k, v, pages, 0.1, None, rows)


def figures(kernel: Any) -> dict[str, int]:
    """Registers, bytes of stack and of shared memory, from the compiled binary."""
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        count = {n: int(re.search(rf"\.{n}:\s+(\d+)", text)[1]) for n in ("vgpr_count", "vgpr_spill_count")}  # pyright: ignore
        return {"registers": count["vgpr_count"], "stack": count["vgpr_spill_count"] * 4, "shared": shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.check_output([CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
    count = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(count["REG"]), "stack": int(count["STACK"]) + int(count["LOCAL"]), "shared": shared}


def main(name: str) -> None:
    built: dict[int, Any] = {}
    compile_ = JITFunction.run

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """In place of a launch. A binary that was built before comes back as the same object."""
        kernel = compile_(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in built:
            built[id(kernel)] = kernel
            constants = {k: v for k, v in options.items() if k.isupper() or k.startswith("num_")}
            sizes = {n: a for n, a in zip(self.arg_names, args, strict=False) if isinstance(a, int)}
            line = {"kernel": self.__name__, "type": str(kind), "arguments": sizes | constants, **figures(kernel)}
            print(json.dumps(line), flush=True)
        return kernel

    JITFunction.run = build
    triton.runtime.driver.set_active(Card(name))
    for kind in (torch.bfloat16, torch.float32):
        for launch in launches(kind):
            launch()
    every = {
        n
        for m in (fused_kernels, paged_kernels, sample_kernels, digest_kernels)
        for n in vars(m)
        if n.endswith("_kernel")
    }
    missing = every - {kernel.metadata.name for kernel in built.values()}
    assert not missing, f"not compiled: {missing}"


if __name__ == "__main__":
    main(sys.argv[1])
