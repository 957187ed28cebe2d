"""Serving beyond short decode steps, for `benchmarks.gpu`: prompts, long contexts, launches, the sampler, requests of
mixed lengths, sleep, weights to another process."""

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.gpu_bench import WARM, Bench, Sizes, prompt
from benchmarks.gpu_decode import decode_batch
from birl.engine.engine import EmbeddedEngine
from birl.engine.sampler import draw, sample
from birl.engines.collective import pieces
from birl.engines.handles import lent
from birl.learner.learner import Learner
from birl.models.digests import digests
from birl.models.released import shapes_of
from birl.types import SamplingParams

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, file = sys.argv[1:]
work = json.load(open(file))
params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
llm = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, load_format="dummy")
for _ in range(2):
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p, _ in work], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.reset_prefix_cache()
print(seconds)
"""
READER = """
import json, sys, torch
from birl.engines.handles import borrowed
device = torch.device(sys.argv[1])
for line in sys.stdin:
    taken = borrowed(json.loads(line), device, 2**62)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(len(taken), flush=True)
"""
BUCKET = 256  # MiB


def requests(sizes: Sizes) -> list[tuple[int, int]]:
    """Tokens in and out of each request: nano-vllm's bench.py, 256 requests of 100 to 1,024."""
    numbers = random.Random(0)
    return [(numbers.randint(*sizes.mixed), numbers.randint(*sizes.mixed)) for _ in range(sizes.requests)]


def prefill(bench: Bench) -> None:
    """One prompt to its first token."""
    for name in bench.models:
        learner = Learner(bench.model(name, dtype=torch.bfloat16), trainable=False)
        for length in bench.sizes.long:
            if bench.left < 30:
                bench.add("prefill", f"{name}, {length} tokens", note="left out: no time")
                continue
            engine = bench.engine(learner, 1, length + 1)
            words = bench.words(name)
            bench.generate(engine, [prompt(0, length, words)], 1, 0)
            start = time.perf_counter()
            bench.generate(engine, [prompt(1, length, words)], 1, 1)
            seconds = time.perf_counter() - start
            asyncio.run(engine.close())
            bench.add("prefill", f"{name}, {length} tokens", length / seconds, note=f"{1e3 * seconds:.1f} ms")
            bench.clean()


def contexts(bench: Bench) -> None:
    """Decode after long contexts, and without graphs: the cost of launching."""
    sizes = bench.sizes
    for name in bench.models:
        learner = Learner(bench.model(name, dtype=torch.bfloat16), trainable=False)
        long = (sizes.few, sizes.long[-1], f"{name}, {sizes.few} sequences of {sizes.long[-1]}", False)
        eager = (sizes.batches[0], sizes.prompt, f"{name} without graphs, {sizes.batches[0]} sequences", True)
        for batch, length, case, without in (long, eager):
            if bench.left < 60 and bench.device.type == "cuda":
                bench.add("contexts", case, note="left out: no time")
            else:
                decode_batch(bench, learner, name, batch, ("contexts", case), length, without)
            bench.clean()


def sampler(bench: Bench) -> None:
    """Sampling for all rows from logits: from the whole distribution, and with top-p."""
    name = bench.models[0]
    rows, words = bench.sizes.batches[-1], bench.words(name)
    logits = torch.randn(rows, words, device=bench.device)
    ones, uniforms = torch.ones(rows, device=bench.device), torch.rand(rows, device=bench.device)
    seconds = bench.seconds(lambda: draw(logits.clone(), ones, uniforms), 10)
    bench.add("sampler", f"{rows} x {words}", 1e3 * seconds, note="with a copy of the logits")
    params = [SamplingParams(max_tokens=1, top_p=0.9)] * rows
    seconds = bench.seconds(lambda: sample(logits.clone(), params, [0.5] * rows), 2, warm=1)
    bench.add("sampler", f"{rows} x {words}, top-p", 1e3 * seconds, note="the same")


