"""An engine and a learner in separate processes, each with one thread: the possible gain of asynchronous training on
two cores. SmolLM2-135M in bfloat16.

    python -m benchmarks.overlap [--prompts 8] [--group 8] [--tokens 64] [--steps 6] [--json FILE]

Measured one after another, all with the same batches of prompts x group answers:

    generation   the engine alone, one thread           training   the learner alone, one thread
    both         engine and learner at once: a batch is trained while the next one is sampled; the learner publishes its
                 weights after each step, the engine loads them between batches, so they are at most two steps old
    in turns     one process, two threads: `birl rl`'s default

The verdict compares `both` with max(generation, training), the time of a perfect overlap.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import environment, machine, rows, verdict


@dataclass
class Shared:
    """Shared by the processes: the weights, in shared memory, and the queue of batches."""

    weights: dict[str, Any]  # tensors
    version: Any  # multiprocessing.Value, whose lock guards the weights
    batches: "Queue[tuple[int, list[Any]]]"  # (version, samples)


@contextmanager
def policy_thread(threads: int) -> Iterator[Executor]:
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with compute_thread(threads) as compute:
        yield compute


class Sampler:
    """Samples batches and converts them to training samples."""

    def __init__(self, args: argparse.Namespace, policy: Any) -> None:
        from birl.config import schema
        from birl.engine.open import open_engine
        from birl.types import Message

        self.args, self.policy, self.version = args, policy, 0
        self.engine = open_engine(
            policy, schema.Engine(max_batch=args.prompts * args.group), policy.context, lambda: self.version
        )
        chosen = [row["prompt"] for row in rows(args.data)]
        messages = [tuple(Message(role=m["role"], content=m["content"]) for m in prompt) for prompt in chosen]
        self.prompts = [policy.chat.render(m) for m in messages]

    async def batch(self, number: int) -> list[Any]:
        import numpy as np

        from birl.types import Sample, SamplingParams

        args = self.args
        places = [(number * args.prompts + i) % len(self.prompts) for i in range(args.prompts)]
        asked = [(self.prompts[p], g, e) for g, p in enumerate(places) for e in range(args.group)]
        seeds = range(number * len(asked), (number + 1) * len(asked))
        answers = await asyncio.gather(
            *(
                self.engine.generate(prompt, SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=seed))
                for (prompt, _, _), seed in zip(asked, seeds, strict=True)
            )
        )
        return [
            Sample(
                tokens=np.append(np.array(prompt, np.int32), answer.tokens),
                mask=np.repeat([False, True], [len(prompt), len(answer.tokens)]),
                logprobs=np.append(np.zeros(len(prompt), np.float32), answer.logprobs),
                versions=np.append(np.full(len(prompt), -1, np.int32), answer.versions),
                advantage=1.0 if episode % 2 else -1.0,
                group=group,
                episode=episode,
            )
            for (prompt, group, episode), answer in zip(asked, answers, strict=True)
        ]


def train(learner: Any, samples: list[Any]) -> None:
    from functools import partial

    from benchmarks.training import loss
    from birl.data.pack import pack
    from birl.learner.learner import Stats

    for batch in pack(samples, [1 / len(samples)] * len(samples), 4096):
        learner.forward_backward(batch, partial(loss, on_policy=False), Stats())
    learner.optim_step(1e-6)


def load(compute: Executor) -> Any:
    from birl.config import schema
    from birl.learner.policy import load_policy

    return load_policy(schema.Model(path="smollm2"), compute)


def engine_process(args: argparse.Namespace, shared: Shared) -> None:
    import torch

    from birl.models.decoder import weights_changed
    from birl.models.load import cast

    async def main(compute: Executor) -> None:
        policy = load(compute)
        cast(policy.model, torch.bfloat16).requires_grad_(False)
        sampler = Sampler(args, policy)
        for number in range(args.steps + 2):
            with shared.version.get_lock():
                if shared.version.value > sampler.version:
                    for name, parameter in policy.model.named_parameters():
                        parameter.data.copy_(shared.weights[name])
                    weights_changed(policy.model)
                    sampler.version = shared.version.value
            shared.batches.put((sampler.version, await sampler.batch(number)))
        await sampler.engine.close()

    with policy_thread(1) as compute:
        asyncio.run(main(compute))


def learner_process(args: argparse.Namespace, shared: Shared, results: "Queue[dict[str, Any]]") -> None:
    from birl.learner.learner import Learner

    with policy_thread(1) as compute:
        policy = load(compute)
        learner = compute.submit(Learner, policy.model).result()

        def step(samples: list[Any]) -> None:
            train(learner, samples)
            with shared.version.get_lock():
                for name, parameter in policy.model.named_parameters():
                    shared.weights[name].copy_(parameter.data)
                shared.version.value = learner.version

        seconds, old, trained = [], [], []
        ended = time.perf_counter()
        for _ in range(args.steps + 2):
            version, samples = shared.batches.get()
            old.append(learner.version - version)
            started = time.perf_counter()
            compute.submit(step, samples).result()
            now = time.perf_counter()
            trained.append(now - started)
            seconds.append(now - ended)
            ended = now
        results.put({"both": seconds[2:], "training in it": trained[2:], "staleness": old[2:]})


def alone(args: argparse.Namespace, threads: int, what: str, results: "Queue[dict[str, Any]]") -> None:
    """`what`: generation, training, or in turns."""
    import torch

    from birl.learner.learner import Learner
    from birl.models.load import cast

    async def main(compute: Executor) -> None:
        policy = load(compute)
        loop = asyncio.get_running_loop()
        learner = None
        if what == "generation":
            cast(policy.model, torch.bfloat16).requires_grad_(False)
        else:
            learner = await loop.run_in_executor(compute, Learner, policy.model)
        sampler = Sampler(args, policy)
        samples = await sampler.batch(0)
        seconds = []
        for number in range(1, args.steps + 1):
            start = time.perf_counter()
            if what != "training":
                samples = await sampler.batch(number)
            if learner is not None:
                await loop.run_in_executor(compute, train, learner, samples)
            seconds.append(time.perf_counter() - start)
        await sampler.engine.close()
        results.put({what: seconds[1:]})

    with policy_thread(threads) as compute:
        asyncio.run(main(compute))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from birl.models.load import load_model, resolve

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    found: dict[str, Any] = {}
    for threads, what in ((1, "generation"), (1, "training"), (2, "in turns")):
        process = context.Process(target=alone, args=(args, threads, what, results))
        process.start()
        found |= results.get(timeout=600)
        process.join()
    weights = {
        n: p.data.to(torch.bfloat16).share_memory_() for n, p in load_model(resolve("smollm2")).named_parameters()
    }
    shared = Shared(weights, context.Value("l", 0), context.Queue(maxsize=1))
    both = [
        context.Process(target=engine_process, args=(args, shared)),
        context.Process(target=learner_process, args=(args, shared, results)),
    ]
    for process in both:
        process.start()
    found |= results.get(timeout=600)
    for process in both:
        process.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer, exactly")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each kind")
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    os.environ.update(environment(2))
    found = measure(args)
    times = {name: median(found[name]) for name in ("generation", "training", "both", "in turns")}
    print("  ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()), f" staleness {found['staleness']}")
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), **found, "machine": machine()}, indent=1) + "\n")
    bound = max(times["generation"], times["training"])
    return verdict("overlap", [times["both"]], [bound], goal=0.8, unit="s", lower_is_better=True)


if __name__ == "__main__":
    sys.exit(main())
