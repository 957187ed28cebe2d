"""PPO's own loop: the critic learns, is checkpointed, waits where it should, and its figures are told."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import checkpoint, export, step_folders
from birl.learner.learner import Learner
from birl.models.load import load_model
from birl.named import Given
from birl.train.command import train
from tests.tiny import tiny_model_folder

SMALL = ("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=8", "optimizer.lr=3e-3", "threads=1")
QUIET = ("track.console=off", "track.tensorboard=false", "track.report=false", "model.dtype=float32")


def many_a(completions: list[str], **_: Any) -> list[float]:
    return [text.count("a") / max(1, len(text)) for text in completions]


def run(tiny: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    data = [{"prompt": f"What is {i} + 2?", "answer": "2"} for i in range(12)]
    given = ("data.train=[given]", "reward.functions=[given:reward]", f"model.path={tiny}", f"run={folder}/run")
    config = load(schema.RL, ["algorithm=ppo", *given, *SMALL, *QUIET, *words])
    train(config, given=Given(rewards=[many_a], train=data))
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_bytes().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = step_folders.latest(folder / "run/checkpoints")
    assert newest is not None
    return checkpoint.read_tensors(newest)


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_the_critic_learns_what_to_expect(tiny: Path, tmp_path: Path, critic: str) -> None:
    """With a policy that stays, the value of a state comes to be the mean reward. lr=0 keeps the policy, unless the
    backbone is shared."""
    words = ["critic.shared=true", "optimizer.lr=1e-3"] if critic == "shared" else ["critic.lr=3e-3", "optimizer.lr=0"]
    steps = run(tiny, tmp_path, *words, "steps=25", "critic.lam=1", "algorithm.kl_coef=0.0001")
    assert steps[-1]["critic/error"] < {"own": 0.5, "shared": 0.8}[critic] * steps[0]["critic/error"]
    assert abs(steps[-1]["critic/value"] - steps[-1]["reward/mean"]) < 0.06


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_a_run_in_pieces_is_the_same_run(tiny: Path, tmp_path: Path, critic: str) -> None:
    words = ["critic.shared=true"] if critic == "shared" else ["critic.lr=1e-3"]
    words += ["algorithm.updates_per_batch=2", "algorithm.kl_target=0.01", "algorithm.kl_horizon=50"]
    whole = run(tiny, tmp_path / "whole", *words, "steps=4")
    run(tiny, tmp_path / "parts", *words, "steps=2")
    parts = run(tiny, tmp_path / "parts", *words, "steps=4")
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(name.startswith("critic.model.score") for name in one) == (critic == "own")
    assert [m["kl/coef"] for m in whole] == [m["kl/coef"] for m in parts] != [whole[0]["kl/coef"]] * 4


def test_a_fixed_coefficient_of_the_kl_is_the_configurations(tiny: Path, tmp_path: Path) -> None:
    """With resume=FOLDER it was that of the checkpoint, whatever algorithm.kl_coef was."""
    run(tiny, tmp_path / "one", "algorithm.kl_coef=0.1", "steps=1")
    words = (f"resume={tmp_path}/one/run/checkpoints/step-000001", "algorithm.kl_coef=0.3", "steps=2")
    assert run(tiny, tmp_path / "other", *words)[-1]["kl/coef"] == 0.3


def test_a_frozen_policy_waits_for_its_critic(tiny: Path, tmp_path: Path) -> None:
    words = ("critic.freeze_steps=2", "critic.lr=1e-3", "optimizer.lr=0.01", "optimizer.schedule=linear")
    steps = run(tiny, tmp_path, *words, "steps=4")
    assert [m["updates/done"] for m in steps] == [0, 0, 1, 1]
    assert [m["lr"] for m in steps[2:]] == [0.01, 0.005]  # the schedule is that of its own two updates
    assert steps[1]["kl"] is None if "kl" in steps[1] else True
    assert all(m["critic/grad_norm"] > 0 for m in steps)


def test_a_critic_alone_aims_at_what_answers_earned(tiny: Path, tmp_path: Path) -> None:
    """Whatever lambda is: values of a head that is new would be its own target."""
    words = ("critic.freeze_steps=2", "critic.lr=1e-3", "steps=3")
    near, far = ([m["critic/error"] for m in run(tiny, tmp_path / n, f"critic.lam={n}", *words)] for n in ("0.1", "1"))
    assert near[:2] == far[:2] and near[2] != far[2]


def test_single_rollouts_with_a_critic_whose_attention_stays(tiny: Path, tmp_path: Path) -> None:
    words = ["algorithm=sao", "algorithm.kl_coef=0", "rollout.group_size=1", "critic.lam_alpha=0.05", "critic.passes=2"]
    for name, own in (("frozen", ["critic.freeze_attention=true"]), ("moving", [])):
        (step,) = run(tiny, tmp_path / name, *words, *own, "critic.lr=1e-3", "steps=1")
        assert step["critic/grad_norm"] > 0 and step["updates/done"] == 1
    frozen, moving = tensors(tmp_path / "frozen"), tensors(tmp_path / "moving")
    whole = Learner(load_model(tiny), dtype=torch.float32).tensors()
    first = {n: t for n, t in whole.items() if n.startswith("model.")}
    kept = {n for n, t in first.items() if f"critic.{n}" in frozen and torch.equal(frozen[f"critic.{n}"], t)}
    assert {n for n in first if "self_attn" in n} <= kept and not any("mlp" in n for n in kept)
    assert not any(torch.equal(moving[f"critic.{n}"], t) for n, t in first.items() if "self_attn" in n)


def test_the_first_update_of_a_batch_has_ratios_of_one(tiny: Path, tmp_path: Path) -> None:
    steps = run(tiny, tmp_path, "steps=2", "critic.lr=1e-3")
    assert all(m["ratio/max"] == pytest.approx(1, abs=1e-4) and m["clip_fraction"] == 0 for m in steps)


@pytest.mark.parametrize("whose", ["the policy's", "the critic's"])
def test_gradients_that_are_not_finite_stop_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Though those of the other model are."""
    step, rate = Learner.optim_step, {"the policy's": 3e-3, "the critic's": 1e-3}[whose]

    def broken(self: Learner, lr: float) -> float:
        norm = step(self, lr)
        return math.nan if lr == rate else norm

    monkeypatch.setattr(Learner, "optim_step", broken)
    with pytest.raises(BirlError, match="not finite 3 optimizer steps in a row"):
        run(tiny, tmp_path, "critic.lr=1e-3", "steps=4")
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["updates/nonfinite"] for line in metrics] == [1, 1]


def test_a_shared_critic_is_not_exported(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "critic.shared=true", "steps=1")
    newest = step_folders.latest(tmp_path / "run/checkpoints")
    assert newest is not None
    export.export(newest, tmp_path / "run", tmp_path / "out", torch.float32)
    from birl.models.load import load_model

    assert not hasattr(load_model(tmp_path / "out"), "value")


def test_a_critic_of_another_family_is_refused(tiny: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    other = tiny_model_folder(tmp_path / "other")
    tiny_tokenizer(vocab=300).save_pretrained(other)
    with pytest.raises(BirlError, match=r"critic\.path=.*has another vocabulary"):
        run(tiny, tmp_path, f"critic.path={other}", "steps=1")


def test_a_lora_critic_and_policy(tiny: Path, tmp_path: Path) -> None:
    steps = run(tiny, tmp_path, "lora.rank=4", "critic.lr=1e-2", "optimizer.lr=1e-2", "steps=3")
    assert steps[-1]["critic/error"] == steps[-1]["critic/error"]
    names = tensors(tmp_path).keys()
    assert "critic.model.score.weight" in names and not any(n.endswith("q_proj.weight") for n in names)
