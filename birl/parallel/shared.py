"""Scatter of lists from rank 0: each rank is sent only its own items of a list.

    rank 0          batches = Shared(pack(...)); crew.call(worker, Worker.gradients, batches)
    the others      are called with a list of the same length, of which their share (`Ranks.mine`) is valid

The ranks of a share (context and tensor parallelism) are sent the same items. They keep them as long as rank 0 keeps
the list, so that a list that several verbs are called with is sent once.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from birl.parallel.ranks import Ranks, Shared

FEW = 4  # a column is sent as runs if there are fewer than 1 / FEW of its numbers


@dataclass(frozen=True, slots=True)
class Number:
    """Placeholder of a `Shared` in the message of a call."""

    value: int


def hand_out(work: Shared[Any], ranks: Ranks, group: Any) -> None:
    """(rank 0) Send every other share its items, one share after another; `group`: of all ranks, over Gloo."""
    ranks.mine(work)  # raises if the shares are not equal
    peers = ranks.grid.cp * ranks.grid.tp
    for share in range(ranks.shares):
        data = None
        for rank in range(share * peers, (share + 1) * peers):
            if rank > 0:
                data = written(work[share :: ranks.shares]) if data is None else data
                dist.send(torch.tensor([len(data)], dtype=torch.int64), rank, group)
                dist.send(data, rank, group)


def handed(count: int, ranks: Ranks, group: Any) -> list[Any]:
    """(other ranks) Receive the own items; in the list of `count` they also fill the places of other shares' items."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, 0, group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, 0, group)
    own = pickle.loads(data.numpy().data)
    return [own[place // ranks.shares] for place in range(count)]


def written(items: list[Any]) -> Tensor:
    """Pickle items, with tensors as compressed numpy arrays, [bytes] uint8."""
    stream = io.BytesIO()
    _Writer(stream, pickle.HIGHEST_PROTOCOL).dump(items)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


class _Writer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (restored, tuple(columns(obj.cpu().numpy()))) if isinstance(obj, Tensor) else NotImplemented


def columns(x: NDArray[Any]) -> Iterator[Any]:
    """Yield type and shape of an array, its compression, and the compressed arrays."""
    yield from (x.dtype.str, x.shape)
    flat = x.reshape(-1)
    if x.dtype.kind == "i" and len(flat):
        steps = np.diff(flat, prepend=flat.dtype.type(0))
        for way, numbers in (("runs", flat), ("rising runs", steps)):
            if (runs := runs_of(numbers)) is not None:
                yield way
                yield from map(narrow, runs)
                return
        yield "narrow"
        yield narrow(flat)
    elif x.dtype == np.float32 and (runs := runs_of(flat.view(np.int32))) is not None:
        yield "runs of bits"
        yield from (runs[0], narrow(runs[1]))
    else:
        yield "as it is"
        yield flat


def runs_of(flat: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Run-length encoding: values and lengths of runs; None if there are too many runs."""
    changes = flat[1:] != flat[:-1]
    if (np.count_nonzero(changes) + 1) * FEW > len(flat):
        return None
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(changes) + 1])
    return flat[starts], np.diff(starts, append=len(flat))


def narrow(x: NDArray[Any]) -> NDArray[Any]:
    """Convert integers to the smallest type that holds them all."""
    low, high = int(x.min()), int(x.max())
    types = (np.int8, np.int16, np.int32, np.int64)
    return x.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))


WAYS: dict[str, Callable[..., NDArray[Any]]] = {
    "runs": np.repeat,
    "rising runs": lambda values, counts: np.repeat(values.astype(np.int64), counts).cumsum(),
    "runs of bits": lambda values, counts: np.repeat(values, counts).view(np.float32),
    "narrow": lambda values: values,
    "as it is": lambda values: values,
}


def restored(kind: str, shape: tuple[int, ...], way: str, *parts: NDArray[Any]) -> Tensor:
    """Restore the tensor from `columns`, bit for bit, on the CPU."""
    return torch.from_numpy(WAYS[way](*parts).astype(kind, copy=False).reshape(shape))
