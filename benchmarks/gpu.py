"""Everything about one GPU in one command, under 9 minutes: decoding, training, a whole GRPO step, mismatch, memory.

    python -m benchmarks.gpu --out benchmarks/results
    python -m benchmarks.gpu --device cpu --tiny          the same code on a CPU, in seconds: figures mean nothing

Models are random, made on the device, with the shapes of real ones; nothing is downloaded. A section that fails prints
its error in the table, the others go on, and the exit status is 1. Sections stop starting new cases when the time is
over (`--minutes`). Needs torch, transformers and this folder; docs/gpu.md says what each figure is.
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birl.data.pack import Batch, pack
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.device import choose
from birl.models.fused import has_triton
from birl.models.fused_decoder import fused_for
from birl.types import Completion, Sample, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {"kind": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    "qwen2-1.5b": {"kind": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                   "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936},
    "llama-1b": {"kind": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"kind": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
NOMINAL = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}  # dense bf16 FLOP/s, byte/s
DECODE_GOAL, TRAIN_GOAL = 0.6, 0.5


@dataclass
class Row:
    """One line of the table. `share` is compared with `goal` where there is one."""

    section: str
    case: str
    value: str
    share: float | None = None
    goal: float | None = None
    note: str = ""


@dataclass
class Sizes:
    prompt: int = 512
    new: int = 256
    batches: tuple[int, ...] = (64, 256)
    packed: tuple[int, ...] = (4096, 8192, 16384)
    answer: int = 512  # in a packed tree, and of the GRPO step
    step_prompt: int = 256
    prompts: int = 8
    group: int = 8
    matrix: int = 8192
    copied: int = 2**32  # bytes
    repeats: int = 5


TINY = Sizes(prompt=40, new=24, batches=(4, 6), packed=(256, 512), answer=32, step_prompt=20, prompts=2, group=4,
             matrix=256, copied=2**22, repeats=2)  # fmt: skip


class Bench:
    """What all sections share: the machine's measured limits, sizes, the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = choose(args.device)
        self.sizes = TINY if args.tiny else Sizes()
        self.models = ["tiny"] if args.tiny else args.models.split(",")
        self.end = time.perf_counter() + 60 * args.minutes
        self.compute = ThreadPoolExecutor(1, "compute")
        self.rows: list[Row] = []
        self.bandwidth = self.flops = math.nan

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int, warm: int = 2) -> float:
        """Mean of `repeats` calls behind one another."""
        for _ in range(warm):
            work()
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def add(self, *values: Any, **options: Any) -> None:
        self.rows.append(Row(*values, **options))
        print(f"{time.strftime('%H:%M:%S')} {self.rows[-1]}", file=sys.stderr, flush=True)

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def model(self, name: str, implementation: str = attention.NAME) -> nn.Module:
        """Random float32 weights, made on the device."""
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = dict(SHAPES[name])
        config = AutoConfig.for_model(
            shape.pop("kind"), **shape, tie_word_embeddings=True, max_position_embeddings=32768, eos_token_id=None,
            bos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self.device):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        return model.float().eval()

    def engine(self, learner: Learner, batch: int, context: int) -> EmbeddedEngine:
        shape: Any = learner.model.config
        size = shape.hidden_size // shape.num_attention_heads
        page = 2 * 32 * shape.num_hidden_layers * shape.num_key_value_heads * size * 2
        context += 64  # the scheduler admits only while there is some room to spare
        gigabytes = (batch * (context // 32 + 2) + 64) * page / 2**30
        return EmbeddedEngine(
            learner.model, None, end_ids=frozenset(), context=context, compute=self.compute,  # type: ignore[arg-type]
            version=lambda: learner.version, max_batch=batch, kv_cache_gb=gigabytes,
        )  # fmt: skip

    def generate(self, engine: EmbeddedEngine, prompts: list[tuple[int, ...]], new: int, seed: int) -> list[Completion]:
        async def together() -> list[Completion]:
            params = [SamplingParams(max_tokens=new, ignore_eos=True, seed=seed + i) for i in range(len(prompts))]
            return await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))

        return asyncio.run(together())


def shape_of(model: nn.Module) -> Any:
    return model.config


