"""Where a model computes, and in which precision there."""

import os

import torch
from torch import nn

from birl.errors import BirlError


def choose(name: str) -> torch.device:
    """auto | cpu | cuda -> a device, a GPU with its index: that of LOCAL_RANK where this process sees several, 0 where
    it sees one, as ranks do that Slurm or Ray gave one each. Raises `BirlError` where there is no such device."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = "sees no GPU" if torch.version.cuda else "is a build without CUDA"
        raise BirlError(
            f"model.device={name}: PyTorch {torch.__version__} {built}. Set model.device=cpu or leave it at auto."
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0
    if index >= count:
        raise BirlError(
            f"model.device={name}: LOCAL_RANK={index} wants GPU {index}, and this process sees {count}{visible()}. "
            f"Start {count} ranks on this machine at most, or let every rank see one GPU, its own."
        )
    exact()
    return torch.device("cuda", index)


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
    """What tells one GPU from every other; empty on a CPU."""
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
