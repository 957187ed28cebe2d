"""Decoding, for `benchmarks.gpu`."""

import asyncio
import time
from typing import Any

import torch

from benchmarks.gpu_bench import WARM, Bench, prompt, shape_of
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner

DECODE_GOAL = 0.6


def decode(bench: Bench) -> None:
    """Steps in which all sequences decode and none is prefilled."""
    for name in bench.models:
        learner = Learner(bench.model(name, dtype=torch.bfloat16), trainable=False)
        for batch in bench.sizes.batches:
            if bench.left < 30:
                bench.add("decode", f"{name}, {batch} sequences", note="left out: no time")
            else:
                decode_batch(bench, learner, name, batch)
            bench.clean()


def decode_batch(
    bench: Bench, learner: Learner, name: str, batch: int, row: tuple[str, str] = ("", ""), length: int = 0,
    eager: bool = False,
) -> None:  # fmt: skip
    """`row`: section and case; `length`: of the prompts. `eager`: without graphs."""
    sizes, shape = bench.sizes, shape_of(learner.model)
    length = length or sizes.prompt
    engine = bench.engine(learner, batch, length + sizes.new)
    if eager:
        engine.runner.eager = "to measure what launching takes"
    prompts = [prompt(i, length, shape.vocab_size) for i in range(batch)]
    timed: list[tuple[float, int]] = []  # seconds, tokens
    watch(engine, batch, timed)
    for seed in WARM:
        bench.generate(engine, prompts, sizes.new, seed)
    timed.clear()
    bench.generate(engine, prompts, sizes.new, 1000)
    asyncio.run(engine.close())
    seconds, tokens = (sum(column) for column in zip(*timed, strict=True))
    note = f"{1e3 * seconds * batch / tokens:.2f} ms a token"
    section, case = row if row[0] else ("decode", f"{name}, {batch} sequences")
    bench.add(section, case, tokens / seconds, goal=DECODE_GOAL, note=note)


def watch(engine: EmbeddedEngine, batch: int, timed: list[tuple[float, int]]) -> None:
    """Record each step of the engine in which all of `batch` decode, including the host's work before it."""
    original, last = engine.steps.step, [0.0]

    def step() -> Any:
        prefilled, before = engine.counters.prefilled, engine.counters.tokens
        running = list(engine.scheduler.running)
        finished = original()
        now, made = time.perf_counter(), engine.counters.tokens - before
        if len(running) == batch and prefilled == engine.counters.prefilled and made and last[0]:
            timed.append((now - last[0], made))
        last[0] = now
        return finished

    engine.steps.step = step  # type: ignore[method-assign]
