"""Where a model computes, and in which precision there."""

import torch
from torch import nn

from birl.errors import BirlError


def choose(name: str) -> torch.device:
    """auto | cpu | cuda -> a device. Raises `BirlError` where there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            built = "sees no GPU" if torch.version.cuda else "is a build without CUDA"
            raise BirlError(
                f"model.device=cuda: PyTorch {torch.__version__} {built}. Set model.device=cpu or leave it at auto."
            )
        exact()
    return torch.device(name)


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
