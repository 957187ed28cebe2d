"""The first commands of the README and of the pages run as they are printed, on the model that is taken by default."""

import json
from pathlib import Path

import pytest

from birl.cli import main
from tests.docs.commands import QUIET, provide_data
from tests.docs.pages import ROOT, blocks, commands, scripts

#: (page, number of its shell block): what depends on the model's chat template, its size and its end token
FIRST = [("README.md", 2), ("README.md", 3), ("docs/agents.md", 1), ("docs/tools.md", 1)]
FEW = ("steps=1", "threads=1", "run=runs/here", *QUIET)
SMALL = {
    "rl": ("rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=8", "validation.every=0"),
    **dict.fromkeys(("sft", "dpo"), ("batch_size=2",)),
}


def first_commands() -> list:
    lines = []
    for page, number in FIRST:
        shell = [text for language, text in blocks(ROOT / page) if language in ("sh", "bash")]
        lines += [(page, words) for words in commands(shell[number - 1])]
    runs = [(page, words[1:]) for page, words in lines if words[0] == "birl" and words[1] in SMALL]
    elsewhere = ("parallel.", "rollout.max_staleness")  # several processes: tests/parallel, tests/train
    here = [(page, words) for page, words in runs if not any(word.startswith(elsewhere) for word in words)]
    return [pytest.param(page, words, id=f"{page}: {' '.join(words)}") for page, words in here]


@pytest.mark.parametrize(("page", "words"), first_commands())
def test_it_runs(page: str, words: list[str], smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "examples"):
        Path(name).symlink_to(ROOT / name)
    provide_data(words)
    for name, text in scripts(ROOT / page).items():
        Path(name).write_text(text)
    command, *rest = (word for word in words if not word.startswith("run="))
    assert main([command, *rest, *SMALL[command], *FEW]) == 0
    figures = json.loads(Path("runs/here/metrics.jsonl").read_bytes().splitlines()[-1])
    if command == "rl":
        assert figures["outcome/env_error"] == figures["outcome/engine_error"] == 0, figures
