"""Layouts (sizes of the parallel axes) of a training step on a cluster, and the step's workload."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from birl.errors import BirlError
from birl.models.shape import Shape
from birl.plan.cluster import Cluster

AXES = ("ddp", "fsdp", "cp", "tp", "ep", "pp")


KEEPS = ("all", "half", "inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`batch` tokens go through the model in micro-batches of `microbatch` tokens a share, packed from sequences of
    `sequence` tokens.

    keep: activations of a layer that are kept for its backward pass. all; half: outputs of attention and of every
    second matrix product, the rest is recomputed (torchtitan's selective checkpointing); inputs: the layer's input only
    (learner.gradient_checkpointing).
    logits: tokens whose logits are in memory at once; 0: the learner's chunks.
    optimizer: optimizer.kind.
    once: a token is sent to a machine once for all its experts there (DeepEP), not once for each expert.
    """

    batch: int
    microbatch: int
    sequence: int
    keep: str = "inputs"
    logits: int = 0
    optimizer: str = "adamw"
    once: bool = False

    def __post_init__(self) -> None:
        """Raises `BirlError` naming the key."""
        if self.keep not in KEEPS:
            raise BirlError(f"keep={self.keep}: {', '.join(KEEPS)}.")
        for name in ("batch", "microbatch", "sequence"):
            if getattr(self, name) < 1:
                raise BirlError(f"{name}={getattr(self, name)}: a number of tokens, at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the axes; neighbouring ranks differ in tp first, then cp, fsdp, ddp and pp. Experts are split over `ep`
    of the fsdp x cp ranks. birl's learner has no pipeline: `pp`, in `virtual` pieces a rank, is for comparing with
    systems that have one."""

    ddp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    virtual: int = 1

    @property
    def size(self) -> int:
        return self.ddp * self.fsdp * self.cp * self.tp * self.pp

    @property
    def splits(self) -> int:
        """Number of ranks over which weights are split, without pp."""
        return self.fsdp * self.cp * self.tp

    @property
    def shares(self) -> int:
        """Number of data-parallel ranks, which have different samples."""
        return self.ddp * self.fsdp

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis in AXES if (size := getattr(self, axis)) > 1) or "one process"


def check(layout: Layout, shape: Shape, gpus: int) -> None:
    """Raises `BirlError` with the numbers of what does not divide."""
    if layout.size != gpus:
        raise BirlError(f"{layout} makes {layout.size} ranks, and there are {gpus} GPUs.")
    kv_heads = shape.heads if shape.latent else shape.kv_heads
    if shape.heads % layout.tp or kv_heads % layout.tp:
        raise BirlError(f"tp={layout.tp} does not divide {shape.heads} query and {kv_heads} key heads.")
    if layout.ep > 1 and (not shape.experts or shape.experts % layout.ep):
        raise BirlError(f"ep={layout.ep} does not divide {shape.experts} experts.")
    if layout.fsdp * layout.cp % layout.ep:
        raise BirlError(f"ep={layout.ep} does not divide fsdp x cp = {layout.fsdp * layout.cp}.")
    if shape.layers < layout.pp:
        raise BirlError(f"pp={layout.pp} is more than {shape.layers} layers.")
    if layout.tp > 1 and shape.experts:
        raise BirlError(f"tp={layout.tp}: birl does not split experts over tensor-parallel ranks. Take tp=1, and ep.")


def layouts(shape: Shape, cluster: Cluster) -> Iterator[Layout]:
    """All layouts that divide. Tensor parallelism stays within a machine."""
    for tp in divisors(math.gcd(cluster.gpus, cluster.node)):
        for cp in divisors(cluster.gpus // tp):
            for fsdp in divisors(cluster.gpus // (tp * cp)):
                ddp = cluster.gpus // (tp * cp * fsdp)
                for ep in divisors(math.gcd(shape.experts, fsdp * cp)) if shape.experts else (1,):
                    layout = Layout(ddp=ddp, fsdp=fsdp, cp=cp, tp=tp, ep=ep)
                    try:
                        check(layout, shape, cluster.gpus)
                    except BirlError:
                        continue
                    yield layout


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
