"""Hardware of a cluster (FLOP/s, memory and HBM bandwidth of a GPU, bandwidths between GPUs), layouts (sizes of the
parallel axes) of a training step on it, and the step's workload."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.models.shape import Shape

LINKS = 0.8  # share of a link's bandwidth that collectives reach; assumed, for all hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`gpus` GPUs, `node` of them in each machine.

    Bandwidths are of one GPU and one direction. `efficiency`: share of the peak FLOP/s that a model's large matrix
    products reach, one figure for each hardware generation (its sources are in `docs/planning.md`).
    """

    gpus: int
    node: int = 8
    flops: float  # dense bfloat16 [1/s]
    memory: float  # [bytes]
    hbm: float  # [bytes/s]
    inside: float  # between GPUs of a machine [bytes/s]
    between: float  # from a GPU to other machines [bytes/s]
    efficiency: float

    def bandwidth(self, ranks: int, stride: int = 1) -> float:
        """Bandwidth of each GPU in a ring over `ranks` GPUs, `stride` apart [bytes/s]. A ring across machines uses the
        network cards of all its members there, as the other GPUs have rings of their own."""
        if ranks * stride <= self.node:
            return LINKS * self.inside
        members = max(self.node // stride, 1)
        return LINKS * min(self.inside, self.between * members)


def _kind(flops: float, gigabytes: float, hbm: float, inside: float, between: float, **more: Any) -> dict[str, Any]:
    return {
        **{"flops": flops * 1e12, "memory": gigabytes * 1e9, "hbm": hbm * 1e12},
        **{"inside": inside * 1e9, "between": between * 1e9, **more},
    }


#: NVIDIA's data sheets: dense bfloat16 TFLOP/s, GB, TB/s, half of NVLink's figure (it counts both directions), and one
#: network card for each GPU, as in DGX machines (200 Gbit/s with A100, 400 Gbit/s since)
KINDS: dict[str, dict[str, Any]] = {
    "a100-40": _kind(312, 40, 1.555, 300, 25, efficiency=0.65),
    "a100-80": _kind(312, 80, 2.039, 300, 25, efficiency=0.65),
    "h100": _kind(989, 80, 3.35, 450, 50, efficiency=0.5),
    "h200": _kind(989, 141, 4.8, 450, 50, efficiency=0.5),
    "b200": _kind(2250, 180, 7.7, 900, 50, efficiency=0.5),
    "gb200": _kind(2500, 186, 8.0, 900, 50, efficiency=0.5, node=72),
    # without NVLink: half of PCIe's; the efficiency is A100's, of which no figure is published here
    "l40s": _kind(362, 48, 0.864, 32, 25, efficiency=0.65),
    "a10g": _kind(70, 24, 0.6, 32, 6, efficiency=0.65, node=4),
    "rtx4090": _kind(165, 24, 1.008, 32, 3, efficiency=0.65),
    "t4": _kind(8.1, 16, 0.32, 16, 3, efficiency=0.65, node=4),  # has no bfloat16: float32's figure
}


def cluster_of(kind: str, gpus: int, changes: dict[str, float] | None = None, key: str = "gpu") -> Cluster:
    """A kind of `KINDS` with some of its figures replaced. Raises `BirlError`, which names the `key`."""
    if kind not in KINDS:
        raise BirlError(f"{key}={kind}: there is no such kind; {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    result = Cluster(gpus=gpus, **KINDS[kind])
    return replace(result, **(changes or {}))


def split_device(words: Sequence[str]) -> tuple[list[str], str]:
    """The words without device=KIND (of `birl plan` and --dry-run; no key of a run), and its kind or ""."""
    kinds = [word.partition("=")[2] for word in words if word.startswith("device=")]
    return [word for word in words if not word.startswith("device=")], (kinds or [""])[-1].lower()


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
