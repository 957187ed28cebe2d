"""The reward function `judge`: language models at OpenAI-compatible endpoints rate the answers of a group.

answers to a prompt -> Question -> one request to each judge -> Verdict -> a value for each answer
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from birl.errors import BirlError
from birl.rewards.panel import Panel, Value, failures
from birl.rewards.questions import Rubric, rubric

SHOWN = 2000  # characters of a reply in rollouts.jsonl

_panels: dict[str, Panel] = {}


def prepare(panel: Mapping[str, Any] | None = None) -> None:
    """Open the panel. Raises `BirlError` if the judges are not configured correctly."""
    if not panel or not panel["judges"]:
        raise BirlError("reward judge: no judge is named; set reward.judge=http://localhost:8000/v1#MODEL.")
    opened(panel)


def opened(panel: Mapping[str, Any]) -> Panel:
    """The panel, one per process, so that its rate limit applies across calls."""
    key = json.dumps(panel, sort_keys=True)
    if key not in _panels:
        _panels[key] = Panel.of(panel)
    return _panels[key]


async def judge(
    completions: list[str],
    prompts: list[Any],
    gold: Sequence[object],
    *,
    panel: Mapping[str, Any],
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Sequence[Any],
) -> list[Value]:
    """The judges' value of each completion, from 0 to 1. `panel`: argument of `Panel.of`. Logs the first judge's reply
    about each answer, and the fraction of questions that failed, by kind."""
    jury = opened(panel)
    groups: defaultdict[tuple[str, str, Rubric], list[int]] = defaultdict(list)
    for i, (prompt, right) in enumerate(zip(prompts, gold, strict=True)):
        own = rubric_of(jury, columns, i)
        groups[text(prompt), "" if right is None else str(right), own].append(i)
    answers = {key: [completions[i] for i in places] for key, places in groups.items()}
    asked = {key: jury.manner.questions(key[0], key[1], answers[key], key[2]) for key in groups}
    verdicts = await jury.verdicts([question for questions in asked.values() for question in questions])
    result: list[Value] = [0.0] * len(completions)
    replies = [""] * len(completions)
    first = 0
    for key, questions in asked.items():
        own = [each[first : first + len(questions)] for each in verdicts]
        first += len(questions)
        for i, value in zip(groups[key], jury.values(answers[key], questions, own), strict=True):
            result[i] = value
            replies[i] = next(
                (v.reply for q, v in zip(questions, own[0], strict=True) if completions[i] in q.shown), ""
            )
    if log_extra is not None:
        log_extra("judge", [words[:SHOWN] for words in replies])
    if log_metric is not None and first:
        for kind, share in failures(verdicts).items():
            log_metric(f"judge_{kind}", share)
    return result


def rubric_of(panel: Panel, columns: Mapping[str, Sequence[Any]], index: int) -> Rubric:
    """The row's rubric if it has one, else the configuration's. Raises `BirlError`."""
    if not panel.column:
        return panel.rubric
    if panel.column not in columns:
        raise BirlError(
            f"reward.judge_rubric_column={panel.column}: the rows have no such column, only {', '.join(columns)}."
        )
    value = columns[panel.column][index]
    return panel.rubric if value is None else rubric(value, f"column {panel.column}")


def text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(m["content"] if m["role"] == "user" else f"({m['role']}) {m['content']}" for m in prompt)
