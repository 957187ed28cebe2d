"""Limits of a card by the launches, bytes and FLOPs of a step: `python -m benchmarks.gpu --roofline`, which writes the
tables of docs/gpu.md.

A decode step (64 sequences, 2,048 tokens of context each) and the forward and backward pass of one sequence of 8,192
tokens run on a simulated card (`tests/gpu/card.py`), for one layer and for two; all further layers cost the same as the
second. The model, whose figures are `RATES` and those of the data sheets:

    launch = max(bytes / (HBM bandwidth x reached), FLOPs / (peak x reached)) + gap
    decoding = sum of the launches, which are in a CUDA graph
    training = max(sum of the launches, launches x host), which the host launches one by one, and AdamW

Each input and output tensor of an operation counts once; for lookups only the rows that are read.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_bench import SHAPES, loss, made, samples
from benchmarks.gpu_predicted import decode_bytes
from birl.data.pack import Batch, pack
from birl.engine.runner import Runner
from birl.engine.sampler import draw
from birl.learner.optimizer import MasterWeights
from birl.learner.outputs import Outputs
from birl.models.fused_decoder import fused_for
from birl.models.paged import Cache
from birl.models.shape import Shape
from birl.models.slots import slots_of
from birl.parallel.ranks import Ranks
from birl.plan.cluster import Cluster, cluster_of
from birl.plan.step import ADAMW
from tests.gpu.card import CUDA, PRODUCTS, card, launches

MODELS = ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-30b-a3b", "llama-8b")
CARDS = ("h100", "h200", "a100-80", "l40s")
BATCH, CONTEXT, PACKED, PROMPT = 64, 2048, 8192, 512
PAGE = Path(__file__).parents[1] / "docs/gpu.md"
BEGIN, END = "<!-- python -m benchmarks.gpu --roofline -->", "<!-- until here -->"
MICROBATCHES = 8  # of an optimizer step
META = torch.device("meta")
STATE = 18  # bytes a parameter: bfloat16 weight, and float32 master, gradient and AdamW's two averages
USABLE = 0.95  # of a card's memory
PARTS = ("products", "attention", "other", "gaps", "AdamW")
LOOKED_UP = {"embedding", "index_select", "gather", "index"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Assumptions about a kind of card: fractions of the data sheet's peak that large products and FlashAttention 2
    reach, and of its bandwidth that a kernel reaches; seconds."""

    products: float
    attention: float
    bandwidth: float = 0.85
    gap: float = 1.5e-6  # between two kernels of a graph, including the second one's start and the first one's end
    host: float = 60e-6  # a launch from Python, with autograd: measured beside an H200 (docs/gpu.md)


#: products: cuBLAS in bfloat16; attention: Dao 2023 (FlashAttention-2), forward and backward on A100 and H100
RATES = {"h100": Rates(0.65, 0.34), "h200": Rates(0.65, 0.34), "a100-80": Rates(0.8, 0.6), "l40s": Rates(0.65, 0.5)}


@dataclass(frozen=True, slots=True)
class Launch:
    kind: str  # products | attention | other
    bytes: float
    flops: float = 0.0

    def seconds(self, cluster: Cluster, rates: Rates) -> float:
        speed = cluster.flops * (rates.attention if self.kind == "attention" else rates.products)
        return max(self.bytes / (cluster.hbm * rates.bandwidth), self.flops / speed)


Launches = Counter[Launch]


