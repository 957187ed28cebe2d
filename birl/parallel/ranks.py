"""The ranks as a grid ddp x fsdp x cp x tp, and the distribution of a step's work over it.

    ddp    replicas of the model, whose gradients are summed
    fsdp   ranks that the weights, gradients and optimizer state of a replica are split over (FSDP2)
    cp     ranks that every packed row is split over (context parallelism)
    tp     ranks that every layer is split over (tensor parallelism)

Groups of `ep` adjacent ranks of fsdp x cp share the experts of a mixture-of-experts model (`experts.py`). Ranks with
the same place in ddp and fsdp have the same samples: there are ddp x fsdp shares of a step's micro-batches. A
micro-batch's weights include the step's denominator, so that gradients and figures are summed over the shares, never
averaged.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from birl.data.balance import imbalance
from birl.data.pack import NOTHING, Batch, pack
from birl.errors import BirlError
from birl.models.device import gpu, use
from birl.types import Sample

T = TypeVar("T")
STORE = "BIRL_STORE"  # environment variable: file for the rendezvous of ranks on one machine
AXES = ("ddp", "fsdp", "cp", "tp")
BUCKET = 2**24  # numbers of one all-reduce: 64 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Number of ranks on each axis. Example: Grid(fsdp=4, tp=2) has 8 ranks and 4 shares of the samples.

    sequence: sequence parallelism over the ranks of tp, between split blocks.
    context: attention over the tokens of other ranks, "gather" or "ulysses" (`context.py`)."""

    ddp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    sequence: bool = True
    context: str = "gather"
    ep: int = 1  # divides fsdp x cp, and adds no ranks

    @property
    def size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={n}" for axis in (*AXES, "ep") if (n := getattr(self, axis)) > 1) or "one rank"


class Shared(list[T]):
    """A list with equally many items for each share of the ranks: item i is sent only to share i % shares
    (`shared.py`). It must not change after it was sent. `number`: its id on the ranks; 0 before it is sent."""

    number = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """`pack` for the shares of a run's ranks. `capacity`: tokens of a micro-batch; `pair_cost`: of `pack`."""

    capacity: int
    shares: int = 1
    pair_cost: float = 0.0

    def __call__(
        self, samples: Sequence[Sample], weights: Sequence[float], observed: Sequence[float] = ()
    ) -> Shared[Batch]:
        return Shared(pack(samples, weights, self.capacity, self.shares, self.pair_cost, observed))

    def figures(self, batches: Sequence[Batch]) -> dict[str, float]:
        """imbalance: time that shares wait for one another, relative to their work; padding: share of the computed
        tokens without a sample; filled: used share of the capacity in tokens."""
        costs = [sum(len(tree) + self.pair_cost * tree.pairs() for tree in b.trees) for b in batches]
        tokens, empty = sum(len(b.tokens) for b in batches), sum(b.trees == NOTHING for b in batches)
        return {
            "packing/imbalance": imbalance(costs, self.shares),
            "packing/padding": empty / tokens,
            "packing/filled": (tokens - empty) / (len(batches) * self.capacity),
        }


class Ranks:
    """This process's rank and process groups. `Ranks()` is a single process."""

    def __init__(
        self, grid: Grid | None = None, mesh: DeviceMesh | None = None, experts: DeviceMesh | None = None
    ) -> None:
        """`mesh` [ddp, fsdp x cp, tp]: ranks of one row share weights; those of other rows have copies of them, whose
        gradients are summed. `experts` [ddp, fsdp x cp / ep, ep]: the same ranks, if experts are spread over some."""
        self.grid = grid = grid or Grid()
        self.mesh, self.experts = mesh, experts
        self.rank = rank = 0 if mesh is None else dist.get_rank()
        self.shares, self.share = grid.ddp * grid.fsdp, rank // (grid.cp * grid.tp)
        self.groups: dict[str, dist.ProcessGroup] = {}
        if mesh is not None:
            self.groups |= {axis: mesh.get_group(axis) for axis in ("ddp", "tp")}
            whole = torch.arange(grid.size, dtype=torch.int64).view(self.shares, grid.cp, grid.tp)
            for name, groups in (("cp", whole.mT.flatten(0, 1)), ("share", whole.flatten(1).T)):
                self.groups[name] = dist.new_subgroups_by_enumeration(groups.tolist())[0]  # pyright: ignore

    @property
    def alone(self) -> bool:
        return self.grid.size == 1

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded: no rank has all of them as ordinary tensors."""
        return self.grid.fsdp * self.grid.cp * self.grid.tp > 1

    @property
    def first(self) -> bool:
        """Whether this is the first rank of its share of the samples."""
        return self.rank % (self.grid.cp * self.grid.tp) == 0

    def mine(self, work: Sequence[T]) -> Sequence[T]:
        """This rank's share. All ranks must have equally many: a collective waits for all ranks (`pack`'s `parts`)."""
        if len(work) % self.shares:
            raise ValueError(f"{len(work)} micro-batches cannot be shared out evenly among {self.shares} ranks")
        return work[self.share :: self.shares]

    def each(self, work: Sequence[T], compute: Callable[[T], Tensor]) -> list[Tensor]:
        """Results of `compute` for each micro-batch, tensors of any shape, divided among the shares and gathered on all
        ranks; on the CPU if there are several."""
        own = [compute(w) for w in self.mine(work)]
        if self.shares == 1:
            return own
        result: list[Any] = [None] * self.shares
        dist.all_gather_object(result, [t.cpu() for t in own], group=self.groups["share"])
        return [result[n % self.shares][n // self.shares] for n in range(len(work))]

    def collect(self, work: Sequence[T], compute: Callable[[T], Tensor]) -> list[Tensor]:
        """As `each`, but only the first share gets the results; the others get an empty list."""
        own = [compute(w) for w in self.mine(work)]
        if self.shares == 1:
            return own
        result: list[Any] | None = [None] * self.shares if self.share == 0 else None
        dist.gather_object([t.cpu().numpy() for t in own], result, group=self.groups["share"], group_dst=0)
        if result is None:
            return []
        return [torch.from_numpy(result[n % self.shares][n // self.shares]) for n in range(len(work))]

    def told(self, value: T) -> T:
        """Broadcast rank 0's value; those of others are ignored."""
        if self.alone:
            return value
        words: list[Any] = [value]
        dist.broadcast_object_list(words, src=0)
        return words[0]

    def total(self, values: dict[str, float], largest: bool = False) -> dict[str, float]:
        """Sum (or maximum) of each figure over the shares that have it."""
        if self.shares == 1:
            return values
        result: list[Any] = [None] * self.shares
        dist.all_gather_object(result, values, group=self.groups["share"])
        names = list(dict.fromkeys(n for one in result for n in one))
        reduce = max if largest else sum
        return {n: reduce(one[n] for one in result if n in one) for n in names}


