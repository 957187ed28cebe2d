"""What must hold of a run folder, whatever was done to the processes that wrote it."""

from collections import Counter
from pathlib import Path
from typing import Any

from birl.learner import checkpoint, step_folders
from birl.rollout.ledger import audit
from birl.track.log import read_jsonl

BF16_GAP = 0.0  # nats: with the kernels, engine and learner compute the same bits


def broken(run: Path, bound: int, group_size: int) -> list[str]:
    """In words; empty where everything holds. `bound`: rollout.max_staleness."""
    saved = step_folders.saved(run / "checkpoints")
    if not saved:
        return ["there is no checkpoint"]
    problems = [f"{s.path.name}: {damage}" for s in saved for damage in checkpoint.verify(s.path)]
    problems += [f"ledger: {p}" for p in audit(run).problems]
    state = step_folders.read_state(saved[-1].path)
    metrics, rollouts = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "rollouts.jsonl")
    return (
        problems
        + steps(metrics, rollouts, state)
        + groups(run, rollouts, state, group_size)
        + ages(metrics, rollouts, bound)
    )


def steps(metrics: list[dict[str, Any]], rollouts: list[dict[str, Any]], state: dict[str, Any]) -> list[str]:
    """Every step once, in order, up to the last checkpoint's; in both logs."""
    problems, expected = [], list(range(1, state["step"] + 1))
    if (found := [m["step"] for m in metrics]) != expected:
        problems.append(f"metrics.jsonl has the steps {_short(found)}, and should have 1 to {state['step']}")
    found = [r["step"] for r in rollouts]
    if found != sorted(found) or sorted(set(found)) != expected:
        problems.append(f"rollouts.jsonl has the steps {_short(sorted(set(found)))}, not 1 to {state['step']} in order")
    asked = Counter(found)
    problems += [
        f"step {m['step']}: {asked[m['step']]} episodes are logged, {m['outcome/asked']:g} were asked for"
        for m in metrics
        if asked[m["step"]] != m["outcome/asked"]
    ]
    return problems


def groups(run: Path, rollouts: list[dict[str, Any]], state: dict[str, Any], group_size: int) -> list[str]:
    """All groups up to `position`, and those ahead of it: settled and logged once each, with all their episodes."""
    problems = []
    expected = sorted([*range(state["position"]), *state["ahead"]])
    episodes = Counter((r["group"], r["episode"]) for r in rollouts)
    if twice := [key for key, n in episodes.items() if n > 1]:
        problems.append(f"logged more than once (group, episode): {_short(twice)}")
    if sorted({g for g, _ in episodes}) != expected:
        problems.append(f"groups in rollouts.jsonl: {_short(sorted({g for g, _ in episodes} ^ {*expected}))} differ")
    sizes = Counter(g for g, _ in episodes)
    problems += [f"group {g} has {n} of {group_size} episodes" for g, n in sizes.items() if n != group_size]
    if (settled := kept(run)) != expected:
        problems.append(f"groups settled in the ledger: {_short(sorted({*settled} ^ {*expected}))} differ")
    return problems


def kept(run: Path) -> list[int]:
    """Groups that were settled in a step that no later life has done again, in order, with repetitions."""
    rows = read_jsonl(run / "ledger.jsonl")
    began = {row["life"]: row["step"] for row in rows if row["event"] == "began"}
    return sorted(
        row["group"]
        for row in rows
        if row["event"] == "settled"
        and row["step"] <= min((at for life, at in began.items() if life > row["life"]), default=row["step"])
    )


def ages(metrics: list[dict[str, Any]], rollouts: list[dict[str, Any]], bound: int) -> list[str]:
    """No token is older than the bound, none from the future, and none from other weights than it says."""
    problems = [
        f"step {m['step']}: staleness/max is {m['staleness/max']}, the bound {bound}"
        for m in metrics
        if m["staleness/max"] is not None and m["staleness/max"] > bound
    ]
    problems += [
        f"step {m['step']}: mismatch/mean is {m['mismatch/mean']}: the engine had other weights"
        for m in metrics
        if m.get("mismatch/mean") is not None and m["mismatch/mean"] > BF16_GAP
    ]
    versions, version = {}, 0  # a step without a gradient is no new version
    for m in metrics:
        versions[m["step"]], version = version, version + int(m["updates/done"])
    for row in rollouts:
        found = {versions.get(row["step"], 0) - v for s in row["samples"] for v in s["versions"] if v >= 0}
        if row["advantage"] is not None and found and not (min(found) >= 0 and max(found) <= bound):
            problems.append(f"step {row['step']}, group {row['group']}: tokens are {sorted(found)} versions old")
    return problems


def _short(found: list[Any]) -> str:
    return f"{found[:12]}{f' and {len(found) - 12} more' if len(found) > 12 else ''}"
