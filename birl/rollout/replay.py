"""Records exactly what a run trained on (`track.record`), and trains on it again (`debug.replay`).

An asynchronous run depends on timing: which weights sampled a token, which group was ready first. The record has
everything that timing decided, so a replay is bit-identical on the same machine: a difference is a bug, and the replay
stops at that step. With `debug.resample` each answer is also sampled again, piece by piece, under its recorded version
of the weights, as soon as the replay has these weights.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import check_all, inside, read_bytes
from birl.rollout.pipeline import Step
from birl.samples import Support
from birl.seeds import derive_seed
from birl.track.log import read_jsonl
from birl.types import (
    PICTURES,
    Completion,
    Engine,
    Group,
    Message,
    Outcome,
    Picture,
    SamplingParams,
    Stop,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

FILE = "record.jsonl"
PLAIN = (str, int, float, list, dict, type(None))  # types of columns that JSON represents; others are not recorded
COMPARED = (
    *("loss", "grad_norm", "entropy", "clip_fraction", "ratio/", "reward/", "kl", "lr"),
    *("updates/", "critic/", "order/"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step, and the rewards of greedy answers to its prompts, by group number."""

    step: Step
    greedy: dict[int, float]


def row_of(step: Step, greedy: Mapping[int, float]) -> dict[str, Any]:
    """Make one line of the record."""
    return {
        "step": step.number,
        "position": step.position,
        "ahead": list(step.ahead),
        "groups": [_group_to(g) for g in step.groups],
        "refused": [_group_to(g) for g in step.refused],
        "greedy": {str(index): reward for index, reward in greedy.items()},
    }


