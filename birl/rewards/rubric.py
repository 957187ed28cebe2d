"""Rubrics: criteria with weights, from the configuration or a row; and the judges' settings in the configuration."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from birl.config.decided import reward_timeout
from birl.config.schema import RL, Eval
from birl.errors import BirlError
from birl.types import LARGEST

MOST = 100  # most criteria: the judge's last line lists each
WEIGHTED = re.compile(r"\s*(-?\d{1,6}(?:\.\d{1,6})?)\s*:\s+(.+)", re.DOTALL)
TEXTS = ("criterion", "criteria", "description", "text", "title")
WEIGHTS = ("weight", "points")


@dataclass(frozen=True, slots=True)
class Criterion:
    """A property that an answer should have or, with a negative weight, should not have.

    Example: Criterion("It names its source.", 2.0)
    """

    text: str
    weight: float = 1.0


Rubric = tuple[Criterion, ...]


def rubric(value: Any, where: str) -> Rubric:
    """Parse a rubric: "weight: text" or text alone, objects with a text and a weight (HealthBench's `criterion` and
    `points`, RaR's `description` and `weight`), a list of these, or JSON text of one. Raises `BirlError`.

    Example: rubric(["2: It is right.", "It is short."], "reward.judge_rubric")[0].weight == 2.0
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # else it is a criterion with such a beginning
            value = json.loads(value)
    given = value if isinstance(value, list | tuple) else [value]
    result = tuple(_criterion(one, f"{where}[{i}]") for i, one in enumerate(given))
    if not 0 < len(result) <= MOST:
        raise BirlError(f"{where} has {len(result)} criteria; it needs 1 to {MOST}.")
    if not any(criterion.weight > 0 for criterion in result):
        raise BirlError(f"{where}: no weight is above 0, so that no answer could score more than another.")
    return result


def _criterion(value: Any, where: str) -> Criterion:
    text, weight = value, 1.0
    if isinstance(value, str) and (match := WEIGHTED.fullmatch(value)):
        text, weight = match[2], float(match[1])
    elif isinstance(value, Mapping):
        text = next((value[name] for name in TEXTS if value.get(name)), None)
        weight = next((value[name] for name in WEIGHTS if value.get(name) is not None), 1.0)
    if not isinstance(text, str) or not text.strip():
        raise BirlError(
            f'{where} is no criterion: write "2: It names its source.", or an object with one of {", ".join(TEXTS)}, '
            f"and one of {', '.join(WEIGHTS)}."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= LARGEST:
        raise BirlError(f"{where}: its weight is {weight!r:.50}, it needs to be a number.")
    return Criterion(text.strip(), float(weight))


def weighted(criteria: Rubric, met: Sequence[float]) -> float:
    """sum(weight met) / sum(weights above 0), clamped to 0 .. 1 (Arora et al. 2025, HealthBench). `met`: for each
    criterion, 0 .. 1."""
    most = sum(criterion.weight for criterion in criteria if criterion.weight > 0)
    value = sum(c.weight * share for c, share in zip(criteria, met, strict=True)) / most
    return min(max(value, 0.0), 1.0)


def settings(config: RL | Eval) -> dict[str, Any]:
    """The `panel` of a configuration as JSON data. Raises `BirlError`."""
    keys = config.reward
    return {
        "judges": list(keys.judge),
        "manner": {"mode": keys.judge_mode, "rounds": keys.judge_rounds, "seed": config.seed}
        | ({"template": read_template(keys.judge_prompt)} if keys.judge_prompt else {}),
        "rubric": [asdict(c) for c in rubric(keys.judge_rubric, "reward.judge_rubric")] if keys.judge_rubric else [],
        "column": keys.judge_rubric_column,
        "combine": keys.judge_panel,
        "tokens": keys.judge_tokens,
        "cache": keys.judge_cache,
        "concurrency": keys.concurrency,
        "rate": keys.judge_rate / keys.workers,
        "timeout": reward_timeout(config),
    }


def read_template(file: str) -> str:
    """Read the template of reward.judge_prompt. Raises `BirlError`."""
    try:
        words = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BirlError(f"reward.judge_prompt={file}: cannot be read: {error}") from error
    if "{completion}" not in words:
        raise BirlError(
            f"reward.judge_prompt={file}: has no {{completion}}, so the judge would not see what it judges. It may "
            "also have {prompt}, {gold}, {rubric} and {form}."
        )
    return words
