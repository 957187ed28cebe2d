"""Shared by the sections of `benchmarks.gpu`: models by shape, sizes, timing, the rows of the table."""

import argparse
import asyncio
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birl.data.pack import Batch
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner
from birl.models import attention
from birl.models.device import choose
from birl.models.slots import page_bytes
from birl.types import Completion, Sample, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {"kind": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    "qwen2-1.5b": {"kind": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                   "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936},
    "qwen2-7b": {"kind": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                 "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                 "tie_word_embeddings": False},
    "qwen3-0.6b": {"kind": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "qwen3-1.7b": {"kind": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "qwen3-8b": {"kind": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                 "tie_word_embeddings": False},
    "qwen3-30b-a3b": {"kind": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
                      "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "norm_topk_prob": True, "tie_word_embeddings": False},
    "llama-8b": {"kind": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                 "tie_word_embeddings": False},
    "llama-1b": {"kind": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"kind": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
WARM = (0, 500)  # seeds of the rounds that compile and capture; the sizes that occur depend on when requests arrive
SECONDS = ("s", "ms")  # units of which less is better


@dataclass
class Row:
    """One row of the table. `predicted`: the limit by bytes and FLOPs on the card's data sheet, stated before the card
    is used; NaN if there is none."""

    section: str
    case: str
    measured: float = math.nan
    unit: str = ""
    predicted: float = math.nan
    goal: float = math.nan  # of the ratio
    note: str = ""

    @property
    def ratio(self) -> float:
        """Fraction of the predicted speed, or of the predicted memory, that was reached."""
        return self.predicted / self.measured if self.unit in SECONDS else self.measured / self.predicted


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
    long: tuple[int, ...] = (8192, 32768)  # of a prompt
    few: int = 8  # sequences behind the longest
    requests: int = 256
    mixed: tuple[int, int] = (100, 1024)  # tokens of a request, in and out


TINY = Sizes(prompt=40, new=24, batches=(4, 6), packed=(256, 512), answer=32, step_prompt=20, prompts=2, group=4,
             matrix=256, copied=2**22, repeats=2, long=(48, 96), few=2, requests=6, mixed=(8, 24))  # fmt: skip


Predicted = dict[tuple[str, str], tuple[float, str]]  # section and case -> a figure and its unit


class Bench:
    """Shared by all sections: the machine's measured limits, sizes, timing."""

    def __init__(self, args: argparse.Namespace, predicted: Predicted) -> None:
        self.device = choose(args.device)
        self.predicted, self.file = predicted, Path(args.json) if args.json else None
        self.sizes, self.models = sizes_of(args), models_of(args)
        self.end = time.perf_counter() + 60 * args.minutes
        self.compute = ThreadPoolExecutor(1, "compute")
        self.rows: list[Row] = []

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
        """Mean of `repeats` consecutive calls."""
        for _ in range(warm):
            work()
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def add(self, section: str, case: str, measured: float = math.nan, **more: Any) -> None:
        predicted, unit = self.predicted.get((section, case), (math.nan, ""))
        self.rows.append(Row(section, case, measured, **{"predicted": predicted, "unit": unit} | more))
        if self.file:  # immediately, as the process may be killed
            self.file.write_text(json.dumps([asdict(row) for row in self.rows]))
        print(f"{time.strftime('%H:%M:%S')} {self.rows[-1]}", file=sys.stderr, flush=True)

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def model(self, name: str, implementation: str = attention.NAME, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return made(name, self.device, implementation, dtype)

    def words(self, name: str) -> int:
        return SHAPES[name]["vocab_size"]

    def engine(self, learner: Learner, batch: int, context: int) -> EmbeddedEngine:
        context += 64  # the scheduler admits only if there is some spare room
        gigabytes = (batch * (context // 32 + 2) + 64) * page_bytes(learner.model) / 2**30
        return EmbeddedEngine(
            learner.model, None, end_ids=frozenset(), context=context, compute=self.compute,  # type: ignore[arg-type]
            version=lambda: learner.version, max_batch=batch, kv_cache_gb=gigabytes,
        )  # fmt: skip

    def generate(
        self, engine: EmbeddedEngine, prompts: list[tuple[int, ...]], new: int | list[int], seed: int
    ) -> list[Completion]:
        """`new`: tokens of each answer."""
        counts = [new] * len(prompts) if isinstance(new, int) else new

        async def together() -> list[Completion]:
            params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=seed + i) for i, n in enumerate(counts)]
            return await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))

        return asyncio.run(together())


def made(
    name: str,
    device: torch.device,
    implementation: str = attention.NAME,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> nn.Module:
    """A model with random weights, made on the device. `changes`: of the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"tie_word_embeddings": True, **SHAPES[name], **changes}
    config = AutoConfig.for_model(
        shape.pop("kind"), **shape, max_position_embeddings=65536, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return model.eval()


def sizes_of(args: argparse.Namespace) -> Sizes:
    return TINY if args.tiny else Sizes()


def models_of(args: argparse.Namespace) -> list[str]:
    return ["tiny"] if args.tiny else args.models.split(",")


def shape_of(model: nn.Module) -> Any:
    return model.config


def prompt(seed: int, length: int, words: int) -> tuple[int, ...]:
    return tuple(torch.randint(1, words, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def samples(groups: int, group: int, prefix: int, answer: int, words: int) -> list[Sample]:
    made = []
    for g in range(groups):
        head = prompt(g, prefix, words)
        for e in range(group):
            tokens = head + prompt(1000 * g + e + 7, answer, words)
            made.append(
                Sample(
                    tokens=np.array(tokens, np.int32),
                    mask=np.repeat([False, True], [prefix, answer]),
                    logprobs=np.full(len(tokens), -1, np.float32),
                    versions=np.zeros(len(tokens), np.int32),
                    advantage=(-1.0) ** e,
                    group=g,
                    episode=e,
                )
            )
    return made


def loss(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss, on-policy."""
    ratio = (logp - logp.detach()).exp()
    return -(ratio * batch.advantages * batch.weights).sum(), {"gap": (logp.detach() - batch.logprobs).abs()}
