"""Reading `NAME.expected.yaml`, and comparing figures with it."""

from pathlib import Path

import pytest

from birl.errors import BirlError
from birl.recipes.band import compare, read_curve
from birl.recipes.recipe import Expectation, read

GOOD = """
about: a test
hardware: anything
minutes: 0.1
stages:
  - {command: sft, file: texts.yaml}
  - {command: rl, name: learn, words: ["model.path={sft}"]}
expect:
  - {metric: validation/all/score, values: {0: 0.9, 2: 0.8}, tolerance: 0.05}
  - {metric: reward/mean, curve: "curves/seed-{seed}.csv", column: reward, window: 2, tolerance: 0.1}
"""


def written(folder: Path, text: str) -> Path:
    (folder / "curves").mkdir(exist_ok=True)
    (folder / "texts.yaml").touch()
    (folder / "curves" / "seed-0.csv").write_text("step,reward\n0,\n1,0.1\n2,0.3\n3,0.5\n4,0.7\n")
    (folder / "curves" / "seed-1.csv").write_text("step,reward\n0,\n1,0.3\n2,0.5\n3,0.9\n")
    (folder / "a.expected.yaml").write_text(text)
    return folder / "a.expected.yaml"


def test_a_recipe_is_what_its_file_says(tmp_path: Path) -> None:
    recipe = read(written(tmp_path, GOOD), "a")
    assert (recipe.name, recipe.about, recipe.minutes, recipe.not_run) == ("a", "a test", 0.1, "")
    assert [(s.name, s.command, s.words) for s in recipe.stages] == [
        ("sft", "sft", ()),
        ("learn", "rl", ("model.path={sft}",)),
    ]
    value, curve = recipe.expected
    assert value.stage == curve.stage == "learn" and value.seeds == [0, 2] and curve.seeds == [0, 1]
    (tmp_path / "a.yaml").touch()
    alone = read(written(tmp_path, "about: b\nhardware: c\nnot_run: no time\n"), "a")
    assert [(s.command, s.file) for s in alone.stages] == [("rl", tmp_path / "a.yaml")] and alone.not_run == "no time"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("about: a test", "abut: a test", "there is no key abut.*Did you mean about"),
        ("about: a test", "about: a test\nabout: b", "is not valid YAML: about is there twice"),
        ("about: a test", "about: [a]", r"about: must be a text, not \['a'\]"),
        ("minutes: 0.1", "minutes: soon", "minutes: must be a number above 0, not 'soon'"),
        ("command: sft", "command: train", r"number 1: command: must be sft \| rm \| dpo \| rl \| eval, not 'train'"),
        ("texts.yaml", "text.yaml", "number 1: file: there is no .*text.yaml"),
        ("{sft}", "{rm}", r"words: \{rm\} is no stage before this one \(sft\)"),
        ("name: learn", "name: sft", "two stages are called sft"),
        ("words: [", "words: [steps, ", "number 2: words: must be a list of key=value"),
        ("tolerance: 0.05", "tolerance: -1", "expect, number 1: tolerance: must be a number of at least 0, not -1"),
        ("values: {0: 0.9, 2: 0.8}", "values: 0.9", "values: must be numbers by seed"),
        ("values: {0: 0.9, 2: 0.8}", "values: {0: .nan}", "values: must be numbers by seed"),
        ("values: {0: 0.9, 2: 0.8}, ", "", "needs either values"),
        ("seed-{seed}.csv", "seed-0.csv", r"must be files with \{seed\} in their name"),
        ("curves/seed", "curve/seed", r"curve: there is no file .*curve/seed-\{seed\}.csv"),
        ("window: 2", "window: 0", "window: must be a whole number of at least 1, not 0"),
        ("column: reward", "step: later", "step: must be last"),
        ("metric: reward/mean", "stage: rm, metric: r", "stage: there is no stage rm; there is sft, learn"),
        ("expect:", "not_run: no time\nexpect:", "take out one of not_run and expect"),
        (GOOD[GOOD.index("expect:") :], "", "expect: is missing"),
        ("stages:", "stages: [1]\nx:", "stages: must be a list of stages"),
        ("about: a test", "about: [", "is not valid YAML"),
        (GOOD, "7", "expected the keys about, hardware"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(BirlError, match=told) as error:
        read(written(tmp_path, GOOD.replace(old, new, 1)), "a")
    assert all(line.startswith(f"{tmp_path}/a.expected.yaml: ") for line in str(error.value).splitlines())


def test_all_of_it_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BirlError) as error:
        read(written(tmp_path, GOOD.replace("sft,", "st,").replace("0.05", "x").replace("0.1\n", "no\n")), "a")
    assert len(str(error.value).splitlines()) >= 3
    with pytest.raises(BirlError, match="cannot be read"):
        read(tmp_path / "nothing.yaml", "a")


