"""A small fake run for the tests of tracking."""

import random
from pathlib import Path
from typing import Any

from birl.config.schema import Track
from birl.track.tracker import Tracker

HOSTILE = (
    "<script>alert(1)</script>\x1b[2J\u202egnp.exe & \"q\" <img src=x onerror=alert(1)> '|' \ud800 \u2028 [red]x[/red]"
)
QUESTIONS = [("What is 3 + 4?", "7"), ("What is 9 + 9?", "18"), (HOSTILE, "1")]


def metrics(step: int) -> dict[str, float]:
    """The same for the same step, whoever asks."""
    chance = random.Random(step)
    times = {"generate": 5 + chance.random(), "reward": 0.1, "train": 2.5, "other": 0.05}
    return {
        **{"reward/mean": 0.2 + 0.02 * step, "reward/std": 0.4, "outcome/asked": 64.0, "outcome/ok": 62.0},
        **{"outcome/truncated": 2.0, "groups/no_signal": 1.0, "length/mean": 14.2, "length/max": 32.0},
        **{"kl": 0.001 * chance.random(), "entropy": 0.5, "clip_fraction": 0.01},
        **{"grad_norm": float("nan") if step == 3 else 0.5, "tokens/generated": 900.0, "tokens/trained": 800.0},
        **{"tokens/learned": 300.0, "speed/generate": 812.0, "speed/train": 1930.0},
        **{f"time/{name}": seconds for name, seconds in times.items()},
        "time/step": sum(times.values()),
        "new/<thing>": chance.random(),
    }


def validation(step: int) -> dict[str, float]:
    return {"validation/sums/pass@1": 0.2 + 0.02 * step, "validation/all/pass@1": 0.2 + 0.02 * step}


def samples(step: int) -> list[dict[str, Any]]:
    right = step // 5
    return [
        {
            "prompt": prompt,
            "completion": f"The answer is {answer}." if index < right else f"I think 12. {HOSTILE}",
            "answer": answer,
            "score": float(index < right),
            "source": "sums",
        }
        for index, (prompt, answer) in enumerate(QUESTIONS)
    ]


def tracker(run: Path, total: int | None = 10, **track: Any) -> Tracker:
    settings: dict[str, Any] = {"console": "off", "tensorboard": False, **track}
    return Tracker(run, Track(**settings), title="smollm2 · sums", total_steps=total, config={"seed": 0})


def train(tracker: Tracker, first: int, last: int) -> None:
    """Steps `first` to `last`, with a validation before the first and after every fifth."""
    if first == 1:
        tracker.validation(0, validation(0), samples(0))
    for step in range(first, last + 1):
        tracker.phase(f"generating {step}/64")
        tracker.rollouts(step, [{"tokens": [1, 2], "logprobs": [0.0, -0.123456789 * step], "text": HOSTILE}] * 3)
        tracker.step(step, metrics(step))
        if step % 5 == 0:
            tracker.validation(step, validation(step), samples(step))
