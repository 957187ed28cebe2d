"""An engine alone and a learner alone, in this process, one after the other: the cost of their steps, as one line of
JSON in the form of `birl plan --simulate`: {"engine": {"table", "prefill"}, "learner": {"constant", "per_token"}}.

    python -m benchmarks.alone --model smollm2 [--data FILE] [--prompts 4] [--group 8] [--tokens 64] [--max-batch 64]

A decode step of n sequences is the difference between many tokens and few; the learner's line is fitted to two batches,
of half and of all answers.
"""

import argparse
import asyncio
import json
import sys
import time
from concurrent.futures import Executor
from statistics import median
from typing import Any

from benchmarks.overlap import train
from benchmarks.peers import machine, rows


async def engine(args: argparse.Namespace, policy: Any) -> dict[str, Any]:
    from birl.config import schema
    from birl.engine.open import open_engine
    from birl.types import Message, SamplingParams

    own = open_engine(policy, schema.Engine(max_batch=args.max_batch, draft_rows=0), policy.context, lambda: 0, 1024)
    asked = [tuple(Message(role=m["role"], content=m["content"]) for m in row["prompt"]) for row in rows(args.data)]
    prompts = list(dict.fromkeys(policy.chat.render(p) for p in asked))

    async def seconds(n: int, tokens: int) -> float:
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i) for i in range(n)]
        chosen = [prompts[i % len(prompts)] for i in range(n)]
        before = own.counters.seconds
        await asyncio.gather(*(own.generate(p, s) for p, s in zip(chosen, params, strict=True)))
        return own.counters.seconds - before

    await seconds(2, 4)
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < args.max_batch] + [args.max_batch]
    few, many, table, prefill = 4, 36, [], []
    for n in sizes:
        short = median([await seconds(n, few) for _ in range(3)])
        step = (median([await seconds(n, many) for _ in range(3)]) - short) / (many - few)
        table.append([n, round(max(step, 1e-6), 6)])
        different = sum(len(p) for p in {prompts[i % len(prompts)] for i in range(n)})
        prefill.append(different / max(short - (few - 1) * step, 1e-6))
    await own.close()
    return {"table": table, "prefill": round(prefill[-1], 1)}


def batch(policy: Any, args: argparse.Namespace, groups: int) -> list[Any]:
    import numpy as np

    from birl.types import Message, Sample

    found = []
    for group in range(groups):
        row = rows(args.data)[group]["prompt"]
        prompt = policy.chat.render(tuple(Message(role=m["role"], content=m["content"]) for m in row))
        for episode in range(args.group):
            answer = tuple(3 + (7 * episode + 11 * group + 5 * i) % 200 for i in range(args.tokens))
            found.append(
                Sample(
                    tokens=np.array(prompt + answer, np.int32),
                    mask=np.repeat([False, True], [len(prompt), len(answer)]),
                    logprobs=np.repeat(np.array([0, -2], np.float32), [len(prompt), len(answer)]),
                    versions=np.repeat(np.array([-1, 0], np.int32), [len(prompt), len(answer)]),
                    advantage=1.0 if episode % 2 else -1.0,
                    group=group,
                    episode=episode,
                )
            )
    return found


def learner(args: argparse.Namespace, policy: Any) -> dict[str, Any]:
    """Seconds by number of tokens, with each prompt counted once per group."""
    from birl.learner.learner import Learner

    own = Learner(policy.model)
    points = []
    for groups in (max(args.prompts // 2, 1), max(args.prompts, 2)):
        samples = batch(policy, args, groups)
        prompts = sum(len(s.tokens) - sum(s.mask) for s in samples[:: args.group])
        tokens, seconds = prompts + sum(sum(s.mask) for s in samples), []
        for _ in range(4):
            began = time.perf_counter()
            train(own, samples)
            seconds.append(time.perf_counter() - began)
        points.append((tokens, median(seconds[1:])))
    (n0, s0), (n1, s1) = points
    slope = max((s1 - s0) / (n1 - n0), 1e-9)
    return {"constant": round(max(s1 - slope * n1, 0.0), 6), "per_token": round(slope, 9), "share_prompts": True}


async def both(args: argparse.Namespace, compute: Executor) -> dict[str, Any]:
    import torch

    from birl.config import schema
    from birl.learner.policy import load_policy
    from birl.models.load import cast

    policy = load_policy(schema.Model(path=args.model), compute)
    found = {"learner": await asyncio.get_running_loop().run_in_executor(compute, learner, args, policy)}
    policy = load_policy(schema.Model(path=args.model), compute)
    cast(policy.model, torch.bfloat16).requires_grad_(False)
    return {"engine": await engine(args, policy), **found, "load": machine()["load"][0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=64)
    args = parser.parse_args()
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread(1) as compute:
        found = asyncio.run(both(args, compute))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
