"""birl's side: sampling with the embedded engine, log-probs included. Prints one JSON object.

    .venv/bin/python -m benchmarks.our_generate --model DIR --data prompts.jsonl --batch 16 --tokens 128

Every answer has exactly --tokens tokens (the end token is ignored).
"""

import argparse
import asyncio
import json
import os
import time
from concurrent.futures import Executor
from pathlib import Path
from statistics import median

from benchmarks.peers import peak_rss_gb, sampling_options, versions


def arguments() -> argparse.Namespace:
    parser = sampling_options("the embedded engine; prints one JSON object")
    parser.add_argument("--lengths", default="same", choices=["same", "uneven"], help="see benchmarks.peer_vllm")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one short one that warms up")
    return parser.parse_args()


async def measure(args: argparse.Namespace, compute: Executor) -> dict:
    import torch

    from benchmarks.peers import rows
    from birl.config import schema
    from birl.engine.open import open_engine
    from birl.learner.policy import DTYPES, load_policy
    from birl.models.load import cast
    from birl.types import Message, SamplingParams

    policy = load_policy(schema.Model(path=str(Path(args.model))), compute)
    cast(policy.model, DTYPES[args.precision]).requires_grad_(False)
    version = 0
    engine = open_engine(policy, schema.Engine(max_batch=args.batch), policy.context, lambda: version)
    data = rows(args.data)
    chosen = [data[i // args.group % len(data)]["prompt"] for i in range(args.batch)]
    prompts = [policy.chat.render(tuple(Message(role=m["role"], content=m["content"]) for m in p)) for p in chosen]

    def asked(i: int, tokens: int) -> int:
        return tokens if args.lengths == "same" else tokens * (i % 4 + 1) // 4

    async def sample(tokens: int, seed: int) -> float:
        nonlocal version
        version += 1  # as after an optimizer step: the engine packs its weights again, inside the timed call
        with torch.no_grad():
            torch._foreach_mul_(list(policy.model.parameters()), 1.0)
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                engine.generate(
                    p, SamplingParams(max_tokens=asked(i, tokens), ignore_eos=True, seed=seed * args.batch + i)
                )
                for i, p in enumerate(prompts)
            )
        )
        assert [len(a.tokens) for a in answers] == [asked(i, tokens) for i in range(args.batch)]
        return time.perf_counter() - start

    await sample(min(8, args.tokens), args.seed)
    seconds = [await sample(args.tokens, args.seed + 1 + i) for i in range(args.repeats)]
    await engine.close()
    made = sum(asked(i, args.tokens) for i in range(args.batch))
    return {
        "side": "birl",
        "precision": args.precision,
        "batch": args.batch,
        "group": args.group,
        "tokens": args.tokens,
        "prompt_tokens": sum(map(len, prompts)),
        "seconds": seconds,
        "tokens_per_s": made / median(seconds),
        "best_tokens_per_s": made / min(seconds),
    }


def main() -> None:
    args = arguments()
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread() as compute:
        result = asyncio.run(measure(args, compute))
    print(json.dumps(result | {"peak_rss_gb": peak_rss_gb(), "load": os.getloadavg(), "versions": versions()}))


if __name__ == "__main__":
    main()
