"""The compute device of a model, and its precision settings."""

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birl.errors import BirlError, first_line
from birl.kernels.compiling import problem
from birl.kernels.instructions import best, processor
from birl.models.fused import has_triton

DRIVER = Path("/proc/driver/nvidia/version")  # exists while NVIDIA's kernel driver is loaded


def choose(name: str, key: str = "model.device") -> torch.device:
    """auto | cpu | cuda | cuda:N -> a device; a GPU gets its index: N, else LOCAL_RANK if this process sees several, 0
    if it sees one (as under Slurm or Ray with one GPU per rank). Raises `BirlError`, which names `key`, if there is no
    such device; warns if auto takes the CPU of a machine with a GPU, or if a GPU has no Triton."""
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
    """The name of the GPU, or of the processor and its instruction set; others, and PyTorch in place of the kernels,
    round sums differently."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{processor()} ({best() if not problem() else 'no'} kernels)"


def no_gpu() -> str:
    """Why PyTorch has no GPU, with PyTorch's own message: e.g. the driver is too old."""
    name = f"PyTorch {torch.__version__}"
    if not (torch.version.cuda or torch.version.hip):
        return f"{name} is a build without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{name} sees no GPU{visible()}: {first_line(error).rstrip('.')}"
    return f"{name} sees no GPU{visible()}"


def unused() -> str:
    """Why PyTorch has no GPU on a machine with NVIDIA's driver; empty if there is no driver or the GPUs were hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not (DRIVER.exists() or shutil.which("nvidia-smi")):
        return ""
    return f"this machine has NVIDIA's driver, and {no_gpu()}"


@functools.cache
def warn(line: str) -> None:
    """Print once per process."""
    print(f"birl: {line}", file=sys.stderr, flush=True)


def use(device: torch.device) -> None:
    """Make it the calling thread's current CUDA device, which Triton, FSDP and NCCL use whatever the device of their
    tensors."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def limits() -> list[str]:
    """Environment variables that limit the GPUs of a process; the first that is set counts. ROCm has two."""
    return [*(["HIP_VISIBLE_DEVICES"] if torch.version.hip else []), "CUDA_VISIBLE_DEVICES"]


def visible() -> str:
    """For error messages: the setting that limits the GPUs of this process."""
    return next((f" ({name}={os.environ[name]})" for name in limits() if name in os.environ), "")


def gpu(device: torch.device) -> str:
    """Unique id of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def exact() -> None:
    """On CUDA, disable TF32 for float32, and reduced-precision sums of bfloat16 products: the engine's few rows and the
    learner's many are split differently, and partial sums in bfloat16 would differ."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    empty_groups()


@functools.cache
def empty_groups() -> None:
    """On Blackwell (sm_100, sm_103) PyTorch's grouped product may leave an accumulator's old values as the gradient of
    an expert without tokens (pytorch#172439, NVIDIA/cutlass#2674). Sets it to 0, in transformers' calls, too."""
    plain, capability = torch.nn.functional.grouped_mm, lambda device: torch.cuda.get_device_capability(device)[0]

    def grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
        if offs is not None and weights.requires_grad and weights.is_cuda and capability(weights.device) == 10:
            unused = (offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None]
            weights = weights.view_as(weights)
            weights.register_hook(lambda grad: grad.masked_fill_(unused, 0.0))
        return plain(rows, weights, offs=offs, **options)

    torch.nn.functional.grouped_mm = grouped_mm


def device_of(model: nn.Module) -> torch.device:
    """The device that a model computes on, also before its weights are loaded (`slices.py`), or if FSDP keeps its
    shards in CPU memory."""
    if (pending := getattr(model, "pending", None)) is not None:
        return pending.device
    first: Any = next(model.parameters())
    on_card = hasattr(first, "device_mesh") and first.device_mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_card else first.device
