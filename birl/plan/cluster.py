"""Hardware of a cluster: FLOP/s, memory and HBM bandwidth of a GPU, and bandwidths between GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from birl.errors import BirlError, did_you_mean

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
