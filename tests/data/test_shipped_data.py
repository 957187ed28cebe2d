"""The data sets that are shipped: what their generator writes, right, varied, without overlap."""

import json
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

from birl.config.schema import Data
from birl.data.tasks import load_tasks, overlap
from birl.envs.tasks.rows import evaluate
from birl.named import from_file

RECIPES = Path(__file__).parents[2] / "recipes" / "data"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return from_file(RECIPES / "make_arithmetic.py")


FILES = [
    f"{folder}/{name}.jsonl" for folder in ("arithmetic", "arithmetic_stories") for name in ("train", "validation")
]


def test_shipped_files_are_what_the_generator_writes(maker: ModuleType, tmp_path: Path) -> None:
    maker.main(["--out", str(tmp_path)])
    for name in (*FILES, "arithmetic_stories/solutions.jsonl"):
        assert (tmp_path / name).read_bytes() == (RECIPES / name).read_bytes()


def test_suffix_and_seed_of_the_generator(maker: ModuleType, tmp_path: Path) -> None:
    maker.main(["--out", str(tmp_path), "--suffix", " Be short.", "--seed", "1", "--train", "50", "--validation", "9"])
    for name, n in zip(FILES, (50, 9) * 2, strict=True):
        lines = (tmp_path / name).read_bytes().splitlines()
        assert len(lines) == n and all(json.loads(line)["prompt"].endswith(" Be short.") for line in lines)


@pytest.mark.parametrize("folder", ["arithmetic", "arithmetic_stories"])
def test_shipped_sets_do_not_overlap(maker: ModuleType, folder: str) -> None:
    """Each prompt is taken apart again by the wordings, to see which problem it is."""
    problems: dict[str, set[tuple]] = {}
    prompts: dict[str, list[str]] = {}
    for name, count in (("train", 1000), ("validation", 200)):
        rows = [json.loads(line) for line in (RECIPES / folder / f"{name}.jsonl").read_bytes().splitlines()]
        assert len(rows) == count and all(set(row) == {"prompt", "answer"} for row in rows)
        prompts[name] = [row["prompt"] for row in rows]
        problems[name] = {problem_of(maker, folder, row) for row in rows}
    assert len({*prompts["train"], *prompts["validation"]}) == 1200
    assert not problems["train"] & problems["validation"]


def test_worked_answers_are_right_and_of_other_problems(maker: ModuleType) -> None:
    rows = lambda name: map(json.loads, (RECIPES / "arithmetic_stories" / name).read_bytes().splitlines())  # noqa: E731
    asked = {
        problem_of(maker, "arithmetic_stories", row)
        for name in ("train", "validation")
        for row in rows(f"{name}.jsonl")
    }
    for row in rows("solutions.jsonl"):
        steps, answer = row["response"].removesuffix(".").split(". The answer is ")
        for step in steps.split(", "):
            left, _, right = step.partition(" = ")
            assert evaluate(left)[0] == int(right)
        assert steps.endswith(f" = {answer}")
        assert problem_of(maker, "arithmetic_stories", {"prompt": row["prompt"], "answer": answer}) not in asked


def problem_of(maker: ModuleType, folder: str, row: dict[str, str]) -> tuple:
    numbers = [int(n) for n in re.findall(r"\d+", row["prompt"])]
    kinds = maker.OPERATIONS if folder == "arithmetic" else maker.STORIES
    for kind in kinds:
        for wording in kind.wordings:
            names = re.findall(r"\{([abc])\}", wording)
            if len(names) != len(numbers):
                continue
            values = dict(zip(names, numbers, strict=True))
            if wording.format(**values) == row["prompt"]:
                operands = [values[name] for name in sorted(values)]
                assert str(kind.answer(*operands)) == row["answer"]
                swaps = (0, 1) if folder == "arithmetic" else kind.swaps
                rest = [n for i, n in enumerate(operands) if i not in swaps]
                return (kind.name, *sorted(operands[i] for i in swaps), *rest)
    raise AssertionError(row)


def test_shipped_sets_are_varied(maker: ModuleType) -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    for line in (RECIPES / "arithmetic" / "train.jsonl").read_bytes().splitlines():
        counts[problem_of(maker, "arithmetic", json.loads(line))[0]] += 1
    assert counts == {"sum": 500, "product": 500}


def test_shipped_sets_load() -> None:
    config = Data(train=[str(RECIPES / FILES[0])], validation=[str(RECIPES / FILES[1])])
    train, held = (load_tasks(config, which, chat=True)[0] for which in ("train", "validation"))
    assert (len(train), len(held)) == (1000, 200) and overlap(train, held) == 0
    assert all(t.answer and t.answer.isdigit() for t in train)