class Trace(TorchDispatchMode):
    """Counts launches. `context`: positions that each row attends to in decode."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context, self.on = context, False
        self.launches: Launches = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (self.on and launches(func)):
            return result
        name = func.__name__.partition(".")[0]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_cuda]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_cuda]
        size = total([*outputs, *outputs, *given[1:]] if name in LOOKED_UP else [*given, *outputs])
        if name in PRODUCTS:
            left = next(t for t in given if t.ndim > 1)
            count = 2.0 * outputs[0].numel() * left.shape[-1]
            grouped = name == "_grouped_mm" and outputs[0].ndim == 3
            self.add("products", size, count / outputs[0].shape[0] if grouped else count)
        elif "_flash_attention" in name:
            query = next(t for t in given if t.ndim == 3)
            pairs = len(query) * (len(query) + 1) / 2  # one sequence
            self.add("attention", size, (10 if "backward" in name else 4) * query[0].numel() * pairs)
        elif outputs or given:
            self.add("other", size)
        return result

    def launched(self, name: str, args: tuple[Any, ...]) -> None:
        """Count a Triton kernel of birl."""
        given = list({id(a): a for a in args if isinstance(a, Tensor)}.values())
        if name == "write_kernel":
            self.add("attention", 2 * total(given[:2]))
        elif name == "attend_kernel":
            query, pages = given[0], given[1:3]
            read = sum(len(query) * self.context * page[0, :, 0].nbytes for page in pages)
            self.add("attention", read + total([query, *given[3:]]))
        elif name == "sample_kernel":
            self.add("other", total(given[1:]))  # of the logits one chunk a row
        else:
            self.add("attention" if name == "combine_kernel" else "other", total(given))

    def add(self, kind: str, size: float, flops: float = 0.0) -> None:
        if self.on:
            self.launches[Launch(kind, size, flops)] += 1


def total(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def decoded(trace: Trace, model: nn.Module) -> None:
    """Trace a step as a graph captures it."""
    runner = Runner(model)
    runner.cache = Cache.make(CONTEXT // 32 + 1, slots_of(model), torch.bfloat16, CUDA)
    tokens = torch.zeros(BATCH, dtype=torch.int64, device=CUDA)
    lengths = torch.ones(BATCH, dtype=torch.int32, device=CUDA)
    table = torch.zeros(BATCH, CONTEXT // 32, dtype=torch.int32, device=CUDA)
    uniforms = torch.zeros(BATCH, device=CUDA)
    fused = fused_for(model)
    if fused:
        fused.join()
    with trace:
        trace.on = True
        draw(runner.step_of_graph(tokens, lengths, table), uniforms, uniforms)
        trace.on = False


@cache
def sequence() -> Batch:
    """A batch of one sequence of `PACKED` tokens."""
    return pack(samples(1, 1, PROMPT, PACKED - PROMPT, 1000), [1.0], PACKED)[0]


def trained(trace: Trace, model: nn.Module) -> None:
    """Trace forward and backward pass of a prompt with its answer, gradients summed in float32; no AdamW step."""
    outputs = Outputs(model, 1.0, False, Ranks())
    masters = MasterWeights(model, torch.bfloat16)
    for master in masters.tensors.values():
        master.grad = torch.zeros_like(master)  # exists since the first micro-batch
    fused_for(model)  # runs a forward pass to inspect it
    with torch.enable_grad(), trace:
        values = {f.name: getattr(sequence(), f.name) for f in fields(Batch)}
        made = {n: torch.empty(t.shape, dtype=t.dtype, device=META) for n, t in values.items() if isinstance(t, Tensor)}
        batch = replace(sequence(), **made)
        trace.on = True
        logp, entropy, _ = outputs(batch)
        loss(logp, entropy, batch)[0].backward()
        trace.on = False


def layers(name: str, training: bool) -> list[Launches]:
    """Launches of a step with one layer, and of each further layer."""
    counted: list[Launches] = []
    sequence()  # a simulated card has no numbers
    for count in (1, 2):
        trace = Trace(CONTEXT)
        with pytest.MonkeyPatch.context() as patch, card(patch, trace.launched):
            if training:  # autograd's engine asks for a card's streams, which the device meta does not have
                patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device == META), raising=False)
                trained(trace, made(name, META, num_hidden_layers=count))
            else:
                decoded(trace, made(name, CUDA, dtype=torch.bfloat16, num_hidden_layers=count))
        counted.append(trace.launches)
    first, second = counted
    return [first, second - first]


@dataclass(frozen=True, slots=True)
class Step:
    """Time of a step on one card. `parts`: seconds by kind of launch, the gaps between them, and AdamW."""

    launches: int
    parts: dict[str, float]
    host: float

    @property
    def seconds(self) -> float:
        return max(sum(self.parts.values()), self.host)

    @classmethod
    def of(cls, counted: Sequence[Launches], count: int, cluster: Cluster, rates: Rates, eager: bool) -> "Step":
        parts: dict[str, float] = dict.fromkeys(PARTS[:-1], 0.0)
        number = 0
        for times, some in zip((1, count - 1), counted, strict=True):
            for launch, n in some.items():
                parts[launch.kind] += times * n * launch.seconds(cluster, rates)
                number += times * n
        parts["gaps"] = number * rates.gap
        return cls(number, parts, number * rates.host if eager else 0.0)


def flops(shape: Shape) -> float:
    """Necessary FLOPs of the model, forward and backward: the head only for the answer."""
    pairs = PACKED * (PACKED + 1) / 2
    ends = 2 * shape.embedding * (PACKED - PROMPT)
    return 3 * (2 * shape.active * PACKED + ends + shape.pair_flops * pairs)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a model on one card; `share` of the HBM floor, or MFU."""

    step: Step
    speed: float  # tokens/s
    share: float
    fits: bool


