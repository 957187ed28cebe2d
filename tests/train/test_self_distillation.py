"""Runs whose teacher is the policy itself, with a hint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner.checkpoint import read_tensors
from birl.models import logprobs
from birl.named import Given
from birl.train.command import train
from tests.train.test_teacher import QUIET

CLOCKS = ("time", "speed/", "memory/", "engine/cache_hit")
SELF = ("sdft", "opsd", "sdpo")


def vowels(completions: list[str], log_extra: Any = None, **_: Any) -> list[float]:
    """At least 1 where there are two of them; feedback says how many there were."""
    counts = [sum(c in "aeiou" for c in text) for text in completions]
    if log_extra is not None:
        log_extra("feedback", [f"{n} vowels, too few" if n < 2 else None for n in counts])
    return [n / 2 for n in counts]


def run(tiny: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The figures of each step."""
    rows = [{"prompt": f"What is {i} + 2?", "answer": f"The answer is {i + 2}."} for i in range(8)]
    given = (f"model.path={tiny}", "data.train=[given]", "reward.functions=[given:vowels]", f"run={folder}/run")
    small = ("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=8", "optimizer.lr=3e-3", "steps=1")
    train(load(schema.RL, [*given, *small, *QUIET, *words]), given=Given(rewards=[vowels], train=rows))
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCKS)} for line in lines]


def test_the_policy_goes_to_what_it_says_with_a_hint(tiny: Path, tmp_path: Path) -> None:
    found = [m["divergence"] for m in run(tiny, tmp_path, "algorithm=opsd", "steps=25", "rollout.group_size=8")]
    assert sum(found[-3:]) < 0.6 * sum(found[:3])


def test_a_sampled_token_too(tiny: Path, tmp_path: Path) -> None:
    """The advantage is its log-prob with the hint less that without: 0 without one."""
    words = ("algorithm=distill", "algorithm.teacher=self", "algorithm.teacher_rate=0")
    (figures,) = run(tiny, tmp_path, *words, "algorithm.hint=['{answer}']")
    assert figures["hint/share"] == 1 and figures["grad_norm"] > 0
    (figures,) = run(tiny, tmp_path / "none", *words, "algorithm.hint=['{sibling}']", "rollout.group_size=1")
    assert figures["hint/share"] == 0 and figures["updates/skipped"] == 1


def test_without_a_right_answer_the_feedback_is_the_hint(tiny: Path, tmp_path: Path) -> None:
    (figures,) = run(tiny, tmp_path, "algorithm=sdpo", "rollout.max_tokens=16")
    assert 0.8 < figures["hint/share"] <= 1 and figures["divergence"] > 0


def test_the_divergence_is_of_the_tokens_that_are_compared(tiny: Path, tmp_path: Path) -> None:
    """Answers without a hint may have an advantage, and are computed then; once their tokens counted as zeros."""
    words = ("algorithm=sdpo", "algorithm.hint=['{sibling}']", "rollout.max_tokens=5")
    one, two = (run(tiny, tmp_path / kind, *words, f"algorithm.advantage={kind}")[0] for kind in ("zero", "relative"))
    assert one["hint/share"] == two["hint/share"] < 1 and one["tokens/learned"] < two["tokens/learned"]
    assert one["divergence"] == pytest.approx(two["divergence"], rel=1e-5)


@pytest.mark.parametrize("preset", SELF)
def test_micro_batches_change_nothing(tiny: Path, tmp_path: Path, preset: str) -> None:
    """Of which some have no hint, and advantages beside."""
    words = (f"algorithm={preset}", "algorithm.advantage=relative", "algorithm.hint=['{sibling}']")
    one, many = (
        run(tiny, tmp_path / str(size), *words, f"learner.tokens_per_microbatch={size}", "rollout.max_tokens=5")[0]
        for size in (4096, 120)
    )
    assert 0 < one["hint/share"] < 1
    for figure in ("loss", "grad_norm", "divergence", "hint/share"):
        assert one[figure] == pytest.approx(many[figure], rel=2e-4, abs=1e-6), figure


def test_log_probs_without_a_gradient_have_no_backward_pass(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantages of 0 had one through all logits. A surrogate of one's own may have other terms; here it has none."""
    calls = []
    for of in (logprobs._KernelLogprobs, logprobs._TokenLogprobs):
        counted = lambda *rest, plain=of.backward: calls.append(1) or plain(*rest)  # noqa: E731
        monkeypatch.setattr(of, "backward", staticmethod(counted))
    (tmp_path / "own.py").write_text("from birl.algorithms.surrogates import importance as own\n")
    preset = run(tiny, tmp_path / "preset", "algorithm=sdpo")
    assert not calls
    own = run(tiny, tmp_path / "own", "algorithm=sdpo", f"algorithm.surrogate={tmp_path}/own.py:own")
    assert calls and preset[0]["grad_norm"] > 0
    for figure in ("loss", "grad_norm", "divergence"):
        assert own[0][figure] == pytest.approx(preset[0][figure], rel=1e-4, abs=1e-6), figure


@pytest.mark.parametrize("more", ["model.dtype=float32", "model.dtype=bfloat16 lora.rank=4"])
def test_a_resumed_run_is_the_same_bit_for_bit(tiny: Path, tmp_path: Path, more: str) -> None:
    words = ("algorithm=sdft", "algorithm.teacher_rate=0.3", "checkpoint.every=2", *more.split())
    whole = run(tiny, tmp_path / "whole", *words, "steps=4")
    run(tiny, tmp_path / "parts", *words, "steps=2")
    assert run(tiny, tmp_path / "parts", *words, "steps=4") == whole
    one, two = (read_tensors(tmp_path / name / "run/checkpoints/step-000004") for name in ("whole", "parts"))
    averaged = [name for name in one if name.startswith("average.")]
    assert averaged and all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], one[f"model.{name.removeprefix('average.')}"]) for name in averaged)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("algorithm=distill algorithm.teacher=self", "add text with algorithm.hint"),
        ("algorithm=sdft algorithm.hint=[Aha]", "needs a column, sibling or feedback in braces"),
        ("algorithm=sdft algorithm.hint=['{proof}']", "has no column 'proof', only answer"),
        ("algorithm=sdft algorithm.router_replay=rollout", "are those of the prompt without a hint"),
        ("algorithm.hint=['{answer}']", r"algorithm\.teacher is empty"),
        ("algorithm=distill algorithm.teacher=x algorithm.teacher_rate=0", r"algorithm\.teacher is not self"),
        ("algorithm=sdft parallel.cp=2", r"set parallel\.cp=1"),
        ("algorithm=sdft parallel.tp=2", r"set parallel\.tp=1"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, tmp_path: Path, words: str, told: str) -> None:
    with pytest.raises(BirlError, match=told):
        run(tiny, tmp_path, *words.split())