def expected(**given: object) -> Expectation:
    return Expectation(**{"stage": "rl", "metric": "m", "tolerance": 0.1, "values": {}, "curves": {}, **given})  # pyright: ignore


def test_a_seed_that_was_measured_has_its_own_band() -> None:
    about = expected(values={0: 0.9, 1: 0.5})
    for seed, found, within in ((0, 0.81, True), (0, 0.79, False), (1, 0.9, False), (7, 0.7, True), (7, 1.01, False)):
        (finding,) = compare(about, [(0, 0.0), (8, found)], seed)
        assert finding.within == within and finding.steps == "8", (seed, found)


def test_the_step_chooses_the_point() -> None:
    points = [(0, 0.1), (4, 0.9), (8, 0.5), (9, float("nan"))]
    for step, found in (("first", 0.1), ("last", 0.5), ("best", 0.9), ("4", 0.9)):
        (finding,) = compare(expected(values={0: 0.5}, step=step), points, 0)
        assert finding.measured == found
    for step, nothing in (("5", points), ("last", []), ("best", [(0, float("nan"))])):
        (finding,) = compare(expected(values={0: 0.5}, step=step), nothing, 0)
        assert not finding.within and finding.measured != finding.measured


def test_curves_are_compared_by_windows(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    files = {seed: tmp_path / "curves" / f"seed-{seed}.csv" for seed in (0, 1)}
    about = expected(curves=files, column="reward", window=2)
    same = [(1, 0.1), (2, 0.3), (3, 0.5), (4, 0.7)]
    own = compare(about, same, 0)
    assert [(f.steps, f.within) for f in own] == [("1 to 2", True), ("3 to 4", True)]
    assert own[1].low == pytest.approx(0.5) and own[1].high == pytest.approx(0.7)
    all_seeds = compare(about, same, 5)  # between the curves of both; the shorter one has one point in its last window
    assert [(f.low, f.high) for f in all_seeds] == [pytest.approx((0.1, 0.5)), pytest.approx((0.5, 1.0))]
    assert [f.within for f in compare(about, [(1, 0.1), (2, 0.3), (3, 0.5)], 0)] == [True, False]
    assert [f.within for f in compare(about, [(s, v + 0.2) for s, v in same], 0)] == [False, False]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step,loss\n1,2\n", "there is no column reward; there is step, loss"),
        ("", "there is no column step; there is nothing"),
        ("step,reward\n1,\n2,\n", "the column reward is empty"),
        ("step,reward\n1,2\n2,x\n", "row 3: step and reward must be numbers"),
        ("step,reward\n1,2\n2", None),  # a line that was cut has no reward
    ],
)
def test_a_broken_curve_is_told(tmp_path: Path, text: str, told: str | None) -> None:
    file = tmp_path / "seed-0.csv"
    file.write_text(text)
    if told is None:
        assert read_curve(file, "reward") == [(1, 2.0)]
        return
    with pytest.raises(BirlError, match=told):
        read_curve(file, "reward")