def join(grid: Grid, device: torch.device, timeout: float) -> Ranks:
    """Join the process group, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or BIRL_STORE. Raises
    `BirlError`."""
    if grid.size == 1:
        return Ranks()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if grid.size != world:
        raise BirlError(
            f"parallel: {grid} makes {grid.size} ranks, but {world} were started. Let the launcher start {grid.size}, "
            "or none (without WORLD_SIZE birl starts them on this machine)."
        )
    from birl.hosts import interface  # not needed by a single rank

    use(device)  # or DeviceMesh takes LOCAL_RANK as the index, which is wrong if a rank sees only one GPU
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        file = os.environ.get(STORE)
        where = f"file://{file}" if file else "env://"
        if not file and (own := interface(os.environ.get("MASTER_ADDR", ""))):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", own)  # else where the host's name leads: often to the loopback
        rank = int(os.environ.get("RANK", "0"))
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # collectives that a rank records, some µs each
        dist.init_process_group(backend, where, timedelta(seconds=timeout), world_size=world, rank=rank)
        check_apart(gpu(device))
    shard = grid.fsdp * grid.cp
    mesh = init_device_mesh(device.type, (grid.ddp, shard, grid.tp), mesh_dim_names=("ddp", "shard", "tp"))
    if shard % grid.ep or grid.ep > 1 < grid.tp:
        raise BirlError(f"parallel: {grid}: ep must divide fsdp x cp = {shard}, and tp must be 1.")
    rest, names = (grid.ddp, shard // grid.ep, grid.ep), ("ddp", "rest", "ep")
    experts = init_device_mesh(device.type, rest, mesh_dim_names=names) if grid.ep > 1 else None
    result = Ranks(grid, mesh, experts)
    for group in list(dist.distributed_c10d._world.pg_map):  # new groups have PyTorch's 30 minutes
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
    return result


def check_apart(own: str) -> None:
    """`own`: this rank's GPU, empty if it has none. Raises `BirlError` if two ranks have the same one: NCCL would
    refuse that only after the model is loaded."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    same = [str(rank) for rank, gpu in enumerate(every) if gpu == own]
    if own and len(same) > 1:
        raise BirlError(
            f"parallel: ranks {' and '.join(same)} have one GPU, {own}. Start no more ranks on a machine than it has "
            "GPUs, and show each rank all of them or one of its own (srun --gpus-per-task=1, Ray: launch.gpus=1)."
        )


def global_norm(masters: Any, ranks: Ranks) -> Tensor:
    """Norm of the whole gradient of `Masters`, sqrt(sum of squares); each element counts once, however many ranks hold
    it."""
    if not ranks.sharded:
        return torch.nn.utils.get_total_norm([t.grad for t in masters.tensors.values() if t.grad is not None])
    squares = [
        torch.linalg.vector_norm(tensor.grad, dtype=torch.float64).square() / (masters.copies(name) or ranks.grid.size)
        for name, tensor in masters.tensors.items()
        if tensor.grad is not None
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt().float()


def sum_gradients(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device | None = None) -> None:
    """All-reduce gradients (sum) over the group, in place, in buckets; on `device` if they are in CPU memory."""
    grads = [t.grad for t in tensors if t.grad is not None]
    while grads:
        bucket, size = [], 0
        while grads and (not bucket or size + grads[-1].numel() <= BUCKET):
            bucket.append(grads.pop())
            size += bucket[-1].numel()
        flat = torch.cat([g.reshape(-1) for g in bucket]).to(device)
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
