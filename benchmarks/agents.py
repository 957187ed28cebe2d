"""Agents of several turns with branches: savings by the prefix cache in generation, and by trees in training.
SmolLM2-135M in bfloat16.

    python -m benchmarks.agents [--tasks 8] [--branches 4] [--turns 8] [--tool 990] [--answer 32] [--json FILE]
    python -m benchmarks.agents --peer vllm  generation alone, against vLLM's CPU build with its prefix cache
    python -m benchmarks.agents --tiny       a minute, to see that it runs

One episode of each task is sampled from its prompt on; the others start with some of its turns, and continue
separately. Between two answers are `--tool` random tokens. Generation: all episodes at once, with the prefix cache and
without. Training: forward_backward of all of them, as trees and separately; the bound is the time of the latter times
the share of its FLOPs that trees need. Goals: generation in 1/4 of the time, training within 15 % of the bound; 1.5
times the tokens a second of vLLM, which samples the same episodes without log-probs (peer_vllm_agents.py).
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import environment, in_turns, machine, run, verdict

GENERATION, TRAINING, VLLM = 4.0, 1.15, 1.5
TINY = {"tasks": 2, "branches": 4, "turns": 4, "tool": 60, "answer": 8}
Turns = list[tuple[tuple[int, ...], tuple[int, ...]]]  # of each turn: the whole prompt, and the answer
Ask = Callable[[tuple[int, ...], int], Awaitable[tuple[int, ...]]]  # prompt, seed -> answer


def options(description: str | None) -> argparse.ArgumentParser:
    """Options of both sides of generation."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--branches", type=int, default=4, help="episodes of a task")
    parser.add_argument("--turns", type=int, default=8)
    # eight turns of 990 + 32 tokens fit into SmolLM2's 8,192 positions; vLLM ends beyond them
    parser.add_argument("--tool", type=int, default=990, help="tokens between two answers, and of the prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help=f"as with {TINY}")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    return argparse.Namespace(**{**vars(args), **TINY}) if args.tiny else args


def main() -> int:
    args = arguments()
    os.environ.update(environment(args.threads))  # before torch is imported
    load = machine()["load"]
    from birl.allocator import keep_memory
    from birl.config import schema
    from birl.learner.policy import DTYPES, load_policy
    from birl.models.load import cast
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread(args.threads) as compute:
        policy = compute.submit(load_policy, schema.Model(path=args.model), compute).result()
        if args.peer:
            cast(policy.model, DTYPES["bfloat16"]).requires_grad_(False)  # a policy is loaded in float32
            return against_vllm(args, policy)
        found = measure(args, policy)
    print("| | seconds | without | ratio |\n| --- | --- | --- | --- |")
    for kind in ("generation", "training"):
        ours, without = (median(side) for side in found[kind]["seconds"])
        found[kind]["ratio"] = without / ours
        print(f"| {kind} | {ours:.2f} | {without:.2f} | {without / ours:.2f} |")
    tokens, flops = found["training"]["tokens"], found["training"]["flops"]
    print(f"agents: {tokens[0]:,} of {tokens[1]:,} tokens are computed, {flops[0] / flops[1]:.1%} of the FLOPs")
    above = flops[1] / flops[0] / found["training"]["ratio"]
    print(f"agents, generation: ratio {found['generation']['ratio']:.2f} goal {GENERATION:.2f}")
    print(f"agents, training: {above:.2f} of the FLOPs bound, goal {TRAINING:.2f}", flush=True)
    if args.json:
        figures = {"name": "agents", "args": vars(args), **found, "load_before": load, "machine": machine()}
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return int(found["generation"]["ratio"] < GENERATION or above > TRAINING)


def against_vllm(args: argparse.Namespace, policy: Any) -> int:
    from birl.models.load import resolve

    sizes = {key: value for key, value in vars(args).items() if key not in ("model", "peer", "rounds", "tiny", "json")}
    ours, peer = in_turns(
        lambda: generation(args, policy)[0],
        partial(run, "benchmarks.peer_vllm_agents", model=resolve(args.model), **sizes),
        args.rounds,
    )
    assert {r["tokens"] for r in ours} == {r["tokens"] for r in peer}, "the sides sampled different numbers of tokens"
    for name, results in (("ours", ours), ("peer", peer)):
        cached, prompts = results[-1]["cached"], results[-1]["prompts"]
        print(f"{name}: {cached:,} of {prompts:,} prompt tokens were in the cache ({cached / prompts:.1%})")
    rates = [[r["tokens"] / r["seconds"] for r in results] for results in (ours, peer)]
    figures: dict[str, Any] = {"args": vars(args), "runs": {"ours": ours, "peer": peer}}
    kept: dict[str, Any] = {"json_file": args.json, "details": figures}
    return verdict("agents against vllm", *rates, goal=VLLM, unit="tok/s", lower_is_better=False, **kept)


def generation(args: argparse.Namespace, policy: Any, cache: bool = True) -> tuple[dict[str, Any], list[Turns]]:
    """All episodes by an engine with an empty cache, and their figures."""
    from birl.config import schema
    from birl.engine.open import open_engine
    from birl.types import SamplingParams

    engine = open_engine(policy, schema.Engine(max_batch=args.tasks * args.branches), longest(args), lambda: 0)
    engine.scheduler.cache = cache

    async def ask(seen: tuple[int, ...], seed: int) -> tuple[int, ...]:
        return (await engine.generate(seen, SamplingParams(max_tokens=args.answer, ignore_eos=True, seed=seed))).ids

    async def timed() -> tuple[float, list[Turns]]:
        start = time.perf_counter()
        episodes = await sampled(ask, args, policy.model.config.vocab_size)
        seconds = time.perf_counter() - start
        await engine.close()
        return seconds, episodes

    seconds, episodes = asyncio.run(timed())
    return {"seconds": seconds, "cached": engine.scheduler.reused, **counted(episodes)}, episodes


def longest(args: argparse.Namespace) -> int:
    """Length of an episode [tokens], with room for one more turn."""
    return (args.turns + 1) * (args.tool + args.answer)


def counted(episodes: list[Turns]) -> dict[str, int]:
    """Numbers of prompt and sampled tokens; a branch's first turns count in the other episode."""
    asked = {id(turn): turn for turns in episodes for turn in turns}.values()
    return {"prompts": sum(len(seen) for seen, _ in asked), "tokens": sum(len(answer) for _, answer in asked)}


def measure(args: argparse.Namespace, policy: Any) -> dict[str, Any]:
    import torch

    from benchmarks import training
    from birl.data.pack import pack
    from birl.learner.learner import Learner

    compute, episodes = policy.compute, list[Turns]()
    learner = compute.submit(
        Learner, policy.model, dtype=torch.bfloat16
    ).result()  # the engine samples in bfloat16, too

    def generate(cache: bool) -> dict[str, Any]:
        found, episodes[:] = generation(args, policy, cache)
        return found

    generation(argparse.Namespace(**{**vars(args), **TINY, "tasks": 1}), policy)  # warm-up: lays the weights out
    generated = in_turns(partial(generate, True), partial(generate, False), args.rounds)
    samples = [sample(turns, i // args.branches, i) for i, turns in enumerate(episodes)]
    weights, pair_cost = [1 / sum(sum(s.mask) for s in samples)] * len(samples), policy.pair_cost
    # a micro-batch holds the tree of a task, or one sequence
    sides = ((samples, longest(args) * args.branches), (training.apart(samples), max(longest(args), 4096)))
    work = [pack(rows, weights, tokens, 1, pair_cost) for rows, tokens in sides]

    def step(side: int) -> dict[str, Any]:
        return {"seconds": compute.submit(training.forward_backward, learner, work[side]).result()}

    trained = in_turns(partial(step, 0), partial(step, 1), args.rounds)
    return {
        "generation": {"seconds": [[r["seconds"] for r in side] for side in generated]},
        "training": {
            "seconds": [[r["seconds"] for r in side] for side in trained],
            "tokens": [sum(len(b.tokens) for b in w) for w in work],
            "flops": [training.flops(policy.model, w) for w in work],
        },
    }


async def sampled(ask: Ask, args: argparse.Namespace, vocabulary: int) -> list[Turns]:
    """The episodes, task by task. Branch b starts with b / branches of the turns of the first one."""

    async def episode(task: int, branch: int, turns: Turns) -> list[Turns]:
        later = []
        for number in range(len(turns), args.turns):
            others = [b for b in range(1, args.branches) if b * args.turns // args.branches == number]
            if branch == 0 and number:
                later += [asyncio.ensure_future(episode(task, b, list(turns))) for b in others]
            draws = random.Random(f"{task} {branch} {number}")
            seen = (*turns[-1][0], *turns[-1][1]) if turns else ()
            seen += tuple(draws.randrange(3, vocabulary) for _ in range(args.tool))
            turns.append((seen, await ask(seen, draws.getrandbits(30))))
        return [turns, *(t for each in await asyncio.gather(*later) for t in each)]

    every = await asyncio.gather(*(episode(task, 0, []) for task in range(args.tasks)))
    return [turns for own in every for turns in own]


def sample(turns: Turns, group: int, episode: int) -> Any:
    """A sample of an episode in which all answers are trained."""
    import numpy as np

    from birl.types import Sample

    tokens = np.array(turns[-1][0] + turns[-1][1], np.int32)
    mask = np.zeros(len(tokens), np.bool_)
    for seen, answer in turns:
        mask[len(seen) : len(seen) + len(answer)] = True
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(
        tokens=tokens, mask=mask, logprobs=zeros, versions=np.where(mask, 0, -1).astype(np.int32),
        advantage=(-1.0) ** episode, group=group, episode=episode,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
