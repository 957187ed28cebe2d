"""All figures of one GPU in three commands of at most 10 minutes: decode, training, whole GRPO steps.

    python -m benchmarks.gpu --sections machine,decode,contexts,prefill --out benchmarks/results/gpu-decode
    python -m benchmarks.gpu --sections training,sampler,sleep,transfer --out benchmarks/results/gpu-training
    python -m benchmarks.gpu --sections grpo,trl,workload               --out benchmarks/results/gpu-step
    python -m benchmarks.gpu --predict --card h200     the limits by bytes and FLOPs, without a card
    python -m benchmarks.gpu --device cpu --tiny       the same code on a CPU: the figures mean nothing

Predictions are printed before the card is used; each row has them beside the measured figure. Models are random, made
on the device, with the shapes of real ones; nothing is downloaded. Each section is a separate process: one that fails,
hangs or breaks the card's context gets a row that says so, the others run, and the exit status is 1. Sections start no
new case after their part of `--minutes`, and are ended a minute later. docs/gpu.md explains each figure.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu_bench import SHAPES, Bench, Row
from benchmarks.gpu_decode import decode
from benchmarks.gpu_predicted import CPU, card, predictions
from benchmarks.gpu_serving import contexts, prefill, sampler, sleep, transfer, workload
from benchmarks.gpu_step import grpo, trl
from benchmarks.gpu_training import training
from birl.models.device import choose
from birl.models.fused import has_triton
from birl.models.fused_decoder import fused_for

GRACE = 60.0  # s after its time until a section is ended


def limits(bench: Bench) -> None:
    """Bandwidth by a copy (bytes read and written), arithmetic by one large product; notes what invalidates figures."""
    if bench.device.type == "cuda" and fused_for(bench.model(bench.models[0])) is None:
        note = "the fused decoder does not take this model: no graphs, all runs through transformers' forward"
        bench.add("machine", "warning", note=note)
    size = bench.sizes.copied
    a, b = torch.empty(2, size // 2, dtype=torch.uint8, device=bench.device).unbind()
    a.zero_()
    bench.add("machine", "copy, read + written", size / bench.seconds(lambda: b.copy_(a), 10) / 1e12)
    n = bench.sizes.matrix
    x, y = torch.randn(2, n, n, device=bench.device).to(torch.bfloat16).unbind()
    bench.add("machine", f"bf16 product {n}^3", 2 * n**3 / bench.seconds(lambda: x @ y, 10) / 1e12)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "machine": limits, "decode": decode, "contexts": contexts, "prefill": prefill, "training": training,
    "sampler": sampler, "grpo": grpo, "trl": trl, "workload": workload, "sleep": sleep,
    "transfer": transfer,
}  # fmt: skip


def header(name: str) -> str:
    import transformers

    parts = [f"PyTorch {torch.__version__}", f"transformers {transformers.__version__}"]
    if has_triton():
        import triton  # pyright: ignore[reportMissingImports]

        parts.append(f"Triton {triton.__version__}")
    return ", ".join([date.today().isoformat(), name, *parts])


def table(rows: list[Row], markdown: bool) -> str:
    lines = [["section", "case", "predicted", "measured", "unit", "ratio", "goal", "note"]]
    for r in rows:
        figures = ["" if math.isnan(x) else f"{x:,.4g}" for x in (r.predicted, r.measured)]
        shares = ["" if math.isnan(x) else f"{x:.2f}" for x in (r.ratio, r.goal)]
        lines.append([r.section, r.case, *figures, r.unit, *shares, r.note])
    if markdown:
        texts = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(x, widths, strict=True)).rstrip() for x in lines)


def apart(name: str, words: list[str], minutes: float) -> list[Row]:
    """Run a section in a separate process; returns its rows, and one with the error if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.gpu", *words, "--only", name, "--json", str(file)]
        try:
            done = subprocess.run(
                [*command, "--minutes", str(minutes)], stderr=subprocess.PIPE, text=True, timeout=60 * minutes + GRACE
            )
            code, text = done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            code, text = -1, f"{error.stderr or ''}\nended after {error.timeout:.0f} s"
        rows = [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []
    print(text, file=sys.stderr, end="", flush=True)
    if code:
        last = text.strip().splitlines() or [""]
        rows.append(Row(name, "FAILED", note=f"exit code {code}: {last[-1][:200]}"))
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--card", default="", help="whose data sheet predicts, such as h200; by default this device's")
    parser.add_argument("--predict", action="store_true", help="print the predictions for --card and end")
    parser.add_argument("--roofline", action="store_true", help="write the predictions of docs/gpu.md and end")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny sizes")
    parser.add_argument("--models", default="qwen2-0.5b,qwen2-1.5b", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing new after this")
    parser.add_argument("--out", help="folder for gpu.md and gpu.json")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a section, in this process
    parser.add_argument("--json", help=argparse.SUPPRESS)  # file for its rows
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.roofline:
        from benchmarks import gpu_roofline  # imports pytest

        gpu_roofline.write()
        return 0
    on_card = not args.predict and choose(args.device).type == "cuda"
    device = torch.cuda.get_device_name() if on_card else CPU
    predicted = predictions(args, card(args.card or device))
    if args.only:
        bench = Bench(args, predicted)
        SECTIONS[args.only](bench)
        bench.compute.shutdown()
        return 0
    print(f"predicted for {args.card or device}, from its data sheet:")
    print(table([Row(*at, unit=unit, predicted=figure) for at, (figure, unit) in predicted.items()], False), flush=True)
    if args.predict:
        return 0
    words = ["--device", args.device, "--models", args.models, "--card", args.card, *(["--tiny"] * args.tiny)]
    names, end = args.sections.split(","), time.monotonic() + 60 * args.minutes
    rows: list[Row] = []
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        rows += apart(name, words, max(end - time.monotonic(), 6.0) / 60 / left)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        figures = {"header": header(device), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
        Path(args.out, "gpu.json").write_text(json.dumps(figures, indent=1) + "\n")
        Path(args.out, "gpu.md").write_text(f"{header(device)}\n\n{table(rows, markdown=True)}\n")
    print(f"\n{header(device)}\n{table(rows, markdown=False)}")
    return int(any(row.case == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
