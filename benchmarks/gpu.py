"""Everything about one GPU in one command, under 9 minutes: decoding, training, a whole GRPO step, mismatch, memory.

    python -m benchmarks.gpu --out benchmarks/results
    python -m benchmarks.gpu --device cpu --tiny          the same code on a CPU, in seconds: figures mean nothing

Models are random, made on the device, with the shapes of real ones; nothing is downloaded. A section that fails prints
its error in the table, the others go on, and the exit status is 1. Sections stop starting new cases when the time is
over (`--minutes`). Needs torch, transformers and this folder; docs/gpu.md says what each figure is.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu_bench import NOMINAL, SHAPES, Bench
from benchmarks.gpu_decode import decode
from benchmarks.gpu_step import grpo, trl
from benchmarks.gpu_training import training
from birl.models.fused import has_triton
from birl.models.fused_decoder import fused_for


def limits(bench: Bench) -> None:
    """Bandwidth by a copy (bytes read and written), arithmetic by one large product."""
    size = bench.sizes.copied
    a, b = torch.empty(2, size // 2, dtype=torch.uint8, device=bench.device).unbind()
    a.zero_()
    bench.bandwidth = size / bench.seconds(lambda: b.copy_(a), 10)
    n = bench.sizes.matrix
    x, y = torch.randn(2, n, n, device=bench.device).to(torch.bfloat16).unbind()
    bench.flops = 2 * n**3 / bench.seconds(lambda: x @ y, 10)
    known = next((v for k, v in NOMINAL.items() if k in bench.name), None)
    bench.add("machine", "copy, read + written", f"{bench.bandwidth / 1e12:.3f} TB/s",
              share=known and bench.bandwidth / known[1], note="share of the data sheet's")  # fmt: skip
    bench.add("machine", f"bf16 product {n}^3", f"{bench.flops / 1e12:.1f} TFLOP/s",
              share=known and bench.flops / known[0], note="share of the data sheet's")  # fmt: skip


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "machine": limits, "decode": decode, "training": training, "grpo": grpo, "trl": trl,
}  # fmt: skip


def header(bench: Bench) -> str:
    import transformers

    parts = [f"PyTorch {torch.__version__}", f"transformers {transformers.__version__}"]
    if has_triton():
        import triton

        parts.append(f"Triton {triton.__version__}")
    return ", ".join([date.today().isoformat(), bench.name, *parts])


def table(bench: Bench, markdown: bool) -> str:
    lines = [["section", "case", "value", "share", "goal", "note"]]
    for r in bench.rows:
        shares = ("" if x is None else f"{x:.2f}" for x in (r.share, r.goal))
        lines.append([r.section, r.case, r.value, *shares, r.note])
    if markdown:
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([header(bench), "", rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([header(bench), *texts])


def checks(bench: Bench) -> Iterator[str]:
    """What silently makes figures meaningless."""
    if bench.device.type == "cuda":
        model = bench.model(bench.models[0])
        if fused_for(model) is None:
            yield "the fused decoder does not take this model: no graphs, everything runs through transformers' forward"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny sizes")
    parser.add_argument("--models", default="qwen2-0.5b,qwen2-1.5b", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing new after this")
    parser.add_argument("--json", help="write every figure into this file")
    parser.add_argument("--out", help="folder for gpu.md and gpu.json")
    args = parser.parse_args()
    bench = Bench(args)
    failed = 0
    wanted = args.sections.split(",")
    for name in dict.fromkeys(["machine", *wanted]):  # the others are compared with the machine's limits
        try:
            if name == "machine":
                for problem in checks(bench):
                    bench.add("machine", "warning", problem)
            SECTIONS[name](bench)
        except Exception as error:
            failed = 1
            traceback.print_exc()
            text = str(error).strip().splitlines()
            bench.add(name, "FAILED", type(error).__name__, note=text[0][:200] if text else "")
        bench.clean()
    bench.compute.shutdown()
    figures = {"header": header(bench), "rows": [asdict(row) for row in bench.rows]}
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        Path(args.out, "gpu.json").write_text(json.dumps(figures, indent=1) + "\n")
        Path(args.out, "gpu.md").write_text(table(bench, markdown=True) + "\n")
    print(table(bench, markdown=True) + "\n\n" + table(bench, markdown=False))
    return failed


if __name__ == "__main__":
    sys.exit(main())
