"""Configuration -> how judges are asked."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from birl.config.decided import reward_timeout
from birl.config.schema import RL, Eval
from birl.errors import BirlError
from birl.rewards.rubric import rubric


def settings(config: RL | Eval) -> dict[str, Any]:
    """The `panel` of a configuration, as JSON has it. Raises `BirlError`."""
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
    """Of reward.judge_prompt. Raises `BirlError`."""
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
