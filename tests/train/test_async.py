"""Asynchronous runs in one process: the bound, the ledger, what is trained, and that it learns."""

import asyncio
import json
import math
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birl.engine.engine import EmbeddedEngine
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.rollout.ledger import FILE, audit
from birl.track.tracker import Tracker
from tests.train.test_rl import any_a, log, many_a, run

UNEVEN = ("rollout.max_tokens=40", "rollout.prompts=2", "rollout.group_size=4", "engine.max_batch=6")


@pytest.mark.parametrize(("bound", "window"), [(1, 0), (2, 0), (4, 3)])
def test_staleness_is_bounded_and_told(
    tiny: Path, tmp_path: Path, bound: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Tracker, "message", lambda _, text: told.append(text))
    run(tiny, tmp_path, *UNEVEN, "steps=8", f"rollout.max_staleness={bound}", f"rollout.order_window={window}")
    assert sum("bounds nothing in this run" in text for text in told) == 1  # one update a batch
    steps, records = log(tmp_path), log(tmp_path, "rollouts")
    assert 0 < max(s["staleness/max"] for s in steps) <= bound
    for step in steps:
        shares = [step[f"staleness/{age}"] for age in range(bound + 1)]
        assert sum(shares) == pytest.approx(1) or step["tokens/trained"] == 0
        assert step["staleness/mean"] == pytest.approx(sum(a * s for a, s in enumerate(shares)))
        mine = [r for r in records if r["step"] == step["step"]]
        ages = Counter(step["step"] - 1 - v for r in mine for s in r["samples"] for v in s["versions"] if v >= 0)
        assert max(ages) == step["staleness/max"] and min(ages) >= 0  # one update a step: versions count steps
    found = audit(tmp_path / "run")
    assert not found.problems and found.lives == 1
    assert found.tokens["trained"] + found.tokens["no_gradient"] == sum(
        m for r in records for s in r["samples"] for m in s["mask"]
    )


def test_answers_that_span_an_update_are_trained(tiny: Path, tmp_path: Path) -> None:
    """With the log-probs of both versions kept apart: each is compared under the weights that it names."""
    run(tiny, tmp_path, *UNEVEN, "steps=10", "rollout.max_staleness=2", "model.dtype=bfloat16", "optimizer.lr=0.02")
    steps = log(tmp_path)
    assert max(s["staleness/mixed"] for s in steps) > 0
    fresh = [s["mismatch/mean"] for s in steps if s["mismatch/mean"] is not None]
    assert fresh and max(fresh) == 0  # the kernels' promise: the same bits, with keys and values computed anew
    assert all(s["mismatch/tokens"] > 0 and s["mismatch/unheld"] == 0 for s in steps if s["updates/done"])
    mixed = [
        s for r in log(tmp_path, "rollouts") for s in r["samples"] if len({v for v in s["versions"] if v >= 0}) > 1
    ]
    for sample in mixed:
        versions = [v for v in sample["versions"] if v >= 0]
        assert versions == sorted(versions)


