"""`algorithm.observation_coef` in whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from tests.train import test_environments as environments

WORLD = """
from birl.types import Feedback, Message

class World:
    '''Always answers alike, whatever is said, and gives everyone the same.'''
    def __init__(self, task):
        self.turn = 0
    async def start(self):
        return (Message(role="user", content="Go."),)
    async def step(self, reply):
        self.turn += 1
        return Feedback(messages=(Message(role="user", content="You are in a maze."),), reward=1.0, done=self.turn == 3)
    async def close(self):
        pass
"""


def run(tiny: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "world.py").write_text(WORLD)
    (folder / "rows.jsonl").write_text('{"prompt": "Go."}\n' * 4)
    own = (f"env={folder}/world.py:World", f"data.train={folder}/rows.jsonl", "rollout.truncated=drop")
    own += ("rollout.max_tokens=40", "rollout.stop=[a,e,i,o,u,n,t,s,r]")  # a random model does not end its answers
    environments.run(tiny, folder, *own, *words)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_bytes().splitlines()]


def test_a_policy_learns_its_world_where_no_reward_differs(tiny: Path, tmp_path: Path) -> None:
    metrics = run(tiny, tmp_path, "algorithm=echo", "algorithm.observation_coef=1", "steps=10")
    losses = [m["observations/loss"] for m in metrics]
    assert losses[-1] < 0.5 * losses[0] and all(m["groups/no_signal"] == 2 for m in metrics)
    assert all(m["updates/done"] == 1 and m["mismatch/mean"] < 1e-5 for m in metrics)


def test_without_the_key_nothing_is_predicted(tiny: Path, tmp_path: Path) -> None:
    (step,) = run(tiny, tmp_path, "steps=1")
    assert "observations/loss" not in step and step["updates/skipped"] == 1


@pytest.mark.parametrize("words", [("learner.tokens_per_microbatch=400",), ("parallel.fsdp=2",), ("parallel.cp=2",)])
@pytest.mark.usefixtures("forking")
def test_micro_batches_and_ranks_change_nothing(tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    one, many = (run(tiny, tmp_path / n, "algorithm=echo", "steps=1", *w)[0] for n, w in (("one", ()), ("many", words)))
    for figure in ("loss", "grad_norm", "observations/loss", "tokens/learned"):
        assert many[figure] == pytest.approx(one[figure], rel=2e-4), figure


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "env=single_turn has no observations"),
        (("env=guess_number", "algorithm.teacher=x", "algorithm.teacher_divergence=jsd"), "cannot be combined with"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(BirlError, match=message):
        load(schema.RL, ["data.train=x", "algorithm=echo", *words])
