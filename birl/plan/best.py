"""All layouts of a model on a cluster, what each needs and how long it takes; those that fit, fastest first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from birl.errors import BirlError
from birl.models.shape import Shape
from birl.plan.cluster import Cluster
from birl.plan.layout import Layout, Workload, check, layouts
from birl.plan.rank_memory import RESERVED, USABLE, memory
from birl.plan.step import StepTime, step

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout with the micro-batch and the checkpointing that make it fastest; `memory` is bytes by purpose."""

    layout: Layout
    work: Workload
    memory: dict[str, float]
    step: StepTime

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


def best(
    shape: Shape, cluster: Cluster, work: Workload, wanted: dict[str, int], keep: str = "", microbatch: int = 0
) -> list[Plan]:
    """One plan for each layout that fits, fastest first. `wanted`: axes that are given, by name; `keep`, `microbatch`:
    chosen where they are not given. Raises `BirlError` where nothing divides or fits, with what comes nearest."""
    possible = [one for one in layouts(shape, cluster) if all(getattr(one, a) == n for a, n in wanted.items())]
    if not possible:
        _refuse(shape, cluster, wanted)
    result = [list(_plans(shape, cluster, layout, work, keep, microbatch)) for layout in possible]
    if not any(result):
        raise BirlError(
            f"batch={work.batch} is less than one sequence of {work.sequence} tokens for every share of the samples; "
            f"set batch={work.sequence * min(one.shares for one in possible)} or more, or fewer gpus."
        )
    room = USABLE * cluster.memory
    fitting = [min(fits, key=lambda p: p.step.seconds) for one in result if (fits := _within(one, room))]
    if not fitting:
        least = min((plan for one in result for plan in one), key=lambda plan: plan.bytes)
        raise BirlError(
            f"Nothing fits: {least.layout} needs least, {least.bytes / GIB:.1f} GiB a GPU with micro-batches of "
            f"{least.work.microbatch} tokens, and {room / GIB:.1f} GiB are usable. Set gpus higher, sequence lower, or "
            "leave the axes free."
        )
    return sorted(fitting, key=lambda plan: (plan.step.seconds, plan.bytes))


def _within(plans: Iterable[Plan], room: float) -> list[Plan]:
    return [plan for plan in plans if plan.bytes <= room]


def _plans(
    shape: Shape, cluster: Cluster, layout: Layout, work: Workload, keep: str, microbatch: int
) -> Iterator[Plan]:
    """Micro-batches of 1, 2, 4 ... sequences, as far as the batch goes."""
    most = work.batch // layout.shares
    sizes = [work.sequence * 2**n for n in range(max(most // work.sequence, 0).bit_length())]
    for size in [microbatch] if microbatch else sizes:
        if size > most:
            continue
        for kept in [keep] if keep else ("all", "inputs"):
            own = replace(work, microbatch=size, keep=kept)
            yield Plan(
                layout=layout,
                work=own,
                memory=memory(shape, layout, own),
                step=step(shape, cluster, layout, own),
            )


def _refuse(shape: Shape, cluster: Cluster, wanted: dict[str, int]) -> None:
    """Say why no layout has these axes."""
    layout = Layout(**wanted)
    rest = cluster.gpus // layout.size
    if "fsdp" not in wanted and rest and layout.size * rest == cluster.gpus:
        layout = replace(layout, fsdp=rest)
    check(layout, shape, cluster.gpus)
    raise BirlError(f"{layout}: tp={layout.tp} does not fit into a machine of {cluster.node} GPUs.")


def limits(cluster: Cluster) -> str:
    """How much of a GPU's memory a plan may fill."""
    return f"{USABLE * cluster.memory / GIB:.1f} GiB usable, {RESERVED / GIB:.1f} of them reserved"