def predicted(name: str, traces: Sequence[Sequence[Launches]], kind: str) -> tuple[Prediction, Prediction]:
    """Predictions of decode and training."""
    cluster, rates = cluster_of(kind, 1), RATES[kind]
    shape = Shape.of({"model_type": SHAPES[name]["kind"], "tie_word_embeddings": True, **SHAPES[name]})
    usable = USABLE * cluster.memory
    step = Step.of(traces[0], shape.layers, cluster, rates, eager=False)
    floor = decode_bytes(shape, BATCH, CONTEXT)
    held = floor + (0 if shape.tied else 2 * shape.embedding)
    decoding = Prediction(step, BATCH / step.seconds, floor / cluster.hbm / step.seconds, held < usable)
    step = Step.of(traces[1], shape.layers, cluster, rates, eager=True)
    adamw = ADAMW * shape.parameters / (cluster.hbm * rates.bandwidth) / MICROBATCHES
    step = replace(step, parts=step.parts | {"AdamW": adamw})
    share = flops(shape) / step.seconds / cluster.flops
    return decoding, Prediction(step, PACKED / step.seconds, share, STATE * shape.parameters < usable)


def tables(models: Sequence[str] = MODELS) -> dict[str, list[str]]:
    """Rows of docs/gpu.md, by table."""
    result: dict[str, list[str]] = {"decoding": [], "training": [], "parts": []}
    for name in models:
        traces = [layers(name, training) for training in (False, True)]
        by_card = {kind: predicted(name, traces, kind) for kind in CARDS}
        for i, what in enumerate(("decoding", "training")):
            cells = [f"{p.speed:,.0f}, {p.share:.0%}{'' if p.fits else ' *'}" for p in (c[i] for c in by_card.values())]
            result[what].append(f"| {name} | {next(iter(by_card.values()))[i].step.launches:,} | {' | '.join(cells)} |")
            parts = by_card["h200"][i].step.parts
            cells = [f"{1e3 * parts[n]:.2f}" if n in parts else "" for n in PARTS]
            result["parts"].append(f"| {name}, {what} | {' | '.join(cells)} |")
    return result


def write() -> None:
    """Replace the tables in docs/gpu.md by those of the current operations."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def text(models: Sequence[str] = MODELS) -> str:
    """The three tables in Markdown."""
    rows, cards = tables(models), " | ".join(CARDS)
    heads = {"decoding": f"| decoding | launches | {cards} |", "training": f"| training | launches | {cards} |"}
    heads["parts"] = "| ms on h200 | products | attention | other kernels | gaps | AdamW |"
    return "\n\n".join("\n".join([h, "|" + "---|" * (h.count("|") - 1), *rows[what]]) for what, h in heads.items())
