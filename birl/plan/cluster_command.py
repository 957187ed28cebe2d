"""`birl plan --cluster`: which layout of a model on a cluster fits, and which is fastest."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.models.shape import Shape, shape_of
from birl.plan.cluster import KEEPS, Cluster, Layout, Workload, check, cluster_of, layouts
from birl.plan.rank_memory import RESERVED, USABLE, memory
from birl.plan.step import OPTIMIZERS, StepTime, step

SHOWN = 10
CLUSTER = ("node", "flops", "memory", "hbm", "inside", "between", "efficiency")
FIXED = ("ddp", "fsdp", "cp", "tp", "ep")


GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout with its fastest micro-batch size and checkpointing; `memory` is bytes by purpose."""

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
    """One plan for each layout that fits, fastest first. `wanted`: given axes, by name; `keep`, `microbatch`: chosen if
    not given. Raises `BirlError` if nothing divides or fits, with what comes nearest."""
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
    within = [[plan for plan in one if plan.bytes <= room] for one in result]
    fitting = [min(plans, key=lambda p: p.step.seconds) for plans in within if plans]
    if not fitting:
        least = min((plan for one in result for plan in one), key=lambda plan: plan.bytes)
        raise BirlError(
            f"Nothing fits: {least.layout} needs least, {least.bytes / GIB:.1f} GiB a GPU with micro-batches of "
            f"{least.work.microbatch} tokens, and {room / GIB:.1f} GiB are usable. Set gpus higher, sequence lower, or "
            "leave the axes free."
        )
    return sorted(fitting, key=lambda plan: (plan.step.seconds, plan.bytes))


