"""Decode with weights in int8 (engine.weights=int8) against bfloat16: SmolLM2-135M, in one process, in turns.

    python -m benchmarks.int8 [--batches 1 2 4] [--tokens 48] [--rounds 9] [--threads 1] [--json FILE]

A round is an answer to every prompt by one engine and then by the other; the ratio is the median over the rounds of the
rates' ratio, so that other load on the machine, which affects both, hardly changes it. `--clock process` measures CPU
time instead of seconds. Printed before: bytes of weights that a token reads, and the effect of rounding: on answers
that the int8 weights sampled, the mean |difference of log-probs| and the KL divergence of the two, per token.
"""

import argparse
import asyncio
import json
import sys
import time
from concurrent.futures import Executor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoding import prompts, rate
from benchmarks.peers import machine, rows, verdict
from birl.config import schema
from birl.data.trees import Tree
from birl.engine.engine import EmbeddedEngine
from birl.engine.open import open_engine
from birl.kernels.tensors import BLOCK
from birl.learner.policy import Policy, load_policy
from birl.models.attention import Packed
from birl.models.forward import hidden_states, logits
from birl.models.heads import head
from birl.models.load import cast
from birl.models.slices import quantizable
from birl.types import Message, SamplingParams


def read(model: nn.Module) -> tuple[int, int]:
    """Bytes of linear layers and head that a token reads: in bfloat16, and in int8."""
    body, words = sum(m.weight.numel() for m in quantizable(model).values()), head(model).weight.numel()
    return 2 * (body + words), body * (BLOCK + 1) // BLOCK + 2 * words


async def sampled(policy: Policy, engine: EmbeddedEngine, data: str, count: int) -> list[tuple[tuple[int, ...], int]]:
    """Prompts with answers of at most 128 tokens, and the length of each prompt."""
    asked = [
        policy.chat.render(tuple(Message(role=m["role"], content=m["content"]) for m in row["prompt"]))
        for row in rows(data)[:count]
    ]
    params = [SamplingParams(max_tokens=128, seed=i) for i in range(count)]
    answers = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(asked, params, strict=True)))
    return [(p + a.ids, len(p)) for p, a in zip(asked, answers, strict=True)]


def log_softmax(model: nn.Module, tokens: Tensor, begin: int) -> Tensor:
    """[answer, V] float32."""
    hidden = hidden_states(model, tokens, torch.arange(len(tokens)), Packed([Tree.of(len(tokens))]))
    return logits(model, hidden[begin - 1 : -1]).log_softmax(-1)


@torch.no_grad()
def apart(plain: nn.Module, int8: nn.Module, answers: list[tuple[tuple[int, ...], int]]) -> dict[str, float]:
    gaps, divergences = [], []
    for ids, begin in answers:
        tokens = torch.tensor(ids, dtype=torch.int64)
        p, q = log_softmax(int8, tokens, begin), log_softmax(plain, tokens, begin)
        gaps.append((p - q).gather(1, tokens[begin:, None]).abs().flatten())
        divergences.append((p.exp() * (p - q)).sum(1))
    gap = torch.cat(gaps)
    figures = {"gap": gap.mean(), "largest": gap.max(), "kl": torch.cat(divergences).mean()}
    return {"tokens": float(len(gap))} | {name: float(value) for name, value in figures.items()}


def measure(args: argparse.Namespace, compute: Executor) -> dict[str, Any]:
    plain = load_policy(schema.Model(path="smollm2"), compute)
    cast(plain.model, torch.bfloat16).requires_grad_(False)
    int8 = replace(plain, model=deepcopy(plain.model))
    engines = {
        "bfloat16": open_engine(plain, schema.Engine(draft_rows=0), 512, lambda: 0),
        "int8": open_engine(int8, schema.Engine(draft_rows=0, weights="int8"), 512, lambda: 0),
    }
    clock = time.process_time if args.clock == "process" else time.perf_counter
    before, after = read(plain.model)
    print(f"a token reads {before / 1e6:.1f} MB in bfloat16, {after / 1e6:.1f} with int8: {before / after:.2f}")
    answers = asyncio.run(sampled(int8, engines["int8"], args.data, args.answers))
    difference = apart(plain.model, int8.model, answers)
    print("rounding: " + ", ".join(f"{name} {value:.3g}" for name, value in difference.items()), flush=True)
    rates: dict[int, dict[str, list[float]]] = {}
    for batch in args.batches:
        asked = prompts(batch, 1, 16, 49000)
        rates[batch] = {name: [] for name in engines}
        for number in range(args.rounds + 1):
            for name in sorted(engines, reverse=number % 2 == 0):
                found = rate(engines[name], asked, args.tokens, clock)
                if number:  # the first packs the weights
                    rates[batch][name].append(found)
        ratio = median(b / a for a, b in zip(*rates[batch].values(), strict=True))
        middle = ", ".join(f"{name} {median(r):.1f}" for name, r in rates[batch].items())
        print(f"{batch} sequences: {middle} tokens/s, ratio {ratio:.2f}", flush=True)
    return {"read": (before, after), "rounding": difference, "tokens_per_s": rates}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--answers", type=int, default=16, help="whose log-probs are compared")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread(args.threads) as compute:
        figures = measure(args, compute)
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), **figures, "machine": machine()}, indent=1) + "\n")
    first = figures["tokens_per_s"][args.batches[0]]
    return verdict(
        f"int8, {args.batches[0]} sequences", first["int8"], first["bfloat16"], goal=1.3, unit="tok/s",
        lower_is_better=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
