"""Linear layers whose weights are laid out for oneDNN, or dequantised (`quantized.py`), once instead of at every call.

On CPU a matrix product with few rows spends most of its time reordering the weight into the blocked layout that AVX-512
and AMX need. Weights do not change during generation, so the engine reorders them once for each version; the copies
live until the generation ends. The module itself is not changed: outside of `active()` it is the one that is trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birl.models.quantized import LINEAR, QuantizedLinear, matrix_of

ROWS = 32  # the number of rows that the layout is chosen for


class PackedLinears:
    """Blocked copies of all linear layers of a module, made on first use; without oneDNN, plain copies of the quantised
    ones. The bfloat16 LM head has none: logits are float32 (`forward.logits`)."""

    def __init__(self, model: nn.Module) -> None:
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m) in LINEAR]
        linears = [m for m in linears if 0 not in m.weight.shape]  # a shared expert of no features: oneDNN refuses it
        self.blocked = usable(model)
        self.linears = linears if self.blocked else [m for m in linears if isinstance(m, QuantizedLinear)]
        self.head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        self.layers: list[nn.Linear] = []
        self.copies: list[Tensor] = []
        self.version: int | None = None

    @contextmanager
    def active(self, version: int) -> Iterator[None]:
        """Context in which the layers compute with copies of the weights of this version. Not differentiable."""
        if self.version != version:
            self.release()
            self.layers = [m for m in self.linears if m is not self.head or m.weight.dtype == torch.float32]
            self.copies = [self.copy(m) for m in self.layers]
            self.version = version
        for layer, copy in zip(self.layers, self.copies, strict=True):
            product = partial(_linear if self.blocked else F.linear, weight=copy, bias=layer.bias)
            layer.forward = product  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def copy(self, layer: nn.Linear) -> Tensor:
        weight = matrix_of(layer)
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.blocked else weight

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the plain copies."""
        return () if self.blocked else tuple(t.data_ptr() for t in self.copies)

    def release(self) -> None:
        """Free the copies."""
        self.layers, self.copies, self.version = [], [], None


def usable(model: nn.Module) -> bool:
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())  # needs AVX-512
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "").view(*x.shape[:-1], -1)
