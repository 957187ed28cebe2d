"""The times of the parts, out of the folder of a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from birl.errors import BirlError
from birl.plan import sweep
from birl.plan.run_figures import decoding_steps, from_run, nonnegative
from birl.plan.simulate_command import read


def a_run(folder: Path, steps: int = 12, size: int = 4, prompts: int = 2, machines: int = 1) -> Path:
    """As `birl rl` writes it, with engines of known speed: 0.02 s a decoding step + 0.001 s a token + a prompt token in
    0.0005 s; training 0.3 s + 0.002 s a token."""
    folder.mkdir()
    random = np.random.default_rng(0)
    config = {"rollout.prompts": prompts, "rollout.group_size": size, "rollout.max_tokens": 50, "engine.max_batch": 64}
    (folder / "config.json").write_text(json.dumps(config | {"rollout.max_staleness": 0}))
    metrics, rollouts = [], []
    for step in range(1, steps + 1):
        prompt, lengths = int(random.integers(5, 30)), random.integers(5, 50, (prompts, size))
        trained = int(lengths.sum()) + prompt * prompts * size
        generate = 0.02 * int(lengths.max()) + (0.001 * int(lengths.sum()) + 0.0005 * prompt * prompts) / machines
        train = 0.3 + 0.002 * trained
        disturbed = 30 * (step == 5)
        metrics.append(
            {"step": step, "tokens/generated": int(lengths.sum()), "tokens/trained": trained, "time/train": train}
            | {"time/generate": generate + disturbed, "time/reward": 0.1, "time/validate": 2.0, "time/checkpoint": 1.0}
            | {"time/step": generate + disturbed + train + 3.1, "length/max": int(lengths.max())}
            | {"length/mean": float(lengths.mean())}
        )
        for group, row in enumerate(lengths.tolist()):
            for n in row:
                sample = {"tokens": [1] * (prompt + n), "mask": [0] * prompt + [1] * n}
                rollouts.append({"step": step, "group": step * prompts + group, "samples": [sample]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    return folder


def test_the_figures_of_a_run_are_found(tmp_path: Path) -> None:
    found = read([str(a_run(tmp_path / "run"))])
    assert found.engine.base == pytest.approx(0.02) and found.engine.per_sequence == pytest.approx(0.001)
    assert found.engine.prefill == pytest.approx(2000)
    assert found.learner.constant == pytest.approx(0.3) and found.learner.per_token == pytest.approx(0.002)
    assert found.episodes.reward == (0.1, 0.1) and found.learner.trained == 1
    assert len(found.episodes.tokens) == 20  # the first step warms up, something else ran in the fifth
    assert "10 of 11 steps" in found.sources["engine.base"]
    compared = sweep.compare(replace(found, run=replace(found.run, steps=200)))
    assert abs(compared["off"]) < 0.05


def test_the_engines_and_gpus_of_a_run_are_its_own(tmp_path: Path) -> None:
    """What two engines did together is not what one does, and a learner of 8 GPUs is not one of a GPU."""
    folder = a_run(tmp_path / "run", machines=2)
    config = json.loads((folder / "config.json").read_text())
    own = {"engine.kind": "vllm", "engine.count": 2, "engine.tensor_parallel": 4, "parallel.fsdp": 4, "parallel.tp": 2}
    own |= {
        "rollout.max_staleness": 2,
        "rollout.order_window": 1,
        "weights.sync_every": 2,
        "engine.recompute_kv": False,
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    found = read([str(folder)])
    assert (found.engine.gpus, found.learner.gpus, found.run.gpus) == (4, 8, (16,))
    assert (found.result.engines, found.result.learners, found.result.shared) == (2, 1, False)
    assert (found.run.order_window, found.sync.every, found.engine.recompute_kv) == (1, 2, False)
    assert found.engine.base == pytest.approx(0.02) and found.engine.per_sequence == pytest.approx(0.001)
    (folder / "config.json").write_text(json.dumps(config | {"parallel.ddp": 2, "parallel.tp": 2}))
    found = read([str(folder)])
    assert (found.result.engines, found.engine.gpus, found.learner.gpus, found.result.shared) == (2, 2, 4, True)


def test_an_episode_without_an_answer_is_passed_over(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "group": 999, "samples": [{"tokens": [1, 2], "mask": [0, 0]}]}) + "\n")
    assert len(read([str(folder)]).episodes.tokens) == 20
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write("no JSON\n{")  # and a line that is being written
    with pytest.raises(BirlError, match=r"rollouts\.jsonl, line 98: not JSON"):
        read([str(folder)])


def test_a_word_may_be_long() -> None:
    answers = [100 + n for n in range(200)]
    assert len(read([f"episodes.tokens={answers}"]).episodes.tokens) == 200


def test_without_rollouts_it_says_what_it_assumes(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", steps=2)
    (folder / "rollouts.jsonl").unlink()
    found = read([str(folder)])
    assert found.sources["engine.table"].startswith("assumed") and "measured" in found.sources["learner.per_token"]
    assert found.sources["episodes.sigma"].startswith("assumed")


def test_decoding_steps_and_least_squares() -> None:
    assert decoding_steps([3, 1, 1], 2) == 3 and decoding_steps([2, 2, 2], 2) == 4
    columns = np.array([[1.0, 1], [1, 2], [1, 4]])
    assert nonnegative(columns, columns @ [2, 3])[0] == pytest.approx((2, 3))
    assert nonnegative(columns, np.array([4.0, 2, 1]))[0][1] == 0  # no time below 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rollouts.jsonl", "null"),
        ("rollouts.jsonl", '{"step": 2, "samples": [5], "group": 0}'),
        ("rollouts.jsonl", '{"step": [], "samples": [5]}'),
        ("metrics.jsonl", "null"),
        ("config.json", "[]"),
        ("config.json", "\0"),
    ],
)
def test_damage_names_the_file(tmp_path: Path, name: str, line: str) -> None:
    folder = a_run(tmp_path / "run")
    with (folder / name).open("w" if name == "config.json" else "a") as file:
        file.write(line + "\n")
    with pytest.raises(BirlError, match=name):
        from_run(folder)


def test_figures_of_another_type_are_refused(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    for wrong in ("4", None, []):
        (folder / "config.json").write_text(json.dumps({**config, "engine.max_batch": wrong}))
        with pytest.raises(BirlError, match=str(folder)):
            from_run(folder)
