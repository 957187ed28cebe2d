"""The last answers of a batch, with draft tokens and without: SmolLM2-135M in bfloat16, the same answers both times.

    python -m benchmarks.long_tail [--prompts 2] [--group 4] [--tokens 512] [--rounds 5] [--data FILE] [--json FILE]

Both sides run in this process, in turns: answers end where the model ends them, so towards the end few are left. The
answers must be bit-identical; only the seconds may differ. Also printed: the share of draft tokens.
"""

import argparse
import asyncio
import json
import sys
import time
from concurrent.futures import Executor
from pathlib import Path

from benchmarks.peers import machine, rows, verdict


async def measure(args: argparse.Namespace, compute: Executor) -> dict:
    import torch

    from birl.config import schema
    from birl.engine.open import open_engine
    from birl.learner.policy import load_policy
    from birl.models.load import cast
    from birl.types import Completion, Message, SamplingParams

    policy = load_policy(schema.Model(path="smollm2"), compute)
    cast(policy.model, torch.bfloat16).requires_grad_(False)
    questions = [row["prompt"] for row in rows(args.data)[: args.prompts]]
    prompts = [policy.chat.render(tuple(Message(role=m["role"], content=m["content"]) for m in q)) for q in questions]

    async def sample(draft_rows: int, tokens: int) -> tuple[float, list[Completion], float]:
        engine = open_engine(policy, schema.Engine(draft_rows=draft_rows), policy.context, lambda: 0)
        start = time.perf_counter()
        asked = [
            engine.generate(
                prompt, SamplingParams(max_tokens=tokens, temperature=args.temperature, seed=i * args.group + j)
            )
            for i, prompt in enumerate(prompts)
            for j in range(args.group)
        ]
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - start
        await engine.close()
        return seconds, answers, engine.counters.accepted / engine.counters.tokens

    await sample(16, 8)
    figures: dict[str, list] = {"guessing": [], "plain": []}
    share, longest = 0.0, 0
    answers: list[Completion] = []
    for number in range(args.rounds):
        found: dict[str, list[Completion]] = {}
        for side in sorted(figures, reverse=number % 2 == 0):  # in turns, each first in every other round
            seconds, answers, right = await sample(16 if side == "guessing" else 0, args.tokens)
            figures[side].append(seconds)
            share, found[side] = max(share, right), answers
        if found["guessing"] != found["plain"]:
            raise SystemExit("The answers differ: guessing changed what was sampled.")
        longest = max(len(a.tokens) for a in answers)
    lengths = sorted(len(a.tokens) for a in answers)
    return figures | {"guessed": share, "longest": longest, "lengths": lengths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=4, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread() as compute:
        figures = asyncio.run(measure(args, compute))
    print(f"answers of {figures['lengths']} tokens; {figures['guessed']:.0%} of them guessed")
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), **figures, "machine": machine()}, indent=1) + "\n")
    return verdict("long tail", figures["guessing"], figures["plain"], goal=1.0, unit="s", lower_is_better=True)


if __name__ == "__main__":
    sys.exit(main())