def prompt(seed: int, length: int, words: int) -> tuple[int, ...]:
    return tuple(torch.randint(1, words, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def limits(bench: Bench) -> None:
    """Bandwidth by a copy (bytes read and written), arithmetic by one large product."""
    size = bench.sizes.copied
    a, b = torch.empty(2, size // 2, dtype=torch.uint8, device=bench.device).unbind()
    a.zero_()
    bench.bandwidth = size / bench.seconds(lambda: b.copy_(a), 10)
    n = bench.sizes.matrix
    x, y = torch.randn(2, n, n, device=bench.device).to(torch.bfloat16).unbind()
    bench.flops = 2 * n**3 / bench.seconds(lambda: x @ y, 10)
    known = next((v for k, v in NOMINAL.items() if k in bench.name), None)
    bench.add("machine", "copy, read + written", f"{bench.bandwidth / 1e12:.3f} TB/s",
              share=known and bench.bandwidth / known[1], note="share of the data sheet's")  # fmt: skip
    bench.add("machine", f"bf16 product {n}^3", f"{bench.flops / 1e12:.1f} TFLOP/s",
              share=known and bench.flops / known[0], note="share of the data sheet's")  # fmt: skip


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


def samples(groups: int, group: int, prefix: int, answer: int, words: int) -> list[Sample]:
    made = []
    for g in range(groups):
        head = prompt(g, prefix, words)
        for e in range(group):
            tokens = head + prompt(1000 * g + e + 7, answer, words)
            mask = (False,) * prefix + (True,) * answer
            made.append(Sample(tokens=tokens, mask=mask, logprobs=(-1.0,) * len(tokens), versions=(0,) * len(tokens),
                               advantage=(-1.0) ** e, group=g, episode=e))  # fmt: skip
    return made


def loss(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's, on-policy."""
    ratio = (logp - logp.detach()).exp()
    return -(ratio * batch.advantages * batch.weights).sum(), {"gap": (logp.detach() - batch.logprobs).abs()}


def flops(model: nn.Module, batch: Batch) -> float:
    """Of a forward and backward pass that computes nothing twice: 6 a weight and token, 12 a head's element and visible
    pair of tokens."""
    config: Any = model.config
    layers = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n)
    head = config.vocab_size * config.hidden_size
    pairs = sum(p * (p + 1) / 2 + sum(n * (n + 1) / 2 + n * p for n in branches) for p, branches in batch.trees)
    seen = 12 * config.num_hidden_layers * config.hidden_size * pairs
    return 6.0 * (layers * len(batch.tokens) + head * len(batch.targets)) + seen


def training(bench: Bench) -> None:
    for name in bench.models:
        train_model(bench, Learner(bench.model(name)), name)
        bench.clean()


def train_model(bench: Bench, learner: Learner, name: str) -> None:
    sizes, words = bench.sizes, shape_of(learner.model).vocab_size
    known = next((v[0] for k, v in NOMINAL.items() if k in bench.name), math.nan)
    for tokens in sizes.packed:
        if bench.left < 30:
            bench.add("training", f"{name}, {tokens} packed tokens", "left out: no time")
            continue
        data = samples(max(tokens // (8 * sizes.answer), 1), 7, sizes.answer, sizes.answer, words)
        (batch,) = pack(data, [1 / len(data)] * len(data), tokens)
        batch = batch.to(bench.device)
        seconds = bench.seconds(partial(learner.forward_backward, batch, loss, Stats()), sizes.repeats)
        rate, speed = flops(learner.model, batch) / seconds, f"{len(batch.tokens) / seconds:,.0f} tok/s"
        note = f"{rate / 1e12:.1f} TFLOP/s, {rate / known:.0%} of the data sheet's; {1e3 * seconds:.1f} ms"
        case = f"{name}, {len(batch.tokens)} packed tokens"
        bench.add("training", case, speed, share=rate / bench.flops, goal=TRAIN_GOAL, note=note)
    seconds = bench.seconds(partial(learner.optim_step, 1e-6), 3, warm=1)
    bench.add("training", f"{name}, optimizer step", f"{1e3 * seconds:.1f} ms")


def grpo(bench: Bench) -> None:
    """A whole step, ours and theirs, with the mismatch and the memory of ours."""
    sizes = bench.sizes
    for name in bench.models:
        if bench.left < 60 and bench.device.type == "cuda":
            bench.add("GRPO step", name, "left out: no time")
            continue
        learner = Learner(bench.model(name))
        words = shape_of(learner.model).vocab_size
        count = sizes.prompts * sizes.group
        engine = bench.engine(learner, count, sizes.step_prompt + sizes.answer)
        prompts = [prompt(i // sizes.group, sizes.step_prompt, words) for i in range(count)]
        ours(bench, learner, engine, prompts, seed=0)  # compiles and captures
        bench.clean()
        generating, learning, gap = ours(bench, learner, engine, prompts, seed=1000)
        total = generating + learning
        what = f"{sizes.prompts} x {sizes.group} x {sizes.answer} tokens"
        bench.add(
            "GRPO step",
            f"{name}, birl",
            f"{total:.2f} s",
            note=f"{what}: {generating:.2f} sampling, {learning:.2f} learning",
        )
        note = f"{len(gap)} tokens, bfloat16"
        bench.add("mismatch", name, f"mean {gap.mean():.2e}, max {gap.max():.2e} nats", note=note)
        memory(bench, learner.model, name, count)
        asyncio.run(engine.close())
        del learner, engine
        bench.clean()
        generating, learning = theirs(bench, name, prompts)
        bench.add("GRPO step", f"{name}, transformers", f"{generating + learning:.2f} s",
                  share=(generating + learning) / total,
                  note=f"generate {generating:.2f}, plain padded loop {learning:.2f}; share: times ours")  # fmt: skip
        bench.clean()


def ours(
    bench: Bench, learner: Learner, engine: EmbeddedEngine, prompts: list[tuple[int, ...]], seed: int
) -> tuple[float, float, Tensor]:
    """Seconds of sampling and of learning, and |engine log-prob - learner log-prob| of each token."""
    start = time.perf_counter()
    completions = bench.generate(engine, prompts, bench.sizes.answer, seed)
    middle = time.perf_counter()
    data = [
        Sample(
            tokens=p + c.tokens, mask=(False,) * len(p) + (True,) * len(c.tokens),
            logprobs=(0.0,) * len(p) + c.logprobs, versions=(0,) * len(p) + c.versions,
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
    bfloat16 autocast and fused AdamW: the same precision as ours."""
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


def memory(bench: Bench, model: nn.Module, name: str, count: int) -> None:
    if bench.device.type != "cuda":
        bench.add("memory", name, "not measured on a CPU")
        return
    from birl.config import schema
    from birl.loops.memory import predict

    config = schema.RL()
    config.learner.tokens_per_microbatch, config.engine.max_batch = 16384, count
    config.rollout.max_tokens = bench.sizes.answer
    predicted = predict(model, config, reference=False)
    expected = sum(size for what, size in predicted.items() if what != "process")
    peak = torch.cuda.max_memory_allocated()
    note = f"predicted {expected / 2**30:.1f} GiB"
    bench.add("memory", name, f"{peak / 2**30:.1f} GiB", share=peak / expected, note=note)


def trl(bench: Bench) -> None:
    """TRL in a process of its own, on the first model, where it can be imported."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        bench.add("TRL", bench.models[0], "not installed here")
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
        bench.add("TRL", bench.models[0], f"{figures['step_s']:.2f} s a step",
                  note=f"generation {figures['generate_s']:.2f}; prompts of about 200 tokens")  # fmt: skip


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "machine": limits, "decode": decode, "training": training, "grpo": grpo, "trl": trl,
}  # fmt: skip


def header(bench: Bench) -> str:
    import transformers

    parts = [f"PyTorch {torch.__version__}", f"transformers {transformers.__version__}"]
    if has_triton():
        import triton

        parts.append(f"Triton {triton.__version__}")
    return ", ".join([date.today().isoformat(), bench.name, *parts])


def table(bench: Bench, markdown: bool) -> str:
    lines = [["section", "case", "value", "share", "goal", "note"]]
    for r in bench.rows:
        shares = ("" if x is None else f"{x:.2f}" for x in (r.share, r.goal))
        lines.append([r.section, r.case, r.value, *shares, r.note])
    if markdown:
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([header(bench), "", rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([header(bench), *texts])


def checks(bench: Bench) -> Iterator[str]:
    """What silently makes figures meaningless."""
    if bench.device.type == "cuda":
        model = bench.model(bench.models[0])
        if fused_for(model) is None:
            yield "the fused decoder does not take this model: no graphs, everything runs through transformers' forward"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny sizes")
    parser.add_argument("--models", default="qwen2-0.5b,qwen2-1.5b", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing new after this")
    parser.add_argument("--json", help="write every figure into this file")
    parser.add_argument("--out", help="folder for gpu.md and gpu.json")
    args = parser.parse_args()
    bench = Bench(args)
    failed = 0
    wanted = args.sections.split(",")
    for name in dict.fromkeys(["machine", *wanted]):  # the others are compared with the machine's limits
        try:
            if name == "machine":
                for problem in checks(bench):
                    bench.add("machine", "warning", problem)
            SECTIONS[name](bench)
        except Exception as error:
            failed = 1
            traceback.print_exc()
            text = str(error).strip().splitlines()
            bench.add(name, "FAILED", type(error).__name__, note=text[0][:200] if text else "")
        bench.clean()
    bench.compute.shutdown()
    figures = {"header": header(bench), "rows": [asdict(row) for row in bench.rows]}
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        Path(args.out, "gpu.json").write_text(json.dumps(figures, indent=1) + "\n")
        Path(args.out, "gpu.md").write_text(table(bench, markdown=True) + "\n")
    print(table(bench, markdown=True) + "\n\n" + table(bench, markdown=False))
    return failed


if __name__ == "__main__":
    sys.exit(main())
