"""The recipes that are in the repository: files that can be read, configurations that fit, curves that are theirs."""

import json
from pathlib import Path

import pytest

from birl.cli import main
from birl.config import file as configuration
from birl.config.load import load
from birl.config.schema import RL
from birl.recipes import recipe as shelf
from birl.recipes.attempt import Attempt
from birl.recipes.band import read_curve
from birl.recipes.recipe import read

ROOT = Path(__file__).parents[2]
FILES = {
    file.relative_to(ROOT / "recipes").as_posix().removesuffix(".expected.yaml"): file
    for file in sorted((ROOT / "recipes").rglob("*.expected.yaml"))
}
#: What the hub's config.json of these models says, as far as memory depends on it.
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_would_start(name: str, tmp_path: Path) -> None:
    recipe = read(FILES[name], name)
    Attempt(recipe=recipe, seed=0, folder=tmp_path).check()
    if name.startswith("gpu/"):
        assert recipe.not_run and "NOT RUN" in (ROOT / "recipes" / f"{name}.yaml").read_text()


def test_every_configuration_belongs_to_a_recipe() -> None:
    """So that `birl reproduce` lists it."""
    used = {stage.file for name, file in FILES.items() for stage in read(file, name).stages}
    there = {file for file in (ROOT / "recipes").rglob("*.yaml") if not file.name.endswith(".expected.yaml")}
    assert there == used - {None}


@pytest.mark.parametrize("name", FILES)
def test_what_is_expected_is_what_the_curves_say(name: str) -> None:
    """The committed curves and the values beside them are of the same runs."""
    folder, recipe = ROOT / "recipes" / name, read(FILES[name], name)
    commands = {stage.name: stage.command for stage in recipe.stages}
    for expected in recipe.expected:
        assert expected.step in ("first", "last"), "look it up in the curve, and say it here"
        if commands[expected.stage] in ("eval", "rm"):  # no curve is kept of them
            continue
        source = expected.metric.removeprefix("validation/").removesuffix("/score")
        column = "held_out" if source in ("all", "accuracy") else f"held_out/{source}"
        column = "reward" if expected.metric == "reward/mean" else column
        for seed, value in expected.values.items():
            curve = read_curve(folder / f"seed-{seed}.csv", column)
            assert curve[-1 if expected.step == "last" else 0][1] == pytest.approx(value, abs=6e-4), (name, seed)


def planned() -> list[str]:
    found = []
    for name in FILES:
        if name.startswith("gpu/") and [s.command for s in read(FILES[name], name).stages] == ["rl"]:
            keys = configuration.read(str(ROOT / "recipes" / f"{name}.yaml"))
            found += [name] if keys.get("model", keys.get("model.path")) in SHAPES else []
    return found


@pytest.mark.parametrize("name", planned())
def test_the_memory_of_a_gpu_recipe_is_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "recipes" / f"{name}.yaml")
    hidden, inner, layers, heads, keys, words, tied = SHAPES[load(RL, ["data.train=x", file]).model.path]
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    more = {"num_attention_heads": heads, "num_key_value_heads": keys, "max_position_embeddings": 32768}
    about = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **more, **about}))
    assert main(["plan", file, f"model.path={tmp_path}", "--memory", "80", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    billions = {1536: 1.54, 2048: 3.09, 3584: 7.62}[hidden]
    assert plan["parameters"] / 1e9 == pytest.approx(billions, abs=0.01) and plan["peak"] > 2 * plan["parameters"]


def test_the_table_of_recipes_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    page = (ROOT / "recipes" / "README.md").read_text()
    for name in FILES:
        assert f"{name}\n" in said
        assert f"[{name}]({name}.yaml)" in page or f"({name}.expected.yaml)" in page, name
    assert shelf.names() == FILES