def test_without_staleness_the_pipeline_is_the_plain_loop(tiny: Path, tmp_path: Path) -> None:
    """Invariant 3, bit for bit: the same run, in which the groups of the next step are begun by hand."""
    from birl.rollout import pipeline

    async def plain(tasks, rollout, train, *, keep, groups_per_step, steps, position, **_: Any) -> None:
        import asyncio

        for number in range(1, steps + 1):
            chosen = [next(tasks) for _ in range(groups_per_step)]
            groups = await asyncio.gather(*(rollout(position + i, task) for i, task in enumerate(chosen)))
            position += groups_per_step
            await train(pipeline.Step(number=number, groups=list(groups), refused=[], position=position))

    words = ("model.dtype=bfloat16", "steps=4", *UNEVEN)
    run(tiny, tmp_path / "a", *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", plain)
        run(tiny, tmp_path / "b", *words)
    states = [checkpoint.read_tensors(step_folders.latest(tmp_path / n / "run" / "checkpoints")) for n in "ab"]
    assert states[0].keys() == states[1].keys() and all((states[0][k] == states[1][k]).all() for k in states[0])
    assert log(tmp_path / "a", "rollouts") == log(tmp_path / "b", "rollouts")


@pytest.mark.parametrize("algorithm", ["grpo", "grpo algorithm.proximal=interpolate", "m2po"])
def test_it_learns_from_old_answers(tiny: Path, tmp_path: Path, algorithm: str) -> None:
    words = ("rollout.max_staleness=3", "steps=50", "rollout.group_size=8")
    run(tiny, tmp_path, *words, *f"algorithm={algorithm}".split())
    rewards = [m["reward/mean"] for m in log(tmp_path)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


def test_a_resumed_run_goes_on_behind_what_was_trained(tiny: Path, tmp_path: Path) -> None:
    words = [*UNEVEN, "rollout.max_staleness=3", "rollout.order_window=3", "checkpoint.every=1", "steps=9"]

    async def interrupted(completions: list[str], **_: object) -> list[float]:
        rewarded.append(1)
        if len(rewarded) == 7:  # others overtake it
            await asyncio.sleep(0.7)
            os.kill(os.getpid(), signal.SIGINT)
        return many_a(completions)

    for reward in (interrupted, interrupted, many_a):
        rewarded: list[int] = []
        run(tiny, tmp_path, *words, rows=30, reward=reward)
    found = audit(tmp_path / "run")
    assert not found.problems and found.lives == 3 and found.sampled >= found.tokens["trained"] > 0
    state = step_folders.read_state(step_folders.latest(tmp_path / "run" / "checkpoints"))
    groups = [r["group"] for r in log(tmp_path, "rollouts") if r["episode"] == 0]
    assert sorted(groups) == sorted([*range(state["position"]), *state["ahead"]]) and len(groups) == 18


def test_validation_names_what_it_measured(tiny: Path, tmp_path: Path) -> None:
    """miles #1740, OpenRLHF #1341: evaluation of weights that were changing, and a best one that was never measured."""
    words = [
        "data.validation_split=0.5",
        "validation.every=1",
        "rollout.max_staleness=1",
        "rollout.prompts=2",
        "steps=3",
    ]
    run(tiny, tmp_path, *words, "checkpoint.every=1", "checkpoint.keep_last=0", reward=any_a)
    rows = log(tmp_path, "validation")
    assert [r["version"] for r in rows] == [0, 1, 2, 3] and len({r["weights"] for r in rows}) == 4
    assert len({(r["data"], r["seed"], r["n"]) for r in rows}) == 1 and len(rows[0]["data"]) == 32
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    best = max(rows, key=lambda r: (r["validation/all/score"], -r["step"]))
    assert summary["best"] == best["validation/all/score"]


def test_the_first_to_finish_are_taken(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, *UNEVEN, "steps=3", "rollout.oversample=3", "rollout.max_staleness=1")
    records = log(tmp_path, "rollouts")
    groups = Counter(r["group"] for r in records)
    assert set(groups.values()) == {4} and not audit(tmp_path / "run").problems


def test_a_ledger_survives_a_torn_line(tiny: Path, tmp_path: Path) -> None:
    words = [*UNEVEN, "rollout.max_staleness=1", "checkpoint.every=1"]
    run(tiny, tmp_path, *words, "steps=2")
    path = tmp_path / "run" / FILE
    path.write_bytes(path.read_bytes() + b'{"life":1,"event":"sam')  # the machine went down
    run(tiny, tmp_path, *words, "steps=4")
    found = audit(tmp_path / "run")
    assert not found.problems and found.lives == 2


def test_a_ledger_that_does_not_close_says_where(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, *UNEVEN, "steps=2")
    path = tmp_path / "run" / FILE
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    settled = next(r for r in rows if r["event"] == "settled")
    path.write_text("\n".join(json.dumps(r) for r in [*rows, settled]) + "\n")
    assert any("group 0" in p for p in audit(tmp_path / "run").problems)
    first = next(r for r in rows if r["event"] == "sampled")
    first["tokens"] += 1
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert any("group 0 sampled" in p for p in audit(tmp_path / "run").problems)


LIES = {
    "constant": lambda c: replace(c, logprobs=(-1.0,) * len(c.ids)),
    "shifted": lambda c: replace(c, logprobs=tuple(p - 2 for p in c.logprobs.tolist())),
    "infinite": lambda c: replace(c, logprobs=(*c.logprobs.tolist()[:-1], math.inf)),
    "lowest": lambda c: replace(c, logprobs=(*c.logprobs.tolist()[:-1], -math.inf)),
    "positive": lambda c: replace(c, logprobs=tuple(-p for p in c.logprobs.tolist())),
    "nan": lambda c: replace(c, logprobs=(math.nan, *c.logprobs.tolist()[1:])),
    "replaced": lambda c: replace(c, tokens=tuple((t + 7) % 60 + 5 for t in c.ids)),
}


@pytest.mark.parametrize("lie", [*LIES, "late"])
def test_wrong_log_probs_stop_an_asynchronous_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Its steps train on answers of versions before: those are compared under the weights that sampled them. `late`:
    log-probs are wrong where the weights have changed before the answer is there."""
    honest = EmbeddedEngine.generate

    async def generate(self: Any, *words: Any) -> Any:
        found = await honest(self, *words)
        if lie != "late":
            return LIES[lie](found)
        return replace(
            found,
            logprobs=tuple(
                p - 2 * (v < self.version)
                for p, v in zip(found.logprobs.tolist(), found.versions.tolist(), strict=True)
            ),
        )

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    cause = (
        "does not sample from the weights" if lie in ("constant", "shifted", "replaced", "late") else "the log-prob of"
    )

    def any_number(completions: list[str], **_: object) -> list[float]:
        return [float(i % 2) for i, _ in enumerate(completions)]

    words = ("steps=6", "rollout.max_staleness=2", "learner.max_logprob_gap=0.01")
    with pytest.raises(BirlError, match=cause):
        run(tiny, tmp_path, *UNEVEN, *words, reward=any_number)
