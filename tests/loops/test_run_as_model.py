"""A run folder is a model wherever a model is named."""

from pathlib import Path

import pytest

from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner.export import resolved
from birl.loops.run_folder import chosen_checkpoint


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of SFT."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rows.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n' * 4)
    words = [f"model.path={tiny}", f"data.train={folder}/rows.jsonl", f"run={folder}/run", "steps=1", "batch_size=2"]
    assert main(["sft", *words, "threads=1", "track.console=off", "track.tensorboard=false"]) == 0
    return folder / "run"


def test_a_run_is_a_model_everywhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = run / "export" / "step-000001"
    rows = f"data.validation={run.parent}/rows.jsonl"
    assert main(["eval", str(run), rows, "validation.max_tokens=4", "threads=1"]) == 0
    assert f"Exporting {run}/checkpoints/step-000001" in capsys.readouterr().out
    for name in (run, run / "checkpoints" / "step-000001"):
        assert resolved(str(name)) == export
    assert "Exporting" not in capsys.readouterr().out, "it is made once"
    assert load(schema.Serve, [str(run)]).model.path == load(schema.Serve, [f"model={run}"]).model.path == str(run)
    assert load(schema.RL, [f"model={run}", rows.replace("validation", "train", 1)]).model.path == str(run)
    assert chosen_checkpoint(run, run, None) == run / "checkpoints" / "step-000001"


@pytest.mark.parametrize(
    ("kind", "said"), [(schema.Eval, "birl eval {} data.validation="), (schema.Serve, "birl serve {}")]
)
def test_its_configuration_is_no_configuration_of_another_command(run: Path, kind: type, said: str) -> None:
    with pytest.raises(BirlError) as error:
        load(kind, [f"{run}/config.yaml"])
    assert said.format(run) in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BirlError, match="has no checkpoint yet"):
        resolved(str(tmp_path))
