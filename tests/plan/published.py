"""What others have published, and what the planner says of the same runs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from birl.models.shape import KNOWN, Shape
from birl.plan.cluster import Cluster, Layout, Workload, check, cluster_of
from birl.plan.rank_memory import memory
from birl.plan.step import step

FILE = Path(__file__).with_name("published.json")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run. `theirs`: tokens a second and GPU; `memory`: GiB, 0 where they do not say."""

    name: str
    source: str
    gpu: str
    shape: Shape
    cluster: Cluster
    layout: Layout
    work: Workload
    theirs: float
    memory: float

    @property
    def ours(self) -> float:
        return step(self.shape, self.cluster, self.layout, self.work).tokens

    @property
    def off(self) -> float:
        return self.ours / self.theirs - 1

    @property
    def our_memory(self) -> float:
        return sum(memory(self.shape, self.layout, self.work).values()) / GIB

    def efficiency(self) -> float:
        """With which ours is theirs, by bisection."""
        low, high = 0.01, 2.0
        for _ in range(40):
            middle = (low + high) / 2
            faster = replace(self, cluster=replace(self.cluster, efficiency=middle)).ours > self.theirs
            low, high = (low, middle) if faster else (middle, high)
        return low


def rows() -> list[Row]:
    return [_row(values) for values in json.loads(FILE.read_text())["rows"]]


def _row(values: dict[str, Any]) -> Row:
    given = values["shape"]
    shape = KNOWN[given] if isinstance(given, str) else Shape(**given)
    cluster = cluster_of(values["gpu"], values["gpus"], values.get("changes"))
    layout, work = Layout(**values["layout"]), Workload(**values["work"])
    check(layout, shape, values["gpus"])
    return Row(
        name=values["name"],
        source=values["source"],
        gpu=values["gpu"],
        shape=shape,
        cluster=cluster,
        layout=layout,
        work=work,
        theirs=values.get("tokens") or values["tflops"] * 1e12 / shape.flops(work.sequence),
        memory=values.get("memory", 0.0),
    )


def efficiency(gpu: str) -> float:
    """The median over all dense models that this kind of GPU trained."""
    return median(row.efficiency() for row in rows() if row.gpu == gpu and not row.shape.experts)


def table() -> list[str]:
    """The rows of docs/planning.md."""
    return ["| " + " | ".join(map(str, _cells(row))) + " |" for row in rows()]


def _cells(row: Row) -> list[object]:
    run = [row.name, row.source, f"{row.cluster.gpus:,} x {row.gpu}", row.layout]
    work = [f"{row.work.sequence:,}", f"{row.work.microbatch:,}", row.work.keep]
    return [*run, *work, f"{row.theirs:,.0f}", f"{row.ours:,.0f}", f"{row.off:+.0%}"]


if __name__ == "__main__":
    print("\n".join(table()))
    print({gpu: efficiency(gpu) for gpu in ("a100-80", "h100")})
    print([f"{row.memory} {row.our_memory:.1f}" for row in rows() if row.memory])