def workload(bench: Bench) -> None:
    """nano-vllm's workload: all requests at once; birl, and vLLM if it is installed."""
    work = requests(bench.sizes)
    for name in bench.models:
        if bench.left < 60 and bench.device.type == "cuda":
            bench.add("workload", f"{name}, birl", note="left out: no time")
            continue
        learner = Learner(bench.model(name, dtype=torch.bfloat16), trainable=False)
        engine = bench.engine(learner, len(work), max(a + b for a, b in work))
        prompts = [prompt(i, n, bench.words(name)) for i, (n, _) in enumerate(work)]
        tokens = [n for _, n in work]
        start = 0.0
        for seed in (*WARM, 1000):
            start = time.perf_counter()
            bench.generate(engine, prompts, tokens, seed)
        seconds = time.perf_counter() - start
        asyncio.run(engine.close())
        bench.add("workload", f"{name}, birl", sum(tokens) / seconds, note=f"{sum(tokens):,} tokens in {seconds:.2f} s")
        del engine
        vllm(bench, name, learner, [*zip(prompts, tokens, strict=True)])
        bench.clean()


def vllm(bench: Bench, name: str, learner: Learner, work: list[tuple[tuple[int, ...], int]]) -> None:
    """The same requests in a separate process, also with random weights."""
    if importlib.util.find_spec("vllm") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        model: Any = learner.model
        model.config.save_pretrained(folder)
        with open(f"{folder}/work.json", "w") as file:
            json.dump(work, file)
        learner.model.to("cpu")
        bench.clean()
        command = [sys.executable, "-c", VLLM, folder, f"{folder}/work.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(bench.left, 60), check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["vLLM failed"])[-1])
    seconds = float(done.stdout.strip().splitlines()[-1])
    bench.add("workload", f"{name}, vLLM", sum(n for _, n in work) / seconds, note=f"{seconds:.2f} s")


def sleep(bench: Bench) -> None:
    """Sleep and wake of an engine with separate weights: it frees its memory, and allocates it again."""
    name = bench.models[0]
    model = bench.model(name, dtype=torch.bfloat16)
    engine = EmbeddedEngine(model, None, end_ids=frozenset(), context=256, compute=bench.compute)  # type: ignore[arg-type]
    bench.generate(engine, [prompt(0, 32, bench.words(name))], 4, 0)

    async def turn() -> tuple[float, float]:
        start = time.perf_counter()
        await engine.sleep()
        bench.wait()
        middle = time.perf_counter()
        await engine.wake()
        bench.wait()
        return middle - start, time.perf_counter() - middle

    seconds = asyncio.run(turn())
    asyncio.run(engine.close())
    for what, figure in zip(("sleep", "wake"), seconds, strict=True):
        bench.add("sleep", f"{name}, {what}", 1e3 * figure, note="without loading weights")


def transfer(bench: Bench) -> None:
    """Digests of the weights, and their way to another process on the same device (weights.method=ipc)."""
    name = bench.models[0]
    tensors = {n: p.data for n, p in bench.model(name, dtype=torch.bfloat16).named_parameters()}
    size, buckets = sum(t.nbytes for t in tensors.values()), pieces(shapes_of(tensors), BUCKET)
    bench.add("transfer", f"{name}, digests", size / bench.seconds(lambda: digests(tensors), 2, warm=1) / 1e9)

    async def sent(reader: "subprocess.Popen[str]") -> None:
        assert reader.stdin and reader.stdout
        for names in buckets:
            flat = torch.cat([tensors[n].reshape(-1) for n in names])
            async with lent(flat) as memory:
                print(json.dumps(memory), file=reader.stdin, flush=True)
                if reader.stdout.readline().strip() != str(flat.nbytes):
                    raise RuntimeError("the other process did not read a bucket")

    command = [sys.executable, "-c", READER, str(bench.device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        seconds = bench.seconds(lambda: asyncio.run(sent(reader)), 2, warm=1)
    bench.add("transfer", f"{name}, to another process", size / seconds / 1e9, note=f"buckets of {BUCKET} MiB")
