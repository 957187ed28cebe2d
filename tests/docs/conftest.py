import json
from pathlib import Path

import pytest

from birl.cli import main
from tests.docs.commands import ABOUT, AHEAD, CHOSEN, ROWS, Figures, small
from tests.docs.pages import jsonl


@pytest.fixture(scope="session")
def demo(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with a validation, a reference and a checkpoint."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "my.jsonl").write_text(jsonl(ROWS))
    words = [f"data.train={folder}/my.jsonl", f"data.validation={folder}/my.jsonl", "algorithm.kl_coef=0.01"]
    assert (
        main(["rl", *words, *small("rl", words, tiny), "reward=length", "validation.every=1", f"run={folder}/run"]) == 0
    )
    return folder / "run"


@pytest.fixture(scope="session")
def figures(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What metrics.jsonl and validation.jsonl hold, by the command that wrote them."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "my.jsonl").write_text(jsonl(ROWS))
    ppo = "algorithm=ppo algorithm.entropy_control=kl_cov algorithm.reject=divergence reward=length"
    found: Figures = {}
    for line in ("sft", "rm", "dpo", "dpo preference.loss=kto", f"rl {ppo} reward.length_target=8", AHEAD, CHOSEN):
        command, *words = line.split()
        run = folder / str(len(found))
        words += [f"data.train={folder}/my.jsonl", f"data.validation={folder}/my.jsonl", f"run={run}"]
        assert main([command, *words, *small(command, words, tiny)]) == 0, line
        logs = [json.loads((run / f"{log}.jsonl").read_bytes().splitlines()[-1]) for log in ("metrics", "validation")]
        metrics, validation = ({k for k in log if k not in (*ABOUT, "samples")} for log in logs)
        found[line] = metrics, validation
    return found
