"""Distance of birl to this machine's limit: matrix products alone against real steps, SmolLM2-135M in bfloat16.

    python -m benchmarks.ceiling [--batches 16 32 64] [--rounds 5] [--threads 2] [--json FILE]
    python -m benchmarks.ceiling --tiny        a few seconds, to see that it runs

The ceiling is the time of only the products of one step (`benchmarks/products.py`), each shape by the fastest of birl's
kernel, oneDNN and torch.mm. `memory` is the rate if a step only read the weights once, from main memory. Beside it the
real figures of the same run: tokens per second of the engine while it only decodes, and one forward_backward of the
learner. Medians over the rounds; each measures everything, in one process.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import environment, machine, verdict

GOALS = {"decoding": 0.5, "training": 0.6}
CASE = 32
TINY = {"batches": [4, 8], "tokens": 8, "prompts": 1, "rounds": 1, "decoded": 8, "read": 64}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64], help="sequences decoded at once")
    parser.add_argument("--decoded", type=int, default=128, help="tokens of each, 8 answers to a prompt")
    parser.add_argument("--prompts", type=int, default=4, help="training: prompts, with")
    parser.add_argument("--prompt-tokens", type=int, default=45, help="tokens each, in decoding too, and")
    parser.add_argument("--group", type=int, default=4, help="answers each, of")
    parser.add_argument("--tokens", type=int, default=64, help="tokens: 4 x (45 + 4 x 64) = 1,204")
    parser.add_argument(
        "--read", type=int, default=1024, help="array for the memory's bandwidth [MiB]; beyond all caches"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help=f"as with {TINY}")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    return argparse.Namespace(**{**vars(args), **TINY}) if args.tiny else args


def main() -> int:
    args = arguments()
    os.environ.update(environment(args.threads))  # before torch is imported
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread(args.threads) as compute:
        rounds, facts = measure(args, compute)
    found = summary(rounds, facts)
    if args.json:
        text = json.dumps({**found, "facts": facts, "rounds": rounds, "machine": machine()}, indent=1)
        Path(args.json).write_text(text + "\n")
    show(found, facts)
    case = str(CASE if CASE in args.batches else args.batches[-1])
    slow = []
    for kind, unit in (("decoding", "tok/s"), ("training", "TFLOP/s")):
        row = found["decoding"][case] if kind == "decoding" else found["training"]
        name = f"{kind} {case} sequences" if kind == "decoding" else f"{kind} {facts['tokens']} tokens"
        options = {"goal": GOALS[kind], "unit": unit, "lower_is_better": False}
        slow.append(verdict(f"ceiling, {name} (peer: the ceiling)", row["real"], [row["ceiling"]], **options))
    return max(slow)


def measure(args: argparse.Namespace, compute: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Seconds and rates of each round, and facts about the work."""
    import torch

    from benchmarks import decoding, products, training
    from birl.config import schema
    from birl.engine.open import open_engine
    from birl.learner.learner import Learner
    from birl.learner.policy import load_policy
    from birl.models.decoder import decoder_for

    def there(function: Callable, *given: Any) -> Any:
        return compute.submit(function, *given).result()

    policy = there(load_policy, schema.Model(path=args.model), compute)
    learner = there(lambda: Learner(policy.model, dtype=torch.bfloat16))
    decoder = there(decoder_for, policy.model)
    if decoder is None:
        raise SystemExit("the ceiling is measured with birl's kernels, which do not run here: `birl doctor` says why")
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise SystemExit("the ceiling is measured beside oneDNN's bfloat16, which needs AVX-512")
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    sizes = args.group, args.prompt_tokens, args.tokens, vocabulary
    work = training.batches([s for i in range(args.prompts) for s in training.group(i, *sizes)])
    if len(work) != 1:
        raise SystemExit("these samples do not fit into one micro-batch: fewer or shorter ones")
    tokens, trained = len(work[0].tokens), len(work[0].source)
    steps = {str(rows): there(products.of_decoding, decoder, rows) for rows in args.batches}
    step = there(products.of_training, decoder, tokens, trained)
    engines = {str(n): open_engine(policy, schema.Engine(max_batch=n), policy.context, lambda: 0) for n in args.batches}

    def decode(rows: str) -> float:
        n = int(rows)
        asked = decoding.prompts(n, min(8, n), args.prompt_tokens, vocabulary)
        return decoding.rate(engines[rows], asked, args.decoded)

    def one() -> dict[str, Any]:
        found: dict[str, Any] = {"memory": there(products.bandwidth, decoder.kernels, args.read * 2**20)}
        found["decoding"] = {
            rows: {side: there(products.seconds, timed, 3) for side, timed in sides.items()} | {"real": decode(rows)}
            for rows, sides in steps.items()
        }
        found["training"] = {side: there(products.seconds, timed, 1) for side, timed in step.items()}
        there(training.forward_backward, learner, work)  # like the products: the second of two
        found["training"]["real"] = there(training.forward_backward, learner, work)
        print(f"load {os.getloadavg()[0]:.1f}: {found}", file=sys.stderr, flush=True)
        return found | {"load": os.getloadavg()[0]}

    decode(max(steps, key=int))  # allocates the memory and packs the weights
    there(training.forward_backward, learner, work)
    facts = {
        "tokens": tokens,
        "trained": trained,
        "flops": products.flops(decoder, tokens, trained),
        "weight_bytes": products.weight_bytes(decoder),
        "read_bytes": args.read * 2**20,
    }
    return [one() for _ in range(args.rounds)], facts


