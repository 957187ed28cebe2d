"""Digests of weights: 32 hex digits that are equal on every machine for the same bytes; checks for NaN and infinity.

A digest hashes type and shape, a 64-bit number for every whole piece of the tensor, and the remaining bytes. On a GPU
the pieces are hashed there (`digest_kernels.py`), and only the numbers are copied to the host.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from birl.models.fused import on_gpu, triton_kernels

PIECE = 2**16  # bytes
# secret of XXH3, and initial values of its sums
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIMES_64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
START = (PRIMES_32[2], *PRIMES_64[:4], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0])


def digest(tensor: Tensor) -> str:
    """Digest of type, shape and bytes. It detects damage and mix-ups, not manipulation."""
    return digests({"": tensor})[""]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest of each tensor, by name."""
    with torch.no_grad():
        there = {name: _numbered(t.detach()) for name, t in tensors.items() if on_gpu(t)}
    lists = _brought([part for parts in there.values() for part in parts])
    by_name = {name: (lists[2 * i], lists[2 * i + 1]) for i, name in enumerate(there)}
    return {name: _digest(t, *(by_name.get(name) or _pieces(t))) for name, t in tensors.items()}


def _digest(tensor: Tensor, pieces: Any, rest: Any) -> str:
    result = xxhash.xxh3_128(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    result.update(pieces)
    result.update(rest)
    return result.hexdigest()


def _pieces(tensor: Tensor) -> tuple[Any, Any]:
    """Digests of a tensor's whole pieces, and the remaining bytes."""
    data = _bytes(tensor.detach().cpu()).numpy().data
    end = len(data) // PIECE * PIECE
    numbers = [xxhash.xxh3_64_intdigest(data[i : i + PIECE]) for i in range(0, end, PIECE)]
    return np.array(numbers, "<u8").data, data[end:]


def _numbered(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`_pieces` as bytes on the GPU."""
    data = _bytes(tensor)
    end = len(data) // PIECE * PIECE
    whole = data[:end].clone() if data.storage_offset() % 8 else data[:end]
    return launched(whole, keys(data.device)).view(torch.uint8), data[end:]


def launched(whole: Tensor, keys: Tensor) -> Tensor:
    """Bytes of n pieces -> [n] int64."""
    result = torch.empty(len(whole) // PIECE, dtype=torch.int64, device=whole.device)
    if len(result):
        words, blocks = whole.view(torch.int64), PIECE // 1024
        triton_kernels("digest").digest_kernel[(len(result),)](words, keys, result, BLOCKS=blocks, num_warps=1)
    return result


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _brought(parts: list[Tensor]) -> list[Any]:
    """Copy all parts to the host at once."""
    if not parts:
        return []
    every = torch.cat([part.to(parts[0].device) for part in parts]).cpu().split([len(part) for part in parts])
    return [part.numpy().data for part in every]


@cache
def keys(device: torch.device) -> Tensor:
    """[281] int64: keys of the 16 stripes of 8 words of a block, those of the last block, 8 words each to scramble the
    sums and to merge them, the initial sums, and the initial value of the merged sum."""

    def words(start: int) -> list[int]:
        return np.frombuffer(SECRET, "<u8", 8, start).tolist()

    stripes = [word for stripe in range(16) for word in words(8 * stripe)]
    last = [*stripes[: 15 * 8], *words(len(SECRET) - 64 - 7)]
    every = [*stripes, *last, *words(len(SECRET) - 64), *words(11), *START, PIECE * PRIMES_64[0] % 2**64]
    return torch.from_numpy(np.array(every, np.uint64).view(np.int64)).to(device)


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that hold NaN or infinity. Minimum and maximum show it without a copy of the tensor's size."""
    extremes = {
        name: tensor.detach().aminmax()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel()
    }
    finite = [(low.isfinite() & high.isfinite()).view(1) for low, high in extremes.values()]
    flags = torch.cat([each.to(finite[0].device) for each in finite]).tolist() if finite else []
    return [name for name, each in zip(extremes, flags, strict=True) if not each]


def whole(digests: Mapping[str, str]) -> str:
    """One digest of all, independent of their order."""
    return xxhash.xxh3_128("\n".join(f"{n} {d}" for n, d in sorted(digests.items())).encode()).hexdigest()


def vocabulary_digest(vocabulary: Mapping[str, int], end_ids: Iterable[int]) -> str:
    """Digest of the vocabulary and the end tokens."""
    return xxhash.xxh3_128(repr((sorted(vocabulary.items()), sorted(end_ids))).encode()).hexdigest()
