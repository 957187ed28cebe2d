"""What weights are: a digest of 32 letters, which the same bytes give on every machine; and whether they are finite."""

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """xxh3-128 of type, shape and bytes. It finds damage and mix-ups, not malice."""
    result = xxhash.xxh3_128(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    result.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold NaN or infinity. The extremes tell, and need no memory of the tensor's size."""
    extremes = {
        name: tensor.detach().aminmax()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel()
    }
    return [name for name, (low, high) in extremes.items() if not (low.isfinite() and high.isfinite())]


def whole(digests: Mapping[str, str]) -> str:
    """One digest of all: independent of their order."""
    return xxhash.xxh3_128("\n".join(f"{n} {d}" for n, d in sorted(digests.items())).encode()).hexdigest()


def words(vocabulary: Mapping[str, int], end_ids: Iterable[int]) -> str:
    """What the token ids mean, and which of them end an answer."""
    return xxhash.xxh3_128(repr((sorted(vocabulary.items()), sorted(end_ids))).encode()).hexdigest()
