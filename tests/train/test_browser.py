"""`birl rl` and `birl eval` on MiniWoB++ with a tiny model, which knows nothing, and a real browser."""

import json
from pathlib import Path

from birl.cli import main
from birl.view.trajectory import picture
from tests.envs.browser.browsers import needs_browser, nothing_left

SMALL = (
    *("env=miniwob", "env.tasks=[click-test]", "env.workers=1", "env.describe=none", "env.max_turns=2"),
    *("env.validation_seeds=2", "model.max_length=500", "threads=1"),
)


@needs_browser
def test_a_run_plays_real_pages(tiny: Path, tmp_path: Path) -> None:
    words = ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=8", "steps=1", "validation.every=1")
    quiet = ("track.console=off", "track.tensorboard=false", "track.report=false")
    with nothing_left():
        assert main(["rl", *SMALL, *words, *quiet, f"model.path={tiny}", f"run={tmp_path}/run"]) == 0
    episodes = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_bytes().splitlines()]
    assert len(episodes) == 4 and {e["outcome"] for e in episodes} <= {"ok", "truncated"}
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()[-1])
    assert metrics["reward/invalid_actions"] > 0


@needs_browser
def test_pictures_are_in_the_run_folder_and_named_in_the_rollouts(tiny: Path, tmp_path: Path) -> None:
    words = ("rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=8", "steps=1", "env.screenshots=true")
    quiet = ("track.console=off", "track.tensorboard=false", "track.report=false")
    run = tmp_path / "run"
    assert main(["rl", *SMALL, *words, *quiet, f"model.path={tiny}", f"run={run}"]) == 0
    assert main(["rl", *SMALL, *words, *quiet, f"model.path={tiny}", f"run={run}", "steps=2"]) == 0
    episodes = [json.loads(line) for line in (run / "rollouts.jsonl").read_bytes().splitlines()]
    folders = [{str(Path(name).parent) for name in episode["pictures"]} for episode in episodes]
    assert [len(f) for f in folders] == [1, 1, 1, 1] and len(
        set.union(*folders)
    ) == 4  # the second start kept the first's
    for episode in episodes:
        assert all(name.startswith("screenshots/") for name in episode["pictures"])
        assert picture(run, episode, 0).read_bytes()[:4] == b"\x89PNG"


@needs_browser
def test_an_evaluation_says_it_by_task(tiny: Path, tmp_path: Path) -> None:
    words = (f"model.path={tiny}", "validation.max_tokens=4", f"output={tmp_path}/found.json")
    assert main(["eval", *SMALL, *words]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["metrics"]
    assert any("click-test" in name for name in found)
