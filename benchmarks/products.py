"""The matrix products of one decode step and of one training step, and nothing else: the reference of `ceiling`.

Every layer has separate weights, used in the model's order, so that none is in a cache that it would not be in during
the real step. Three implementations, each at its best:

    birl       the kernel of `birl/kernels/gemm.c`, everything packed beforehand, no Python around the call
    oneDNN     PyTorch's prepacked linear layer, weights (and their substitutes) packed beforehand
    torch.mm   nothing packed; results go to preallocated memory

Packing, transposing and adding up gradients are left out, and all results except those of birl's kernel are rounded to
bfloat16, which is less to write. So the real step cannot reach these times.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

import torch
from torch import Tensor

from birl.kernels import ADD, KEEP, ROUND, Kernels
from birl.kernels.tensors import PackedWeight
from birl.models.decoder import Decoder
from birl.models.matrix import Matrix
from birl.models.shape import CHUNK

SIDES = ("birl", "oneDNN", "torch.mm")
MODES = {"qkv": ROUND, "output": ADD, "gate_up": ROUND, "down": ADD, "head": KEEP}  # forward, see `Kernels.gemm`
BF16, FLOAT = torch.bfloat16, torch.float32
Call = Callable[[], object]
Products = dict[str, list[tuple[str, Call]]]  # of each side, in order: (name of its shape, the product)


def matrices(decoder: Decoder) -> list[tuple[str, Matrix]]:
    """The weight matrices in the order of a forward pass, the head last."""
    found = [(name, getattr(layer, name)) for layer in decoder.layers for name in MODES if name != "head"]
    return [*found, ("head", decoder.head)]


@cache
def room(use: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Memory for activations, shared by all layers for one shape and use, about as in the real step."""
    return torch.randn(rows, columns).to(dtype)


def ours(k: Kernels, x: Tensor, weight: PackedWeight, y: Tensor, mode: int) -> Call:
    """y = x W' by `Kernels.gemm`, without its checks."""
    gemm, alive = k.lib.gemm, (x, weight, y)
    words = (x, x.stride(0), weight.data, None, y, y.stride(0))
    sizes = (len(y), weight.rows, x.shape[1], mode)

    def product() -> object:
        gemm(*words, *sizes)
        return alive

    return product


def onednn(x: Tensor, weight: Tensor) -> Call:
    """x W', with W [N, K] packed once before."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), len(x))
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda: linear(x, packed, None, "none", [], "")


def plain(x: Tensor, weight: Tensor, y: Tensor) -> Call:
    """y = x W, W [K, N]."""
    return lambda: torch.mm(x, weight, out=y)


def of_decoding(decoder: Decoder, rows: int) -> Products:
    """One step of `rows` sequences."""
    found: Products = {side: [] for side in SIDES}
    for name, matrix in matrices(decoder):
        forward(found, decoder.kernels, name, torch.cat(matrix.weights), rows)
    return found


def of_training(decoder: Decoder, tokens: int, trained: int) -> Products:
    """Forward and backward of `tokens` tokens. The head, for the `trained` ones, processes its vocabulary in pieces, as
    the learner does."""
    k = decoder.kernels
    found: Products = {side: [] for side in SIDES}
    *layers, (_, last) = matrices(decoder)
    joined = [(name, torch.cat(matrix.weights)) for name, matrix in layers]
    for name, weight in joined:
        forward(found, k, name, weight, tokens)
    for piece in last.weights[0].split(max(CHUNK // trained // 32 * 32, 32)):
        forward(found, k, "head", piece, trained)
        backward(found, k, "head", piece, trained)
    for name, weight in reversed(joined):
        backward(found, k, name, weight, tokens)
    return found


def forward(found: Products, k: Kernels, name: str, weight: Tensor, rows: int) -> None:
    """y = x W'."""
    (n, inner), mode = weight.shape, MODES[name]
    x, rounded = room("x", rows, inner, BF16), room("y", rows, n, BF16)
    y = rounded if mode == ROUND else room("y", rows, n, FLOAT)
    found["birl"].append((name, ours(k, x, k.pack([weight]), y, mode)))
    found["oneDNN"].append((name, onednn(x, weight)))
    found["torch.mm"].append((name, plain(x, weight.T, rounded)))


def backward(found: Products, k: Kernels, name: str, weight: Tensor, rows: int) -> None:
    """From y's gradient g: that of x, g W, and that of W, g' x, which is stored separately for each weight."""
    n, inner = weight.shape
    g, rounded = room("g", rows, n, BF16), room("by x", rows, inner, BF16)
    by_x, mode = (room("by x", rows, inner, FLOAT), ADD) if name == "head" else (rounded, ROUND)
    name_x, name_w = f"{name} by input", f"{name} by weight"
    found["birl"].append((name_x, ours(k, g, k.pack([weight], transposed=True), by_x, mode)))
    found["oneDNN"].append((name_x, onednn(g, weight.T)))
    found["torch.mm"].append((name_x, plain(g, weight, rounded)))

    x = room("x", rows, inner, BF16)
    packed, by_w = by_weight_ours(k, rows, inner), torch.zeros(n, inner)
    found["birl"].append((name_w, lambda: k.outer(g, packed, by_w, add=False)))
    found["oneDNN"].append((name_w, by_weight_onednn(rows, n, inner)))
    found["torch.mm"].append((name_w, plain(g.T, x, torch.zeros(n, inner, dtype=BF16))))


@cache
def by_weight_ours(k: Kernels, rows: int, inner: int) -> PackedWeight:
    return k.pack([room("x", rows, inner, BF16)], transposed=True)


@cache
def by_weight_onednn(rows: int, n: int, inner: int) -> Call:
    return onednn(room("g", rows, n, BF16).T.contiguous(), room("x", rows, inner, BF16).T)


@torch.no_grad()
def seconds(products: Sequence[tuple[str, Call]], repeats: int) -> dict[str, float]:
    """Seconds of each shape in one pass over all products: medians of `repeats` passes, after one that is not timed."""
    passes: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        spent = dict.fromkeys((name for name, _ in products), 0.0)
        for name, product in products:
            start = time.perf_counter()
            product()
            spent[name] += time.perf_counter() - start
        passes.append(spent)
    return {name: median(spent[name] for spent in passes[1:]) for name in passes[0]}


def flops(decoder: Decoder, tokens: int, trained: int) -> float:
    """FLOPs of `of_training`."""
    sizes = [(name, sum(w.numel() for w in m.weights)) for name, m in matrices(decoder)]
    return 6.0 * sum(size * (trained if name == "head" else tokens) for name, size in sizes)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes that one decode step must read."""
    return sum(w.numel() * w.element_size() for _, m in matrices(decoder) for w in m.weights)


@torch.no_grad()
def bandwidth(k: Kernels, size: int) -> dict[str, float]:
    """Bytes per second of reading `size` bytes: by PyTorch's sum of float32 numbers, and by birl's product with 16
    rows, which is bound by reading the weight. The memory is written first: all pages of a fresh `torch.zeros` are one
    page of physical memory."""
    numbers = torch.ones(size // 4)
    inner = 4096
    weight = PackedWeight(numbers.view(BF16), size // 2 // inner, inner)
    product = ours(k, room("x", 16, inner, BF16), weight, room("y", 16, weight.rows, BF16), ROUND)
    runs: dict[str, Call] = {"torch.sum": numbers.sum, "gemm": product}
    return {name: size / seconds([(name, run)], 3)[name] for name, run in runs.items()}
