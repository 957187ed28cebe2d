"""A whole GRPO step, birl's and transformers', for `benchmarks.gpu`."""

import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_bench import WARM, Bench, loss, prompt, shape_of
from birl.data.pack import Batch, pack
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner, Stats
from birl.parallel.machine import peak_memory
from birl.types import Sample


def grpo(bench: Bench) -> None:
    """A whole step of both sides, with birl's log-prob mismatch and memory."""
    sizes = bench.sizes
    for name in bench.models:
        if bench.left < 60 and bench.device.type == "cuda":
            bench.add("GRPO step", f"{name}, birl", note="left out: no time")
            continue
        learner = Learner(bench.model(name))
        words = shape_of(learner.model).vocab_size
        count = sizes.prompts * sizes.group
        engine = bench.engine(learner, count, sizes.step_prompt + sizes.answer)
        prompts = [prompt(i // sizes.group, sizes.step_prompt, words) for i in range(count)]
        for seed in WARM:
            ours(bench, learner, engine, prompts, seed)
        bench.clean()
        generating, learning, gap = ours(bench, learner, engine, prompts, seed=1000)
        total = generating + learning
        what = f"{sizes.prompts} x {sizes.group} x {sizes.answer} tokens"
        bench.add(
            "GRPO step",
            f"{name}, birl",
            total,
            note=f"{what}: {generating:.2f} sampling, {learning:.2f} learning",
        )
        note = f"mean of {len(gap)} tokens, bfloat16; largest {gap.max():.2e}"
        bench.add("mismatch", name, gap.mean().item(), note=note)
        memory(bench, name)
        asyncio.run(engine.close())
        del learner, engine
        bench.clean()
        generating, learning = theirs(bench, name, prompts)
        note = (
            f"generate {generating:.2f}, plain padded loop {learning:.2f}; {(generating + learning) / total:.2f} x ours"
        )
        bench.add("GRPO step", f"{name}, transformers", generating + learning, note=note)
        bench.clean()


def ours(
    bench: Bench, learner: Learner, engine: EmbeddedEngine, prompts: list[tuple[int, ...]], seed: int
) -> tuple[float, float, Tensor]:
    """Seconds of sampling and of training, and |engine log-prob - learner log-prob| of each token."""
    start = time.perf_counter()
    completions = bench.generate(engine, prompts, bench.sizes.answer, seed)
    middle = time.perf_counter()
    data = [
        Sample(
            tokens=np.append(np.array(p, np.int32), c.tokens), mask=np.repeat([False, True], [len(p), len(c.tokens)]),
            logprobs=np.append(np.zeros(len(p), np.float32), c.logprobs),
            versions=np.append(np.full(len(p), 0, np.int32), c.versions),
            advantage=(-1.0) ** i, group=i // bench.sizes.group, episode=i,
        )
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]  # fmt: skip
    stats, gaps = Stats(), []

    def noting(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        value, figures = loss(logp, entropy, batch)
        gaps.append(figures["gap"])
        return value, figures

    for batch in pack(data, [1 / len(data)] * len(data), 16384):
        learner.forward_backward(batch, noting, stats)
    learner.optim_step(1e-6)
    bench.wait()
    return middle - start, time.perf_counter() - middle, torch.cat(gaps).cpu()


def theirs(bench: Bench, name: str, prompts: list[tuple[int, ...]]) -> tuple[float, float]:
    """transformers' `generate` in bfloat16, then a plain loop over padded micro-batches with float32 weights under
    bfloat16 autocast and fused AdamW: the same precision as birl's."""
    sizes = bench.sizes
    policy: Any = bench.model(name, "sdpa")
    twin: Any = bench.model(name, "sdpa").to(torch.bfloat16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    ids = torch.tensor(prompts, device=bench.device)

    def sample(new: int) -> Tensor:
        return twin.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0,
                             top_k=0, top_p=1.0, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)  # fmt: skip

    def learn(full: Tensor) -> None:
        for part in full.split(8):
            with torch.autocast(bench.device.type, dtype=torch.bfloat16):
                logits = policy(input_ids=part, use_cache=False, logits_to_keep=sizes.answer + 1).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(2, part[:, -sizes.answer :, None])
            (-logp.mean() * len(part) / len(full)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        short = sample(4)
    learn(torch.cat([short, ids.repeat(1, 1 + sizes.answer // ids.shape[1])], 1)[:8, : ids.shape[1] + sizes.answer])
    bench.wait()
    start = time.perf_counter()
    with torch.no_grad():
        full = sample(sizes.answer)
    bench.wait()
    middle = time.perf_counter()
    learn(full)
    bench.wait()
    return middle - start, time.perf_counter() - middle


def memory(bench: Bench, name: str) -> None:
    """The largest allocation; on a CPU, of the whole process."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.device.type == "cuda" else peak_memory()
    bench.add("memory", name, peak)


def trl(bench: Bench) -> None:
    """TRL in a separate process, on the first model, if it can be imported."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        bench.add("TRL", bench.models[0], note="not installed here")
        return
    from tests.tiny import tiny_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model: Any = bench.model(bench.models[0], "sdpa").to(torch.bfloat16)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        del model
        bench.clean()
        data = Path(folder, "prompts.jsonl")
        data.write_text("".join(json.dumps({"prompt": f"What is {i} + 4? " * 20}) + "\n" for i in range(8)))
        sizes = bench.sizes
        words = ["--model", folder, "--data", data, "--prompts", sizes.prompts, "--group", sizes.group,
                 "--tokens", sizes.answer, "--steps", 2, "--precision", "bfloat16"]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peer_trl", *map(str, words)],
            capture_output=True, text=True, timeout=max(bench.left, 30), check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "TRL failed")
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        bench.add("TRL", bench.models[0], figures["step_s"], unit="s",
                  note=f"generation {figures['generate_s']:.2f}; prompts of about 200 tokens")  # fmt: skip