def steps_of(run: Path) -> Iterator[Recorded]:
    """Read the recorded steps. Raises `BirlError` if there are none, or one is damaged."""
    path = run / FILE
    if not path.is_file():
        raise BirlError(f"debug.replay={run}: has no {FILE}. Record a run with track.record=true.")
    for row in read_jsonl(path):
        try:
            step = Step(
                number=row["step"],
                position=row["position"],
                ahead=tuple(row["ahead"]),
                groups=[_group_from(g, run) for g in row["groups"]],
                refused=[_group_from(g, run) for g in row["refused"]],
            )
            yield Recorded(step, {int(index): float(reward) for index, reward in row.get("greedy", {}).items()})
        except FileNotFoundError as error:
            raise BirlError(f"{path}: a prompt's picture is missing: {error.filename}.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise BirlError(f"{path}: a line is not a step of a run ({error!r}). Record it again.") from error


def take_pictures(recorded: Path, run: Path) -> None:
    """Copy the picture files of prompts and environments; they are looked up by their tokens (`text/pictures.py`)."""
    if (recorded / PICTURES).is_dir():
        check_all(recorded / PICTURES)
        shutil.copytree(recorded / PICTURES, run / PICTURES, dirs_exist_ok=True)


def differences(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Metrics of a step that differ from the record."""
    result = []
    for name, value in now.items():
        if name.startswith(COMPARED) and name in before:
            there = float("nan") if before[name] is None else before[name]
            if not (value == there or (value != value and there != there)):
                result.append(f"step {step}: {name} is {value!r} and was {there!r}")
    return result


async def resample(steps: list[Step], version: int, engine: Engine, params: SamplingParams, seed: int) -> int:
    """Sample the tokens of `version` again. Returns their number; raises `BirlError` at the first difference."""
    pieces = [
        (group.index, episode, number, turn, first, last)
        for step in steps
        for group in (*step.groups, *step.refused)
        for episode, trajectory in enumerate(group.trajectories)
        for number, turn in enumerate(trajectory.turns)
        for first, last in _spans(turn.completion.versions.tolist(), version)
    ]

    async def one(index: int, episode: int, number: int, turn: Turn, first: int, last: int) -> int:
        recorded = turn.completion
        whole = last == len(recorded.tokens) and recorded.stop is not Stop.LENGTH
        limit = params.max_tokens if whole else last
        own = replace(
            params, seed=derive_seed(seed, index, episode, number), forced=tuple(recorded.tokens[:first].tolist())
        )
        result = await engine.generate(tuple(turn.prompt.tolist()), replace(own, max_tokens=limit))
        for name in ("tokens", "logprobs"):
            now, then = (getattr(c, name)[first:last].tolist() for c in (result, recorded))
            if now != then:
                place = next(
                    (i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then))
                )
                raise BirlError(
                    f"Group {index}, episode {episode}, turn {number}: token {first + place} of version {version} was "
                    f"{name} {then[place : place + 1]} and is {now[place : place + 1]} now."
                )
        own, before = (c.support and c.support.part(slice(first, last)) for c in (result, recorded))
        if own != before:
            raise BirlError(
                f"Group {index}, episode {episode}, turn {number}: tokens {first} to {last - 1} of version {version} "
                "were sampled from another set of tokens."
            )
        return last - first

    return sum(await asyncio.gather(*(one(*piece) for piece in pieces)))


async def replay(
    run: Path,
    train: Callable[[Step], Awaitable[None]],
    greedy: dict[int, float],
    metrics: Callable[[], Mapping[str, Any]],
    version: Callable[[], int],
    again: Callable[[list[Step], int], Awaitable[int]] | None,
    finished: int = 0,
    stop: asyncio.Event | None = None,
) -> tuple[int, int]:
    """Train on every recorded step that has metrics (one in which the run was killed has none), and compare. `greedy`
    is filled with rewards that `train` reads. `metrics`: of the step just trained; `again`: samples the tokens of a
    version again; `finished`: steps to skip; `stop`: if set, ends the replay after a step. Returns the numbers of
    compared steps and tokens. Raises `BirlError` if there are none, and at the first difference."""
    recorded, figures = list(steps_of(run)), run / "metrics.jsonl"
    before = {row.get("step"): row for row in read_jsonl(figures)} if figures.is_file() else {}
    known = [one for one in recorded if one.step.number in before]
    if not known:
        raise BirlError(f"debug.replay={run}: {len(recorded)} recorded steps, and no figures of them to compare with.")
    left = [one for one in known if one.step.number > finished]
    steps, done = [one.step for one in left], set[int]()
    tokens = compared = 0
    for one in left:
        if stop is not None and stop.is_set():
            break
        if again is not None and version() not in done:
            done.add(version())
            tokens += await again(steps, version())
        greedy.update(one.greedy)
        await train(one.step)
        number, compared = one.step.number, compared + 1
        if result := differences(number, before[number], metrics()):
            raise BirlError(f"The replay differs from {run}: " + "; ".join(result[:4]) + ".")
    return compared, tokens


def _spans(versions: Sequence[int], version: int) -> Iterator[tuple[int, int]]:
    """Spans of consecutive tokens of one version: first, and one past the last."""
    start = None
    for place, own in enumerate((*versions, None)):
        if own == version and start is None:
            start = place
        elif own != version and start is not None:
            yield start, place
            start = None


def _group_to(group: Group) -> dict[str, Any]:
    task = group.task
    prompt: Any = task.prompt
    if not isinstance(prompt, str):  # digests of pictures: the run's folder has the files
        prompt = [asdict(replace(m, pictures=())) | {"pictures": [p.digest for p in m.pictures]} for m in prompt]
    return {
        "index": group.index,
        "start_version": group.start_version,
        "task": {
            "id": task.id,
            "prompt": prompt,
            "answer": task.answer,
            "source": task.source,
            "columns": {name: value for name, value in task.columns.items() if isinstance(value, PLAIN)},
        },
        "trajectories": [
            {
                "turns": [
                    {
                        "prompt": turn.prompt.tolist(),
                        "tokens": turn.completion.ids,
                        "logprobs": turn.completion.logprobs.tolist(),
                        "versions": turn.completion.versions.tolist(),
                        "stop": str(turn.completion.stop),
                        "routes": turn.completion.routes.hex(),
                        **_support_to(turn.completion.support),
                        "reward": turn.reward,
                        "agent": turn.agent,
                        **({"policy": turn.policy} if turn.policy else {}),
                        **({"rewards": dict(turn.rewards)} if turn.rewards else {}),
                    }
                    for turn in t.turns
                ],
                "reward": t.reward,
                "score": t.score,
                "outcome": str(t.outcome),
                "parts": dict(t.parts),
                "detail": t.detail,
                "rewards": dict(t.rewards),
            }
            for t in group.trajectories
        ],
    }


def _group_from(row: Mapping[str, Any], run: Path) -> Group:
    task = row["task"]
    messages = task["prompt"]
    prompt = messages if isinstance(messages, str) else tuple(_message_from(m, run) for m in messages)
    return Group(
        index=row["index"],
        start_version=row["start_version"],
        task=Task(
            id=task["id"], prompt=prompt, answer=task["answer"], source=task["source"], columns=task.get("columns", {})
        ),
        trajectories=tuple(_trajectory(t) for t in row["trajectories"]),
    )


def _support_to(support: Support | None) -> dict[str, Any]:
    """The support's fields, if there is one: most records have none."""
    return {} if support is None else {"support": {n: getattr(support, n).tolist() for n in ("counts", "ids")}}


def _message_from(row: Mapping[str, Any], run: Path) -> Message:
    calls = tuple(ToolCall(**call) for call in row["tool_calls"])
    pictures = tuple(Picture.of(read_bytes(inside(run, f"{PICTURES}/{digest}"))) for digest in row["pictures"])
    return Message(**{**row, "tool_calls": calls, "pictures": pictures})


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    def number(value: float | None) -> float:
        return float("nan") if value is None else float(value)

    return Trajectory(
        turns=tuple(
            Turn(
                prompt=turn["prompt"],
                completion=Completion(
                    tokens=turn["tokens"],
                    logprobs=turn["logprobs"],
                    versions=turn["versions"],
                    stop=Stop(turn["stop"]),
                    routes=bytes.fromhex(turn["routes"]),
                    support=Support(**turn["support"]) if "support" in turn else None,
                ),
                reward=number(turn["reward"]),
                agent=turn["agent"],
                policy=turn.get("policy", ""),
                rewards=turn.get("rewards", {}),
            )
            for turn in row["turns"]
        ),
        reward=number(row["reward"]),
        score=number(row["score"]),
        outcome=Outcome(row["outcome"]),
        parts={k: number(v) for k, v in row["parts"].items()},
        detail=row["detail"],
        rewards={k: number(v) for k, v in row["rewards"].items()},
    )