def fastest(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of a step by each side, and by the fastest side of each shape (`ceiling`), which is named in `by`."""
    sides = [side for side in rounds[0] if side != "real"]
    shapes = {s: {name: median(r[s][name] for r in rounds) for name in rounds[0][s]} for s in sides}
    by = {name: min(sides, key=lambda s: shapes[s][name]) for name in shapes[sides[0]]}
    ceiling = sum(shapes[side][name] for name, side in by.items())
    return {**{s: sum(shapes[s].values()) for s in sides}, "ceiling": ceiling, "by": by}


def summary(rounds: Sequence[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Rates instead of seconds: tokens per second, and TFLOP per second of products."""

    def rates(work: float, timed: Sequence[dict[str, Any]], real: list[float]) -> dict[str, Any]:
        found = {k: v if k == "by" else work / v for k, v in fastest(timed).items()}
        return {**found, "real": real, "share": median(real) / found["ceiling"]}

    memory = {how: median(r["memory"][how] for r in rounds) for how in rounds[0]["memory"]}
    decoding = {}
    for rows in rounds[0]["decoding"]:
        timed = [r["decoding"][rows] for r in rounds]
        decoding[rows] = rates(int(rows), timed, [t["real"] for t in timed])
        decoding[rows]["memory"] = int(rows) * max(memory.values()) / facts["weight_bytes"]
    timed = [r["training"] for r in rounds]
    work = facts["flops"] / 1e12
    return {
        "memory": memory,
        "decoding": decoding,
        "training": rates(work, timed, [work / t["real"] for t in timed]),
    }


def show(found: dict[str, Any], facts: dict[str, Any]) -> None:
    columns = [
        "",
        "memory",
        "birl's gemm",
        "oneDNN",
        "torch.mm",
        "ceiling",
        "birl",
        "share",
        "not fastest by birl's gemm",
    ]
    memory, trained = found["memory"], found["training"]
    best = max(memory, key=memory.__getitem__)
    read = [f"reading {facts['read_bytes'] >> 20} MiB [GB/s], by {best}", f"{memory[best] / 1e9:.1f}", *[""] * 7]

    def cells(name: str, row: dict[str, Any], form: Callable[[float], str]) -> list[str]:
        keys = ("memory", "birl", "oneDNN", "torch.mm", "ceiling")
        figures = [form(row[key]) if key in row else "" for key in keys] + [form(median(row["real"]))]
        lost = ", ".join(f"{shape} ({side})" for shape, side in row["by"].items() if side != "birl")
        return [name, *figures, f"{row['share']:.0%}", lost]

    rows = [cells(f"decoding {n} sequences [tok/s]", row, "{:,.0f}".format) for n, row in found["decoding"].items()]
    name, work = f"training {facts['tokens']:,} tokens", facts["flops"] / 1e12
    rows.append(cells(f"{name} [TFLOP/s]", trained, "{:.2f}".format))
    rows.append([*cells(f"{name} [s]", trained, lambda rate: f"{work / rate:.3f}")[:-2], "", ""])
    for line in (columns, ["---"] * len(columns), read, *rows):
        print("| " + " | ".join(line) + " |")
    print()


if __name__ == "__main__":
    sys.exit(main())
