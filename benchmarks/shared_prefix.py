"""Gain of computing a prompt once for all its answers: birl with it against birl without, SmolLM2-135M in bfloat16.

    python -m benchmarks.shared_prefix [--groups 2 4 8 16] [--prompts 64 256 512 1024] [--rounds 3] [--json FILE]
    python -m benchmarks.shared_prefix --tiny        a few seconds, to see that it runs

Training: forward_backward of one group, packed as a tree; the peer puts each sample into a separate group, which the
packer does not merge. Decode: prefill and decode by the engine; the peer's prompts differ in their first token. Each
cell is shared / not shared, seconds are medians. All runs in one process, in turns; it takes about ten minutes. The
verdict is on training 8 answers to a prompt of 512 tokens (else: the largest requested case).
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from statistics import median
from typing import Any

from benchmarks.peers import environment, in_turns, verdict

GOAL = 2.0
CASE = (8, 512)
Rows = dict[tuple[int, int], dict[str, Any]]
TINY = {"groups": [2, 4], "prompts": [32, 64], "tokens": 8, "rounds": 1}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 16], help="answers to a prompt")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 512, 1024], help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
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
        found = measure(args, compute)
    show(found)
    case = CASE if CASE in found["training"] else max(found["training"], key=prod)
    ours, peer = found["training"][case]["seconds"]
    details: dict[str, Any] = {"answer_tokens": args.tokens, "float32_gradients": found["float32_gradients"]}
    for kind in ("training", "decoding"):
        details[kind] = {f"{n} x {p}": row for (n, p), row in sorted(found[kind].items())}
    slow = verdict(
        f"shared_prefix, training {case[0]} answers to {case[1]} tokens",
        ours,
        peer,
        goal=GOAL,
        unit="s",
        lower_is_better=True,
        json_file=args.json,
        details=details,
    )
    return slow or int(not found["float32_gradients"]["within"])


def measure(args: argparse.Namespace, compute: Any) -> dict[str, Any]:
    """All figures of a case, (answers, prompt's tokens), as [shared, not shared]; seconds of every round."""
    import torch

    from benchmarks import decoding, training
    from birl.config import schema
    from birl.engine.open import open_engine
    from birl.learner.learner import Learner
    from birl.learner.policy import load_policy

    def there(function: Callable, *given: Any) -> Any:
        return compute.submit(function, *given).result()

    def sides(*runs: Callable[[], float]) -> dict[str, list]:
        """Run both in turns."""
        timed = [lambda run=run: {"seconds": run(), "load": os.getloadavg()[0]} for run in runs]
        found = in_turns(timed[0], timed[1], args.rounds)
        return {key: [[r[key] for r in side] for side in found] for key in ("seconds", "load")}

    policy = there(load_policy, schema.Model(path=args.model), compute)
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    small = training.group(0, min(max(args.groups), 4), min(args.prompts), args.tokens, vocabulary)
    equal = {"answers": len(small), "prompt": min(args.prompts), **there(training.gradient_gap, policy.folder, small)}

    learner = there(lambda: Learner(policy.model, dtype=torch.bfloat16))
    trained: Rows = {}
    decoded: Rows = {}
    # the largest first: it allocates the memory that all others reuse
    for n, prompt in sorted(((n, p) for n in args.groups for p in args.prompts), key=prod, reverse=True):
        samples = training.group(prompt, n, prompt, args.tokens, vocabulary)
        work = [training.batches(s) for s in (samples, training.apart(samples))]
        steps = [partial(there, training.forward_backward, learner, w) for w in work]
        for step in steps:
            step()
        trained[n, prompt] = {
            "tokens": [sum(len(b.tokens) for b in w) for w in work],
            "flops": [training.flops(policy.model, w) for w in work],
            **sides(*steps),
        }
        asked = [decoding.prompts(n, n, prompt, vocabulary, distinct) for distinct in (False, True)]
        engine = open_engine(policy, schema.Engine(max_batch=n), policy.context, lambda: 0)
        seen = [decoding.watch(engine, a, args.tokens) for a in asked]  # warms up, too
        decoded[n, prompt] = {
            "prefilled": [s.prefilled for s in seen],
            "pages": [s.pages for s in seen],
            "read_bytes": [s.read for s in seen],
            **sides(*(partial(decoding.answer, engine, a, args.tokens) for a in asked)),
        }
    return {"training": trained, "decoding": decoded, "float32_gradients": equal}


def pair(figures: Sequence[float], form: str = ",.0f") -> str:
    return f"{figures[0]:{form}} / {figures[1]:{form}}"


def ratio(figures: Sequence[float]) -> str:
    return f"{figures[1] / figures[0]:.2f}"


def seconds(row: dict[str, Any]) -> list[str]:
    """Two cells: medians, and their ratio."""
    medians = [median(side) for side in row["seconds"]]
    return [pair(medians, ".3g"), ratio(medians)]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(map(str, cells)) + " |")
    print()


def show(found: dict[str, Any]) -> None:
    equal = found["float32_gradients"]
    last = (
        f"float32 gradients, {equal['answers']} answers to {equal['prompt']} tokens: "
        f"{'equal' if equal['within'] else 'NOT EQUAL'} within 1e-5 or a relative 1e-4 (docs/numerics.md), "
        f"largest difference {equal['difference']:.1e} of values up to {equal['largest']:.1e}"
    )
    lines: list[list[object]] = [
        [*case, pair(row["tokens"]), pair([f / 1e12 for f in row["flops"]], ".3g"), ratio(row["flops"]), *seconds(row)]
        for case, row in sorted(found["training"].items())
    ]
    columns = ["answers", "prompt", "tokens computed", "TFLOP", "ratio", "training [s]", "ratio"]
    table(columns, [*lines, [last, *[""] * (len(columns) - 1)]])
    lines = []
    for case, row in sorted(found["decoding"].items()):
        read = pair([b / 1e6 for b in row["read_bytes"]], ".3g")
        lines.append([*case, pair(row["prefilled"]), pair(row["pages"]), read, *seconds(row)])
    table(["answers", "prompt", "prefilled", "KV pages", "KV MB read a step", "prefill + decoding [s]", "ratio"], lines)


if __name__ == "__main__":
    sys.exit(main())