def _plans(
    shape: Shape, cluster: Cluster, layout: Layout, work: Workload, keep: str, microbatch: int
) -> Iterator[Plan]:
    """Plans with micro-batches of 1, 2, 4 ... sequences, up to the whole batch."""
    most = work.batch // layout.shares
    sizes = [work.sequence * 2**n for n in range(max(most // work.sequence, 0).bit_length())]
    for size in [microbatch] if microbatch else sizes:
        if size > most:
            continue
        for kept in [keep] if keep else ("all", "inputs"):
            own = replace(work, microbatch=size, keep=kept)
            yield Plan(
                layout=layout, work=own, memory=memory(shape, layout, own), step=step(shape, cluster, layout, own)
            )


def _refuse(shape: Shape, cluster: Cluster, wanted: dict[str, int]) -> None:
    """Raise `BirlError` with the reason that no layout has these axes."""
    layout = Layout(**wanted)
    rest = cluster.gpus // layout.size
    if "fsdp" not in wanted and rest and layout.size * rest == cluster.gpus:
        layout = replace(layout, fsdp=rest)
    check(layout, shape, cluster.gpus)
    raise BirlError(f"{layout}: tp={layout.tp} does not fit into a machine of {cluster.node} GPUs.")


def limits(cluster: Cluster) -> str:
    """Text: the share of a GPU's memory that a plan may use."""
    return f"{USABLE * cluster.memory / GIB:.1f} GiB usable, {RESERVED / GIB:.1f} of them reserved"


@dataclass(kw_only=True)
class Question:
    """Input of `birl plan --cluster`, each a `key=value`; 0 and empty: chosen, or the kind's figure."""

    model: str = "qwen2.5-7b"
    """A folder with config.json, that file, or a known name."""
    gpu: str = "h100"
    """Kind: a100-80, h100, h200, b200, gb200."""
    gpus: int = 8
    """Number of GPUs."""
    batch: int = 1048576
    """Tokens of a batch (an optimizer step)."""
    sequence: int = 4096
    """Tokens of a sequence."""
    microbatch: int = 0
    """Tokens of a micro-batch: learner.tokens_per_microbatch."""
    keep: str = ""
    """What is kept for the backward pass: all, half or inputs (learner.gradient_checkpointing)."""
    optimizer: str = "adamw"
    """adamw, or adamw8bit with a quarter of its state (optimizer.kind)."""
    ddp: int = 0
    """Sizes of the parallel axes; those that are given are not searched."""
    fsdp: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0
    node: int = 0
    """GPUs of a machine."""
    flops: float = 0.0
    """Dense bfloat16 [1/s]."""
    memory: float = 0.0
    """Memory of a GPU [bytes]."""
    hbm: float = 0.0
    """HBM bandwidth [bytes/s]."""
    inside: float = 0.0
    """Bandwidth between GPUs of a machine, one direction [bytes/s]."""
    between: float = 0.0
    """Bandwidth from a GPU to other machines, one direction [bytes/s]."""
    efficiency: float = 0.0
    """Share of the peak FLOP/s that large products reach."""


def run(words: list[str], *, as_json: bool = False) -> dict[str, Any]:
    """Print the plans that fit, fastest first; returns what `--json` prints. Raises `BirlError`."""
    asked = parse(words)
    shape = shape_of(asked.model)
    changes = {name: value for name in CLUSTER if (value := getattr(asked, name))}
    cluster = cluster_of(asked.gpu, asked.gpus, changes)
    work = Workload(
        batch=asked.batch,
        microbatch=asked.microbatch or asked.sequence,
        sequence=asked.sequence,
        optimizer=asked.optimizer,
    )
    wanted = {axis: size for axis in FIXED if (size := getattr(asked, axis))}
    plans = best(shape, cluster, work, wanted, asked.keep, asked.microbatch)
    result = {
        "model": {"name": asked.model, "parameters": shape.parameters, "shape": asdict(shape)},
        "cluster": asdict(cluster),
        "plans": [asdict(plan) | {"bytes": plan.bytes} for plan in plans],
    }
    print(json.dumps(result, indent=1) if as_json else "\n".join(render(asked, shape, cluster, plans)))
    return result


def parse(words: list[str]) -> Question:
    """Parse `key=value` words; a word without = is the model. Raises `BirlError` naming the key."""
    asked, kinds = Question(), {f.name: f.type for f in fields(Question)}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            key, text = "model", word
        if key not in kinds:
            raise BirlError(f"{key}: there is no such key; {', '.join(kinds)}.{did_you_mean(key, kinds)}")
        setattr(asked, key, text if kinds[key] is str else _number(key, kinds[key], text))
    for name in ("gpus", "batch", "sequence"):
        if getattr(asked, name) < 1:
            raise BirlError(f"{name}=0: at least 1.")
    if asked.keep and asked.keep not in KEEPS:
        raise BirlError(f"keep={asked.keep}: {', '.join(KEEPS)}.{did_you_mean(asked.keep, KEEPS)}")
    if asked.optimizer not in OPTIMIZERS:
        raise BirlError(
            f"optimizer={asked.optimizer}: {', '.join(OPTIMIZERS)}.{did_you_mean(asked.optimizer, OPTIMIZERS)}"
        )
    return asked


def _number(key: str, kind: Any, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BirlError(f"{key}={text}: {key} is a number.") from None
    if not 0 <= value < float("inf") or (kind is int and value % 1):
        raise BirlError(f"{key}={text}: {key} is a {'whole ' * (kind is int)}number, 0 or more.")
    return kind(value)


def render(asked: Question, shape: Shape, cluster: Cluster, plans: list[Plan]) -> list[str]:
    """The lines that are printed: the fastest layouts, then memory and time of the first by part."""
    first = plans[0]
    active = f", {(shape.active + shape.embedding) / 1e9:,.1f} of them for a token" if shape.experts else ""
    lines = [
        f"{asked.model}: {shape.parameters / 1e9:,.1f} billion parameters{active}; {cluster.gpus} x {asked.gpu}, "
        f"{cluster.node} in a machine, {limits(cluster)}",
        f"A step: {asked.batch:,} tokens in sequences of {asked.sequence:,}. {len(plans)} layouts fit.",
        "",
        f"{'layout':<36}{'micro-batch':>12}{'keep':>8}{'GiB':>8}{'s/step':>10}{'tok/s/GPU':>11}{'MFU':>6}{'links':>7}",
    ]
    for plan in plans[:SHOWN]:
        its, links = plan.step, sum(plan.step.exposed.values()) / plan.step.seconds
        lines.append(
            f"{plan.layout!s:<36}{plan.work.microbatch:>12,}{plan.work.keep:>8}{plan.bytes / GIB:>8.1f}"
            f"{its.seconds:>10.3g}{its.tokens:>11,.0f}{its.mfu:>6.0%}{links:>7.0%}"
        )
    lines += ["", f"{first.layout}: GiB of a rank"]
    lines += [f"  {name:<28}{size / GIB:8.2f}" for name, size in first.memory.items() if size]
    lines += [f"  {'together':<28}{first.bytes / GIB:8.2f}", "", f"{first.layout}: seconds of a step"]
    its = first.step
    parts = {"products": its.products, "elementwise (HBM)": its.elementwise, "AdamW (HBM)": its.optimizer}
    parts |= {f"waiting for {axis}": seconds for axis, seconds in its.exposed.items()}
    lines += [f"  {name:<28}{seconds:8.3f}" for name, seconds in parts.items() if seconds]
    return [*lines, f"  {'together':<28}{its.seconds:8.3f}"]
