"""Measure a policy on held-out tasks: unbiased pass@k by source, failures counted apart. `birl eval`, and validation in
`birl rl`."""

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from birl.algorithms.pass_at_k import pass_at_k, wilson
from birl.config import schema
from birl.errors import BirlError
from birl.rollout.group import Rollout, last_reply
from birl.types import Group, Message, SamplingParams, Task

CORRECT = 1.0  # a score of at least this counts as right; smaller ones only enter the mean score


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to evaluate: `samples` answers a prompt, the `k` of pass@k."""

    tasks: Sequence[Task]
    params: SamplingParams
    samples: int
    k: Sequence[int]


def plan(tasks: Sequence[Task], validation: schema.Validation, max_tokens: int, stop: Sequence[str] = ()) -> Plan:
    return Plan(
        tasks=tasks,
        params=SamplingParams(
            max_tokens=validation.max_tokens or max_tokens,
            temperature=validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
            stop=tuple(stop),
        ),
        samples=validation.samples,
        k=validation.k,
    )


async def evaluate(plan: Plan, rollout: Rollout) -> tuple[dict[str, float], list[Group]]:
    """All tasks at once; the engine queues them. A task may ask for its own number of answers (EasyRL's
    extra_info["pass@k"])."""
    groups = await asyncio.gather(
        *(rollout.group(i, task, max(plan.samples, own_k(task)), plan.params) for i, task in enumerate(plan.tasks))
    )
    return measure(groups, plan.k), list(groups)


def data_digest(tasks: Sequence[Task]) -> str:
    """Of the questions and right answers, in their order."""
    found = xxhash.xxh3_128()
    for task in tasks:
        found.update(f"{task.id}\n{task.prompt!r}\n{task.answer!r}\n".encode())
    return found.hexdigest()


def own_k(task: Task) -> int:
    extra = task.columns.get("extra_info")
    value = extra.get("pass@k", 1) if isinstance(extra, dict) else 1
    return int(value) if isinstance(value, int | float) and value >= 1 else 1


def measure(groups: Sequence[Group], ks: Sequence[int]) -> dict[str, float]:
    """Names: validation/<source>/{pass@k, score, length, truncated, failed, n}, and <source> "all" over everything."""
    by_source: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source].append(group)
        by_source["all"].append(group)
    return {
        f"validation/{s}/{name}": v for s, members in by_source.items() for name, v in _figures(members, ks).items()
    }


def _figures(groups: Sequence[Group], ks: Sequence[int]) -> dict[str, float]:
    """Failed episodes enter no mean: they are counted in `failed`."""
    episodes = [t for g in groups for t in g.trajectories]
    scored = [t for t in episodes if t.outcome.scored]
    figures = {
        "score": _mean([t.score for t in scored]),
        "length": _mean([len(turn.completion.tokens) for t in scored for turn in t.turns]),
        "truncated": float(sum(t.outcome == "truncated" for t in episodes)),
        "failed": float(len(episodes) - len(scored)),
        "n": float(len(groups)),
    }
    for k in sorted({*ks, *(own_k(g.task) for g in groups)}):
        counts = [(len(s), sum(v >= CORRECT for v in s)) for g in groups if (s := _scores(g))]
        enough = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if enough:
            figures[f"pass@{k}"] = _mean(enough)
    return figures


def _scores(group: Group) -> list[float]:
    return [t.score for t in group.trajectories if t.outcome.scored]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def answers(groups: Sequence[Group], rollout: Rollout, limit: int | None = None) -> list[dict]:
    """First answer of each task, as text, for reports."""
    found = []
    for group in groups[:limit]:
        trajectory = group.trajectories[0]
        found.append(
            {
                "prompt": prompt_text(group.task.prompt),
                "completion": last_reply(trajectory, rollout.chat).content if trajectory.turns else "",
                "answer": group.task.answer,
                "score": trajectory.score if trajectory.outcome.scored else None,
                "outcome": str(trajectory.outcome),
                "source": group.task.source,
                "id": group.task.id,
            }
        )
    return found


def prompt_text(prompt: tuple[Message, ...] | str) -> str:
    """What the user said, for people to read; the model sees the template's rendering."""
    return prompt if isinstance(prompt, str) else "\n".join(m.content for m in prompt if m.role != "system")


def run(config: schema.Eval) -> None:
    """`birl eval`."""
    from birl.loops import build
    from birl.loops.machine import compute_thread

    with compute_thread(config.threads) as compute:
        asyncio.run(_run(config, build, compute))


async def _run(config: schema.Eval, build, compute: Executor) -> None:
    output = Path(config.output)
    with _writing(output):  # better to know now than when the answers are there
        output.parent.mkdir(parents=True, exist_ok=True)
    parts = await build.evaluation(config, compute)
    try:
        metrics, groups = await evaluate(parts.plan, parts.rollout)
    finally:
        await parts.close()
    check_failures(groups)
    _print(metrics)
    if config.output:
        records = [
            record
            for g in groups
            for record in answers([_only(g, i) for i in range(len(g.trajectories))], parts.rollout)
        ]
        text = json.dumps({"model": config.model.path, "metrics": metrics, "answers": records}, indent=1, default=str)
        with _writing(output):
            output.write_text(text)
        print(f"Written to {config.output}")


def check_failures(groups: Sequence[Group]) -> None:
    """Say why answers have no score; without a single one there is nothing to report."""
    episodes = [t for g in groups for t in g.trajectories]
    failed = Counter(t.detail for t in episodes if not t.outcome.scored)
    if failed:
        reasons = "\n".join(f"  {n} x {why}" for why, n in failed.most_common(3))
        text = f"{failed.total()} of {len(episodes)} answers could not be scored. Most frequent reasons:\n{reasons}"
        if failed.total() == len(episodes):
            raise BirlError(text)
        print(text)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BirlError(f"output={path} cannot be written: {error.strerror or error}. Name another file.") from error


def _only(group: Group, i: int) -> Group:
    return replace(group, trajectories=(group.trajectories[i],))


def _print(metrics: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("source", "n", "metric", "value", "95 %", "mean score", "mean tokens", "truncated", "failed")
    for source in dict.fromkeys(name.split("/")[1] for name in metrics):
        own = {name.split("/")[2]: v for name, v in metrics.items() if name.split("/")[1] == source}
        for k in (name for name in own if name.startswith("pass@")):
            low, high = wilson(own[k] * own["n"], int(own["n"]))
            rest = (f"{own['score']:.3f}", f"{own['length']:.1f}", f"{own['truncated']:.0f}", f"{own['failed']:.0f}")
            table.add_row(source, f"{own['n']:.0f}", k, f"{own[k]:.3f}", f"{low:.3f} - {high:.3f}", *rest)
    Console().print(table)
