"""The whole table for the current machine, one benchmark after the other: about two hours, and twice that for a machine
that is busy now and then, as results without a verdict are not kept.

    python -m benchmarks.all [NAME ...] [--again]    figures into benchmarks/results/<processor>/; existing ones stay
    python -m benchmarks.all --table                 existing figures of all processors, as in the README
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import BUSY, NO_VERDICT, RESULTS, ROOT, STARTED, processor, taken_by_others

ROLLOUT = "rollout --peer vllm"


@dataclass(frozen=True)
class Row:
    """`words`: of the command; `what`: text in the table."""

    words: str
    what: str


ROWS = {
    "grpo_step": Row("grpo_step --goal 5", "GRPO step against TRL"),
    "grpo_step_long": Row(
        "grpo_step --group 16 --prompt-tokens 512 --rounds 1 --steps 2 --goal 15", "GRPO step, prompts of 512 tokens"
    ),
    "grpo_step_float32": Row("grpo_step --precision float32 --rounds 3 --steps 3 --goal 4", "GRPO step in float32"),
    "rollout_vllm": Row(ROLLOUT, "sampling against vLLM"),
    "rollout_few": Row(f"{ROLLOUT} --batches 1 4 --group 4 --goal 1.6", "sampling against vLLM, few sequences"),
    "rollout_generate": Row("rollout --rounds 3", "sampling against transformers' generate"),
    "agents_vllm": Row("agents --peer vllm", "agents of 8 turns against vLLM with its prefix cache"),
    "learning": Row("learning", "seconds to a reward of 0.95 against TRL"),
    "ceiling": Row("ceiling", "share of what the products alone allow"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ROWS)}; all of them without one")
    parser.add_argument("--again", action="store_true", help="also what is there")
    parser.add_argument("--table", action="store_true", help="only show what is there")
    args = parser.parse_args()
    if wrong := [name for name in args.names if name not in ROWS]:
        parser.error(f"there is no {wrong[0]}, but {', '.join(ROWS)}")
    if args.table:
        print(table(RESULTS))
        return 0
    time.sleep(max(5.0 - (time.monotonic() - STARTED[0]), 0.0))
    if (others := taken_by_others()) > BUSY:
        print(f"other work takes {others:.1f} cores of this machine: wait until it is quiet", file=sys.stderr)
        return NO_VERDICT
    folder = RESULTS / processor()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.names or ROWS:
        if args.again or not (folder / f"{name}.json").exists():
            failed = max(failed, measured(name, folder))
    print(table(RESULTS))
    return failed


def measured(name: str, folder: Path) -> int:
    """Run one benchmark; keeps its figures if they are a verdict, whether its goal is reached or not."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "figures.json")
        command = [sys.executable, "-m", *f"benchmarks.{ROWS[name].words}".split(), "--json", str(file)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status in (0, 1) and file.exists():
            (folder / f"{name}.json").write_text(file.read_text())
    return status


def table(results: Path) -> str:
    """Ratios (times better than the peer) by processor, as Markdown."""
    folders = sorted(path for path in results.iterdir() if any((path / f"{name}.json").exists() for name in ROWS))
    lines = [f"| | {' | '.join(path.name for path in folders)} |", "|---" * (len(folders) + 1) + "|"]
    for name, row in ROWS.items():
        files = [path / f"{name}.json" for path in folders]
        cells = [" ".join(ratios(json.loads(file.read_text()))) if file.exists() else "" for file in files]
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(figures: dict[str, Any]) -> list[str]:
    """Ratios of one result: one, or one for each number of sequences."""
    if "ratio" in figures:
        return [f"{figures['ratio']:.2f}"]
    if "tokens_per_s" in figures:
        each = {int(n): median(ours) / median(peer) for n, (ours, peer) in figures["tokens_per_s"].items()}
        return [f"{ratio:.2f} ({n})" for n, ratio in sorted(each.items())]
    rows = [(f"({n})", row) for n, row in figures["decoding"].items()] + [("(training)", figures["training"])]
    return [f"{median(row['real']) / row['ceiling']:.2f} {what}" for what, row in rows]


if __name__ == "__main__":
    sys.exit(main())
