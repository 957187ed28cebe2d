"""Environments of other packages, each trained for a step through `birl rl` with a tiny model."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from birl.envs.adapters import openenv
from tests.envs.adapters.play import installed
from tests.envs.adapters.test_verifiers import ENVS
from tests.train.test_environments import run

SERVER = Path(__file__).parents[1] / "envs" / "adapters" / "word_server.py"

#: a model of random weights wins no game: what tells its episodes apart is how long their last answer is
DIFFER = ("reward=length", "reward.length_target=10")

KINDS = {
    "reasoning_gym": ("env.task=chain_sum", "env.rows=8", *DIFFER),
    "gem": ("env.task=game:GuessTheNumber-v0-easy", "env.max_turns=2", *DIFFER),
    "gem, cut": ("env.task=game:Minesweeper-v0-easy", "env.max_turns=1", *DIFFER),
    "verifiers": ("env.task=envs.py", "env.parameters=[kind=turns]"),
    "openenv": (f"env.command={sys.executable} {SERVER} --port {{port}} --sessions 3", *DIFFER),
    "gymnasium": ("env.id=FrozenLake-v1", "env.max_turns=3", "env.invalid_reward=-0.1", *DIFFER),
    "textarena": ("env.id=GuessTheNumber-v0", *DIFFER),
    "textarena_self_play": ("env.id=TruthAndDeception-v0", "env.max_turns=20", "algorithm.entropy_coef=0.01"),
}


@pytest.fixture(scope="module")
def long(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context that holds the rules of a game."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


def words(name: str) -> tuple[str, ...]:
    kind = name.partition(",")[0]
    if kind in ("gem", "reasoning_gym"):
        installed(kind)
    return (f"env={kind}", *KINDS[name], "steps=1", "model.max_length=3000")


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_trained(name: str, long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("envs.py").write_text(ENVS)
    processes = []
    begin = openenv.started

    def started(command: str) -> openenv.Server:
        server = begin(command)
        processes.append(server.process)
        return server

    monkeypatch.setattr(openenv, "started", started)
    episodes = run(long, tmp_path, *words(name))
    assert len(processes) == (name == "openenv") and all(process.poll() is not None for process in processes)
    assert len(episodes) == 8 and {e["outcome"] for e in episodes} <= {"ok", "truncated"}
    assert all(math.isfinite(e["reward"]) for e in episodes)
    (metrics,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines())
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0 and metrics["mismatch/mean"] < 1e-5
    if name == "textarena_self_play":
        assert {"reward/agent/player_0", "reward/agent/player_1"} <= metrics.keys()


@pytest.mark.parametrize("name", ["gem", "textarena_self_play"])
def test_the_same_seed_gives_the_same_run(name: str, long: Path, tmp_path: Path) -> None:
    """Games are played at once, in threads, and draw from global generators."""
    first, second = (run(long, tmp_path / folder, *words(name)) for folder in ("a", "b"))
    told = [[(e["text"], e["reward"], e["outcome"]) for e in episodes] for episodes in (first, second)]
    assert told[0] == told[1] and len({text for text, _, _ in told[0]}) > 1
