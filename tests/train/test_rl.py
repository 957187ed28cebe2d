"""The loop with a tiny model: it learns, and everything it writes can be trusted."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from birl import kernels
from birl.config import schema
from birl.config.keys import presets
from birl.engine.engine import EmbeddedEngine
from birl.errors import BirlError
from birl.learner import step_folders
from birl.learner.learner import Learner
from birl.named import Given
from birl.train import build_worker, rl
from birl.train.command import train
from tests.tiny import tiny_moe_folder
from tests.train.trainers import small

OUTCOMES = ("ok", "truncated", "env_error", "engine_error", "timeout", "aborted")


def many_a(completions: list[str], **_: Any) -> list[float]:
    """Dense enough that a random model learns it in a few steps."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def sparse(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(a == "1" and "a" in text) for text, a in zip(completions, answer, strict=True)]


def run(tiny: Path, folder: Path, *words: str, reward: Any = many_a, rows: int = 12) -> dict[str, Any]:
    data = [{"prompt": f"What is {i} + 2?", "answer": str(i % 2)} for i in range(rows)]
    config = small(tiny, folder, "data.train=[given]", "reward.functions=[given:reward]", *words)
    return train(config, given=Given(rewards=[reward], train=data))


def log(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_bytes().splitlines()]


def any_a(completions: list[str], **_: Any) -> list[float]:
    return [float("a" in text) for text in completions]


# those with a teacher: test_teacher.py, test_self_distillation.py; with several turns: test_observations.py
PRESETS = sorted(presets(schema.RL)["algorithm"].keys() - {"distill", "echo", "opsd", "sdft", "sdpo"})
#: each part of theirs learns in another preset, and has its reference in tests/algorithms
ALIKE = {"bnpo", "clip_cov", "gdpo", "gmpo", "lite_ppo", "maxrl", "reinforce", "reinforce_pp_baseline"}
SETTINGS = {  # what a toy needs: its KL is large from the first steps on
    "ppo": ("algorithm.kl_coef=0", "algorithm.kl=k3", "algorithm.kl_in=loss", "critic.lr=3e-3", "critic.lam=1"),
    "rloo": ("algorithm.kl_coef=0.002",),
    "reinforce_pp": ("algorithm.kl_coef=0.002",),
    "top_entropy": ("steps=60",),
    "dapo": ("steps=25",),  # later, all groups are right: no signal, which it refuses
}


