"""The compute device of a model, and its precision settings."""

import functools
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from birl.errors import BirlError, first_line
from birl.kernels.instructions import best, processor
from birl.models.fused import has_triton

DRIVER = Path("/proc/driver/nvidia/version")  # there while the kernel has NVIDIA's driver


def choose(name: str, key: str = "model.device") -> torch.device:
    """auto | cpu | cuda | cuda:N -> a device, a GPU with its index: N, else that of LOCAL_RANK where this process sees
    several, 0 where it sees one, as ranks do that Slurm or Ray gave one each. Raises `BirlError`, which names `key`,
    where there is no such device; warns where auto takes the CPU of a machine with a GPU, or a GPU has no Triton."""
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if name != "auto":
            raise BirlError(f"{key}={name}: {no_gpu()}. Set {key}=cpu or leave it at auto.")
        if why := unused():
            warn(f"{key}=auto: {why}. So the CPU computes; {key}=cpu says that it should.")
        return torch.device("cpu")
    given, rank = name.partition(":")[2], os.environ.get("LOCAL_RANK", "0")
    index = int(given or (rank if count > 1 else 0))
    if index >= count:
        fix = f"Start {count} ranks on this machine at most, or let every rank see one GPU, its own."
        if given:
            fix = f"The first is cuda:0, the last cuda:{count - 1}."
        whose = "" if given else f"LOCAL_RANK={rank} wants GPU {index}, and "
        raise BirlError(f"{key}={name}: {whose}this process sees {count}{visible()}. {fix}")
    exact()
    if not has_triton():
        warn("there is no Triton, so all runs through transformers' forward, slowly: pip install triton")
    return torch.device("cuda", index)


def described(device: torch.device) -> str:
    """The GPU, or the processor and its instructions: where these are others, sums are rounded otherwise."""
    return torch.cuda.get_device_name(device) if device.type != "cpu" else f"{processor()} ({best() or 'no'} kernels)"


def moved(before: str | None, device: torch.device) -> list[str]:
    """What a run is told that was saved on `before` (None: not known)."""
    now = described(device)
    if before in (None, now):
        return []
    return [f"It was saved on {before}, and this is {now}: rounding, and so the bits, will differ."]


def no_gpu() -> str:
    """Why PyTorch has no GPU, in its own words: a driver that is too old, say."""
    name = f"PyTorch {torch.__version__}"
    if not (torch.version.cuda or torch.version.hip):
        return f"{name} is a build without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{name} sees no GPU{visible()}: {first_line(error).rstrip('.')}"
    return f"{name} sees no GPU{visible()}"


def unused() -> str:
    """Why PyTorch has no GPU on a machine with NVIDIA's driver; empty where there is none, or where it was hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not (DRIVER.exists() or shutil.which("nvidia-smi")):
        return ""
    return f"this machine has NVIDIA's driver, and {no_gpu()}"


@functools.cache
def warn(line: str) -> None:
    """Once in a process."""
    print(f"birl: {line}", file=sys.stderr, flush=True)


def use(device: torch.device) -> None:
    """What the calling thread launches goes there: CUDA has a current device for each thread, which Triton, FSDP and
    NCCL take, whatever the device of their tensors."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def visible() -> str:
    """For an error: what limits the GPUs that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if given is None else f" (CUDA_VISIBLE_DEVICES={given})"


def gpu(device: torch.device) -> str:
    """Unique id of a GPU; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def exact() -> None:
    """On CUDA float32 is float32, not TF32, and products of bfloat16 are summed in float32 to the end: the engine's few
    rows and the learner's many are split differently, and partial sums in bfloat16 would differ."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are, or will be once it is given them (`slices.py`)."""
    pending = getattr(model, "pending", None)
    return next(model.parameters()).device if pending is None else pending.device
