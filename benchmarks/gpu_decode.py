"""Decoding, for `benchmarks.gpu`."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_bench import Bench, prompt, shape_of
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner

DECODE_GOAL = 0.6


def decode(bench: Bench) -> None:
    """Steps in which all sequences decode and none is prefilled, against reading weights and keys and values once."""
    for name in bench.models:
        learner = Learner(bench.model(name), trainable=False)
        for batch in bench.sizes.batches:
            if bench.left < 30:
                bench.add("decode", f"{name}, {batch} sequences", "left out: no time")
            else:
                decode_batch(bench, learner, name, batch)
            bench.clean()


def decode_batch(bench: Bench, learner: Learner, name: str, batch: int) -> None:
    sizes, shape = bench.sizes, shape_of(learner.model)
    weights = sum(p.numel() * p.element_size() for p in learner.model.parameters())  # the embedding is the head
    size = shape.hidden_size // shape.num_attention_heads
    per_position = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * size
    engine = bench.engine(learner, batch, sizes.prompt + sizes.new)
    prompts = [prompt(i, sizes.prompt, shape.vocab_size) for i in range(batch)]
    timed: list[tuple[float, int, float]] = []  # seconds, tokens, bytes that had to be read
    watch(engine, batch, lambda rounds, positions: rounds * weights + positions * per_position, timed)
    bench.generate(engine, prompts, sizes.new, 0)  # compiles and captures
    timed.clear()
    bench.generate(engine, prompts, sizes.new, 1000)
    asyncio.run(engine.close())
    seconds, tokens, bytes_read = (sum(column) for column in zip(*timed, strict=True))
    floor = bytes_read / bench.bandwidth
    note = f"floor {tokens / floor:,.0f} tok/s; {1e3 * seconds * batch / tokens:.2f} ms a token"
    rate = f"{tokens / seconds:,.0f} tok/s"
    bench.add("decode", f"{name}, {batch} sequences", rate, share=floor / seconds, goal=DECODE_GOAL, note=note)


def watch(
    engine: EmbeddedEngine, batch: int, bytes_of: Callable[[int, int], float], timed: list[tuple[float, int, float]]
) -> None:
    """Note each step of the engine in which all of `batch` decode, the host's work before it included."""
    original, last = engine.step, [0.0]

    def step() -> Any:
        prefilled, before = engine.counters.prefilled, engine.counters.tokens
        running = list(engine.scheduler.running)
        lengths = sum(map(len, running))
        finished = original()
        now, made = time.perf_counter(), engine.counters.tokens - before
        if len(running) == batch and prefilled == engine.counters.prefilled and made and last[0]:
            rounds = -(-made // batch)
            positions = rounds * lengths + batch * rounds * (rounds - 1) // 2
            timed.append((now - last[0], made, bytes_of(rounds, positions)))
        last[0] = now
        return finished

    engine.step = step  # type: ignore[method-assign]