@pytest.mark.parametrize("preset", sorted({*PRESETS} - ALIKE))
def test_the_reward_rises(tiny: Path, tmp_path: Path, preset: str) -> None:
    words = (f"algorithm={preset}", "algorithm.overlong_buffer=0", "steps=40", "rollout.group_size=8")
    run(tiny, tmp_path, *words, *SETTINGS.get(preset, ()), reward=any_a if preset == "pass_at_k" else many_a)
    rewards = [m["reward/mean"] for m in log(tmp_path)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


@pytest.mark.parametrize("preset", [*PRESETS, "shared critic"])
def test_micro_batches_change_nothing(tiny: Path, tmp_path: Path, preset: str) -> None:
    """Masks, ranks and means are those of the whole step, whatever it is cut into."""
    words = [f"algorithm={preset}", "algorithm.overlong_buffer=0"]
    if preset == "shared critic":
        words = ["algorithm=ppo", "critic.shared=true"]
    if preset not in ("reinforce", "rloo", "remax", "opo", "maxrl"):
        words.append("algorithm.updates_per_batch=2")
    if preset in ("clip_cov", "kl_cov"):
        words.append("algorithm.entropy_share=0.1")
    if preset == "pass_at_k":
        words.append("rollout.group_size=8")
    reward = any_a if preset == "pass_at_k" else many_a
    for name, size in (("one", 4096), ("many", 120)):
        more = (f"learner.tokens_per_microbatch={size}", "steps=1")
        run(tiny, tmp_path / name, *words, *more, reward=reward)
    one, many = log(tmp_path / "one")[0], log(tmp_path / "many")[0]
    for figure in ("loss", "grad_norm", "entropy", "reward/mean"):
        assert one[figure] == pytest.approx(many[figure], rel=2e-4, abs=1e-6), figure


def test_tokens_of_the_same_weights_are_not_held_back(plain: Path, tmp_path: Path) -> None:
    """Engine and learner differ by rounding alone, whose sign once gave every held token the whole penalty (KL-Cov)."""
    for coef in (0, 10):
        words = ("algorithm=kl_cov", "algorithm.entropy_share=0.5", f"algorithm.held_coef={coef}", "steps=1")
        run(plain, tmp_path / str(coef), *words)
    without, held = (log(tmp_path / str(coef))[0] for coef in (0, 10))
    assert held["mismatch/mean"] > 0 and held["held"] > 0.4
    assert held["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-6)


def test_a_validation_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else fails meanwhile: no episode is left that asks engines which are being closed."""
    ended: list[str] = []

    async def validating(*_: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("validation")

    async def main() -> None:
        side, tracker = SimpleNamespace(version=0), SimpleNamespace(phase=lambda text: None)
        parts = SimpleNamespace(plan_validation=1, validation_rollout=1, engine=side, tracker=tracker)
        run, worker = SimpleNamespace(stop=asyncio.Event()), SimpleNamespace(learner=side)
        loop: Any = SimpleNamespace(parts=parts, run=run, worker=worker)
        task = asyncio.create_task(rl.Loop.validate(loop))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        assert ended == ["validation"]

    monkeypatch.setattr(rl, "evaluate", validating)
    asyncio.run(main())


def test_a_run_whose_last_validation_is_cut_short_is_not_finished(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had exit code 0, and a report without that validation."""

    async def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    words = ("steps=1", "data.validation_split=0.5", "validation.every=5", "validation.at_start=false")
    with monkeypatch.context() as patch:
        patch.setattr(rl, "evaluate", interrupted)
        summary = run(tiny, tmp_path, *words)
    assert not summary["finished"] and summary["signal"] == signal.SIGINT and summary["after"] is None
    summary = run(tiny, tmp_path, *words)
    assert summary["finished"] and summary["after"]["step"] == 1


def test_counts_close_at_every_step(tiny: Path, tmp_path: Path) -> None:
    def sometimes(completions: list[str], **_: Any) -> list[float]:
        if any(len(text) % 3 == 0 for text in completions):
            raise ValueError("not today")
        return many_a(completions)

    run(tiny, tmp_path, "steps=6", "rollout.max_failure_rate=1.0", reward=sometimes)
    records = log(tmp_path, "rollouts")
    for step in log(tmp_path):
        mine = [r for r in records if r["step"] == step["step"]]
        assert step["outcome/asked"] == sum(step[f"outcome/{o}"] for o in OUTCOMES) == len(mine) == 16
        for outcome in OUTCOMES:
            assert step[f"outcome/{outcome}"] == sum(r["outcome"] == outcome for r in mine)
        assert step["tokens/generated"] == sum(sum(s["mask"]) for r in mine for s in r["samples"])
    assert any(r["outcome"] == "env_error" and r["reward"] is None and r["advantage"] is None for r in records)


def test_what_is_trained_is_what_was_sampled(tiny: Path, tmp_path: Path) -> None:
    """Engine log-probs equal the learner's at the moment of the first update, in the loop itself."""
    run(tiny, tmp_path, "steps=4", "rollout.temperature=0.7")
    for step in log(tmp_path):
        if kernels.problem():
            assert step["mismatch/mean"] < 1e-5 and abs(step["ratio/max"] - 1) < 1e-4
        else:
            assert step["mismatch/mean"] == 0 and step["ratio/max"] == 1
        assert step["staleness/max"] == 0


def test_an_engine_with_other_weights_stops_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build_worker.make_learner

    def other_temperature(config: schema.RL, *rest: Any, **options: Any) -> Any:
        learner = plain(config, *rest, **options)
        learner.outputs.temperature = 5.0
        return learner

    monkeypatch.setattr(build_worker, "make_learner", other_temperature)
    with pytest.raises(BirlError, match="does not sample from the weights"):
        run(tiny, tmp_path)


def test_an_engine_that_is_a_hundredth_of_a_nat_off_stops_a_run_in_float32(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = EmbeddedEngine.generate

    async def shifted(self: EmbeddedEngine, *args: Any) -> Any:
        found = await sampled(self, *args)
        return replace(found, logprobs=tuple(x - 0.01 for x in found.logprobs))

    monkeypatch.setattr(EmbeddedEngine, "generate", shifted)
    with pytest.raises(BirlError, match=r"by 0\.01 nats a token on average; learner\.max_logprob_gap=0\.002"):
        run(tiny, tmp_path, "model.dtype=float32")


def test_groups_without_signal_are_replaced_counted_and_bounded(tiny: Path, tmp_path: Path) -> None:
    words = ("algorithm.dynamic_sampling=true", "rollout.group_size=8", "rollout.max_tokens=6", "steps=3")
    run(tiny, tmp_path, *words, "algorithm.max_refill=20", reward=sparse, rows=40)
    for step in log(tmp_path):
        assert step["groups/kept"] == 4 and step["groups/refilled"] >= 1
        assert step["groups/no_signal"] == step["groups/refilled"]
    refused = [r for r in log(tmp_path, "rollouts") if r["advantage"] is None]
    assert refused and all(r["reward"] is not None for r in refused)


def test_a_step_that_finds_too_few_groups_is_trained_and_the_next_one_is_fresh(tiny: Path, tmp_path: Path) -> None:
    """The groups that were begun in the place of its last refused ones were of older weights than the bound allows: the
    next step ended the run."""
    words = ("algorithm.dynamic_sampling=true", "algorithm.max_refill=0.3", "steps=6")
    run(tiny, tmp_path, *words, reward=sparse, rows=40)
    steps = log(tmp_path)
    assert any(0 < s["groups/kept"] < 4 and s["updates/done"] for s in steps[:-1])
    assert [s["staleness/max"] for s in steps if s["tokens/trained"]] == [0] * sum(
        bool(s["tokens/trained"]) for s in steps
    )


def test_a_reference_is_the_first_policy(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "algorithm.kl_coef=0.1", "steps=4")
    kl = [m["kl"] for m in log(tmp_path)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-4


def test_several_updates_leave_the_policy_behind(plain: Path, tmp_path: Path) -> None:
    # with an entropy bonus every group has a gradient, whatever its rewards
    run(plain, tmp_path, "algorithm.updates_per_batch=4", "algorithm.entropy_coef=0.001", "steps=2")
    last = log(tmp_path)[-1]
    assert last["updates/done"] == 4 and last["ratio/max"] > 1.01
    assert step_folders.read_state(step_folders.saved(tmp_path / "run" / "checkpoints")[-1].path)["version"] == 8


def test_the_run_folder_tells_the_whole_story(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "What is 1 + 2?", "answer": "3"}]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("validation.every=1", "track.report=true", "track.tensorboard=true")
    summary = run(tiny, tmp_path, f"data.validation={tmp_path}/held.jsonl", *words)
    folder = tmp_path / "run"
    names = {p.name for p in folder.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "rollouts.jsonl",
        "validation.jsonl",
        "summary.json",
        "report.html",
    } <= names
    assert list((folder / "tensorboard").iterdir())
    assert summary["finished"] and summary["step"] == 2
    assert [v["step"] for v in log(tmp_path, "validation")] == [0, 1, 2]
    assert "<script src" not in (folder / "report.html").read_text()


def test_dry_run_writes_nothing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(tiny, tmp_path, "data.train=[given]", "reward.functions=[given:reward]")
    train(config, dry_run=True, given=Given(rewards=[many_a], train=[{"prompt": "hello\nyou", "answer": "1"}]))
    said = capsys.readouterr().out
    assert "First prompt (train, row 1, answer '1'):" in said and "hello\n  you" in said and "GiB" in said
    assert not (tmp_path / "run").exists()


def test_the_proximal_policy_stays_for_all_updates_of_a_batch(plain: Path, tmp_path: Path) -> None:
    """Decoupled PPO: recomputed before every update, the ratios would be 1 and the clip could never act."""
    run(plain, tmp_path, "algorithm=decoupled", "algorithm.updates_per_batch=4", "optimizer.lr=0.01", "steps=2")
    last = log(tmp_path)[-1]
    assert last["ratio/max"] > 1.2 and last["clip_fraction"] > 0


def test_more_epochs_for_a_finished_run(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last step was short, so the second epoch takes two more steps, not one."""
    for epochs in (1, 2):
        words = ("steps=0", f"epochs={epochs}", "rollout.prompts=2", "track.console=plain", "optimizer.schedule=linear")
        run(tiny, tmp_path, *words, rows=3)
    steps = log(tmp_path)
    assert len(steps) == 4 and steps[-1]["lr"] > 0 and "birl: run: 4 steps" in "".join(capsys.readouterr())


def test_passes_over_a_batch_are_updates(plain: Path, tmp_path: Path) -> None:
    run(plain, tmp_path, "algorithm.updates_per_batch=2", "algorithm.passes=3", "optimizer.schedule=linear", "steps=2")
    steps = log(tmp_path)
    assert [m["updates/done"] for m in steps] == [6, 6] and steps[-1]["lr"] == pytest.approx(steps[0]["lr"] * 1 / 7)


def test_the_reference_is_asked_once_for_all_passes(plain: Path, tmp_path: Path, monkeypatch) -> None:
    """No update moves it: three passes over two parts ask it of two."""
    asked: list[int] = []
    forward = Learner.forward
    monkeypatch.setattr(Learner, "forward", lambda self, own: (asked.append(len(own.tokens)), forward(self, own))[1])
    for passes in (1, 3):
        words = (f"algorithm.passes={passes}", "algorithm.updates_per_batch=2", "algorithm.kl_coef=0.1", "steps=1")
        run(plain, tmp_path / str(passes), *words)
    assert asked[:2] == asked[2:] and log(tmp_path / "3")[0]["updates/done"] == 6


SURROGATES = {
    "tensor": ("-(logp - old_logp).exp() * advantages", ""),
    "one number": ("(-logp * advantages).mean()", r"must give the loss of each of \d+ tokens"),
    "words": ("'loss'", r"must give the loss of each of \d+ tokens"),
    "no tensor": ("logp[10**6]", r"mine\.py:loss: it failed: \S*mine\.py:2: IndexError"),
    "no gradient": ("-logp.detach() * advantages", r"mine\.py:loss: its loss has no gradient"),
    "no backward": (
        "Bad.apply(logp) * advantages",
        r"mine\.py:loss: the backward pass failed: \S*mine\.py:7: ZeroDivisionError: division by zero",
    ),
    "changed in place": (
        "(lambda e: (e * advantages.exp(), e.mul_(2))[0])(logp.exp())",
        r"mine\.py:loss: the backward pass failed: .*modified by an inplace operation",
    ),
    "one ratio": ("Surrogate(-logp * advantages, logp[:1], logp > 0)", r"not shapes \(\d+,\), \(1,\), \(\d+,\)"),
}


@pytest.mark.parametrize("kind", SURROGATES)
def test_a_surrogate_of_ones_own(tiny: Path, tmp_path: Path, kind: str) -> None:
    value, message = SURROGATES[kind]
    text = "from birl.algorithms.surrogates import Surrogate\ndef loss(logp, old_logp, advantages, sample): return "
    bad = "\nimport torch\nclass Bad(torch.autograd.Function):\n    forward = staticmethod(lambda ctx, x: x + 0)"
    bad += "\n    @staticmethod\n    def backward(ctx, grad): return grad * (1 / 0)\n"
    (tmp_path / "mine.py").write_text(text + value + bad)
    words = (f"algorithm.surrogate={tmp_path}/mine.py:loss", "steps=1")
    if message:
        with pytest.raises(BirlError, match=message):
            run(tiny, tmp_path, *words)
    else:
        run(tiny, tmp_path / "mine", *words)
        run(tiny, tmp_path / "own", "algorithm.surrogate=importance", "steps=1")
        assert log(tmp_path / "mine")[0]["grad_norm"] == log(tmp_path / "own")[0]["grad_norm"]


@pytest.mark.parametrize("kind", ["own", "experts"])
def test_answers_with_advantage_0_are_computed_where_they_may_have_a_gradient(
    tiny: Path, tmp_path: Path, kind: str
) -> None:
    """Of a user's surrogate, and of the balance of experts, which is that of the whole step. They were left out."""
    (tmp_path / "mine.py").write_text(
        "def loss(logp, old_logp, advantages, sample, *, entropy): return -logp * advantages - 0.1 * entropy"
    )
    own, words = kind == "own", [f"algorithm.surrogate={tmp_path}/mine.py:loss"]
    model = tiny if own else tiny_moe_folder(tmp_path / "moe")
    for n, reward in enumerate((many_a, lambda completions, **_: [1.0] * len(completions))):
        run(model, tmp_path / str(n), *(words if own else ["learner.router_aux_coef=0.5"]), "steps=1", reward=reward)
    some, none = log(tmp_path / "0")[0], log(tmp_path / "1")[0]
    assert none["updates/done"] == 1 and none["grad_norm"] > 0
    assert none["tokens/computed"] == some["tokens/computed"]
    assert own or none["router/balance"] == pytest.approx(some["router/balance"], rel=1e-6)


def test_one_update_needs_no_second_look_at_the_proximal_policy(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a batch has one update, the learner's log-probs in it are those before it: nothing is computed twice."""
    sampled, forward, looks = EmbeddedEngine.generate, Learner.forward, []

    async def older(self: EmbeddedEngine, *args: Any) -> Any:
        """As if older weights had sampled."""
        found = await sampled(self, *args)
        return replace(found, logprobs=tuple(x - 0.3 * (i % 3) for i, x in enumerate(found.logprobs)))

    monkeypatch.setattr(EmbeddedEngine, "generate", older)
    monkeypatch.setattr(Learner, "forward", lambda self, batch: looks.append(1) or forward(self, batch))
    words = ("algorithm=decoupled", "learner.max_logprob_gap=2", "steps=3")
    run(tiny, tmp_path / "once", *words)
    assert not looks
    monkeypatch.setattr(build_worker, "remembers", lambda config: True)
    run(tiny, tmp_path / "twice", *words)
    assert looks
    for once, twice in zip(log(tmp_path / "once"), log(tmp_path / "twice"), strict=True):
        for figure in ("loss", "grad_norm", "factor", "ratio/mean"):
            assert once.get(figure) == pytest.approx(twice.get(figure), rel=1e-5), figure
        assert once["ratio/mean"] == pytest.approx(1)
