"""Assigns GPUs to the servers of a run."""

import os

import torch

from birl.config import schema
from birl.config.decided import SERVERS
from birl.errors import BirlError
from birl.models.device import choose, visible


def shares(engine: schema.Engine, device: str, learner: int) -> list[tuple[str, ...]]:
    """The GPUs of each server, as in CUDA_VISIBLE_DEVICES: tensor_parallel x pipeline_parallel for each, after the
    first `learner` ones that this process sees; with engine.sleep including the learner's. Empty for each if no server
    is started or computes on a GPU. Raises `BirlError` if there are too few.

    Example: shares(Engine(kind="vllm", count=2), "auto", 1) == [("1",), ("2",)]
    """
    if engine.attach or engine.kind not in SERVERS or device == "cpu" or not torch.cuda.is_available():
        return [()] * engine.count
    names, size = named(), engine.tensor_parallel * engine.pipeline_parallel
    if ":" in device:  # the learner's GPU comes first
        names.insert(0, names.pop(choose(device).index))
    first = 0 if engine.sleep else learner
    needed = first + engine.count * size
    if needed > len(names):
        beside = f" beside the learner's {learner}" if first else ""
        turns = ", engine.sleep=true where learner and servers take turns" if first else ""
        raise BirlError(
            f"engine.count={engine.count}: {engine.count} x {size} GPUs for {engine.kind} servers{beside} are "
            f"{needed}, and this machine shows {len(names)}{visible()}. Use fewer{turns}, or servers elsewhere: "
            "engine.attach."
        )
    return [tuple(names[start : start + size]) for start in range(first, needed, size)]


def named() -> list[str]:
    """The GPUs that this process sees, as in CUDA_VISIBLE_DEVICES: by index or by UUID."""
    given, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    names = map(str, range(count)) if given is None else map(str.strip, given.split(","))
    return list(names)[:count]
