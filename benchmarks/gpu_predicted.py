"""What bytes and FLOPs alone allow on a card by its data sheet, for `benchmarks.gpu`: stated before it is used."""

import argparse
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_bench import Predicted, Sizes, made, models_of, sizes_of
from benchmarks.gpu_training import flops, rows
from birl.config import schema
from birl.plan.cluster import KINDS, Cluster, cluster_of
from birl.plan.run_memory import GIB, load_of, predict
from birl.plan.step import ADAMW

CPU = "cpu"  # a name for no card: figures of no machine, so that every row has some


def card(name: str) -> Cluster:
    """A kind of `birl plan --cluster`, or what PyTorch calls the device. Raises `BirlError`."""
    if name.lower() == CPU:
        return Cluster(gpus=1, flops=1e11, memory=8e9, hbm=1e10, inside=1e9, between=1e9, efficiency=1.0)
    words = name.lower().replace(" ", "")
    if "a100" in words:
        return cluster_of("a100-40" if "40" in words else "a100-80", 1)
    known = (kind for kind in sorted(KINDS, key=len, reverse=True) if kind in words)  # gb200 before b200
    return cluster_of(next(known, name), 1)


def predictions(args: argparse.Namespace, gpu: Cluster) -> Predicted:
    """By section and case. Only config's numbers are read: the models have no weights."""
    sizes, on_cpu = sizes_of(args), gpu.hbm == card(CPU).hbm
    result: Predicted = {
        ("machine", "copy, read + written"): (gpu.hbm / 1e12, "TB/s"),
        ("machine", f"bf16 product {sizes.matrix}^3"): (gpu.flops / 1e12, "TFLOP/s"),
    }
    for name in models_of(args):
        model = made(name, torch.device("meta"))
        shape: Any = model.config
        for batch in sizes.batches:
            seconds = token_seconds(model, batch, sizes.prompt + sizes.new / 2, gpu)
            result["decode", f"{name}, {batch} sequences"] = batch / seconds, "tok/s"
        for tokens in sizes.packed:
            batch = rows(tokens, sizes, shape.vocab_size)
            speed = len(batch.tokens) * gpu.flops / flops(model, batch)
            result["training", f"{name}, {tokens} packed tokens"] = speed, "tok/s"
        step = ADAMW * sum(p.numel() for p in model.parameters()) / gpu.hbm
        result["training", f"{name}, optimizer step"] = 1e3 * step, "ms"
        whole = sampling(model, sizes, gpu) + learning(model, sizes, gpu) + step
        result |= {("GRPO step", f"{name}, {who}"): (whole, "s") for who in ("birl", "transformers")}
        result["mismatch", name] = 2**-8, "nats"  # a unit in bfloat16's last place of 1
        result["memory", name] = memory(model, sizes, 0 if on_cpu else int(gpu.memory)), "GiB"
    first = models_of(args)[0]
    result["TRL", first] = result["GRPO step", f"{first}, birl"]
    return result


def token_seconds(model: nn.Module, batch: int, context: float, gpu: Cluster) -> float:
    """One token for each of `batch` sequences of so many: bfloat16 weights (the embedding is the head), keys and values
    read once, or the products, whichever takes longer."""
    shape: Any = model.config
    parameters = sum(p.numel() for p in model.parameters())
    keys = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.hidden_size // shape.num_attention_heads
    return max((2 * parameters + batch * context * 2 * keys) / gpu.hbm, 2 * parameters * batch / gpu.flops)


def sampling(model: nn.Module, sizes: Sizes, gpu: Cluster) -> float:
    count, context = sizes.prompts * sizes.group, sizes.step_prompt + sizes.answer / 2
    return sizes.answer * token_seconds(model, count, context, gpu)


def learning(model: nn.Module, sizes: Sizes, gpu: Cluster) -> float:
    """6 FLOPs a weight and token; attention is left out, which is little at these lengths."""
    tokens = sizes.prompts * (sizes.step_prompt + sizes.group * sizes.answer)
    return 6 * sum(p.numel() for p in model.parameters()) * tokens / gpu.flops


def memory(model: nn.Module, sizes: Sizes, size: int) -> float:
    """Of `birl plan` for the GRPO step on a card of that size [bytes], without what PyTorch does not allocate [GiB]."""
    config = schema.RL()
    config.learner.tokens_per_microbatch, config.engine.max_batch = 16384, sizes.prompts * sizes.group
    config.rollout.prompts, config.rollout.group_size = sizes.prompts, sizes.group
    config.rollout.max_tokens, config.validation.every = sizes.answer, 0
    load = load_of(config, sizes.step_prompt, sizes.step_prompt + sizes.answer)
    phases = predict(model, config, load, size)
    elsewhere = ("process", "between blocks")
    return max(sum(size for name, size in column.items() if name not in elsewhere) for column in phases.values()) / GIB
