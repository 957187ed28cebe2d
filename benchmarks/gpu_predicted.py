"""Limits of a card by bytes and FLOPs of its data sheet, for `benchmarks.gpu`: stated before it is used."""

import argparse
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_bench import SHAPES, Predicted, Sizes, made, models_of, sizes_of
from benchmarks.gpu_serving import requests
from benchmarks.gpu_training import flops, rows
from birl.config import schema
from birl.models.shape import Shape
from birl.plan.cluster import KINDS, Cluster, cluster_of
from birl.plan.run_memory import GIB, predict
from birl.plan.sizes import load_of
from birl.plan.step import ADAMW

CPU = "cpu"  # a name for no card, with figures of no real machine, so that every row has some


def card(name: str) -> Cluster:
    """The cluster kind of `birl plan --cluster`, or by PyTorch's name of the device. Raises `BirlError`."""
    if name.lower() == CPU:
        return Cluster(gpus=1, flops=1e11, memory=8e9, hbm=1e10, inside=1e9, between=1e9, efficiency=1.0)
    words = name.lower().replace(" ", "")
    if "a100" in words:
        return cluster_of("a100-40" if "40" in words else "a100-80", 1)
    known = (kind for kind in sorted(KINDS, key=len, reverse=True) if kind in words)  # gb200 before b200
    return cluster_of(next(known, name), 1)


def predictions(args: argparse.Namespace, gpu: Cluster) -> Predicted:
    """Predictions by section and case. Only the configs are read: the models have no weights."""
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
        result |= serving(name, model, sizes, gpu)
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
    logits = 4 * sizes.batches[-1] * SHAPES[first]["vocab_size"]
    for case in ("", ", top-p"):
        case = f"{sizes.batches[-1]} x {SHAPES[first]['vocab_size']}{case}"
        result["sampler", case] = 1e3 * 3 * logits / gpu.hbm, "ms"  # copied, and read once
    weights = 2 * Shape.of_model(made(first, torch.device("meta"))).parameters
    for what in ("sleep", "wake"):
        result["sleep", f"{first}, {what}"] = 1e3 * weights / gpu.hbm, "ms"  # as long as writing them takes
    result["transfer", f"{first}, digests"] = gpu.hbm / 1e9, "GB/s"  # read once
    result["transfer", f"{first}, to another process"] = gpu.hbm / 4e9, "GB/s"  # two copies: into a bucket, out of it
    result["TRL", first] = result["GRPO step", f"{first}, birl"]
    return result


def token_seconds(model: nn.Module, batch: int, context: float, gpu: Cluster) -> float:
    """Seconds of one token for each of `batch` sequences of `context` tokens: by the bytes that must be read, or by the
    products, whichever takes longer."""
    shape = Shape.of_model(model)
    products = 2 * (shape.active + shape.embedding) * batch
    return max(decode_bytes(shape, batch, context) / gpu.hbm, products / gpu.flops)


def decode_bytes(shape: Shape, batch: int, context: float) -> float:
    """Bytes that a step for `batch` sequences of `context` tokens must read: keys and values, and the weights in
    bfloat16, without an embedding that is not the head, and only the experts that some token uses, chosen at random."""
    keys = 2 * shape.layers * shape.kv_heads * shape.head_dim
    weights = shape.parameters - (0 if shape.tied else shape.embedding)
    if shape.experts:
        weights -= shape.expert_parameters * (1 - shape.chosen / shape.experts) ** batch
    return 2 * weights + batch * context * 2 * keys


def serving(name: str, model: nn.Module, sizes: Sizes, gpu: Cluster) -> Predicted:
    """Prompts by their products, long contexts and mixed requests by the bytes that their steps must read."""
    shape = Shape.of_model(model)
    longest, few, batch = sizes.long[-1], sizes.few, sizes.batches[0]
    plain = batch / token_seconds(model, batch, sizes.prompt + sizes.new / 2, gpu)
    behind = few / token_seconds(model, few, longest + sizes.new / 2, gpu)
    work = requests(sizes)
    seconds = sum(n * shape.flops(n, factor=1.0) for n, _ in work) / gpu.flops
    for place in range(max(n for _, n in work)):
        going = [a + place for a, n in work if n > place]
        seconds += token_seconds(model, len(going), sum(going) / len(going), gpu)
    mixed = sum(n for _, n in work) / seconds
    return {
        **{("prefill", f"{name}, {n} tokens"): (gpu.flops / shape.flops(n, factor=1.0), "tok/s") for n in sizes.long},
        ("contexts", f"{name}, {few} sequences of {longest}"): (behind, "tok/s"),
        ("contexts", f"{name} without graphs, {batch} sequences"): (plain, "tok/s"),
        **{("workload", f"{name}, {who}"): (mixed, "tok/s") for who in ("birl", "vLLM")},
    }


def sampling(model: nn.Module, sizes: Sizes, gpu: Cluster) -> float:
    count, context = sizes.prompts * sizes.group, sizes.step_prompt + sizes.answer / 2
    return sizes.answer * token_seconds(model, count, context, gpu)


def learning(model: nn.Module, sizes: Sizes, gpu: Cluster) -> float:
    """6 FLOPs per weight and token, without attention, which is little at these lengths."""
    tokens = sizes.prompts * (sizes.step_prompt + sizes.group * sizes.answer)
    return 6 * sum(p.numel() for p in model.parameters()) * tokens / gpu.flops


def memory(model: nn.Module, sizes: Sizes, size: int) -> float:
    """`birl plan`'s peak of the GRPO step on a card of that size [bytes], of memory that PyTorch allocates [GiB]."""
    config = schema.RL()
    config.learner.tokens_per_microbatch, config.engine.max_batch = 16384, sizes.prompts * sizes.group
    config.rollout.prompts, config.rollout.group_size = sizes.prompts, sizes.group
    config.rollout.max_tokens, config.validation.every = sizes.answer, 0
    load = load_of(config, sizes.step_prompt, sizes.step_prompt + sizes.answer)
    phases = predict(model, config, load, size)
    elsewhere = ("process", "between blocks")
    return max(sum(size for name, size in column.items() if name not in elsewhere) for column in phases.values()) / GIB
