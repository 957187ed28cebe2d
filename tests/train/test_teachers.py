"""Several teachers in one run: each row names its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.named import Given
from birl.preflight import check_names
from birl.train.command import train
from tests.server.running import running
from tests.tiny import tiny_model_folder
from tests.train import test_rl as rl

SMALL = (
    "algorithm=distill",
    "rollout.prompts=8",
    "rollout.group_size=4",
    "rollout.max_tokens=8",
    "optimizer.lr=1e-3",
    "steps=1",
    "data.shuffle=false",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return {name: tiny_model_folder(folder / name, seed=seed) for name, seed in (("a", 7), ("b", 8))}


def run(tiny: Path, folder: Path, *words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows 0, 2, ... are for a. Records of the first step, and its figures."""
    rows = folder / "rows.jsonl"
    folder.mkdir(exist_ok=True)
    rows.write_text("".join(json.dumps({"prompt": f"Say {n}.", "teacher": "ab"[n % 2]}) + "\n" for n in range(8)))
    quiet = ("track.console=off", "track.tensorboard=false", "track.report=false", "threads=1", "validation.every=0")
    own = (f"model.path={tiny}", "model.dtype=float32", f"data.train=[{rows}]", f"run={folder}/run", *SMALL, *quiet)
    given = Given(rewards=[lambda completions, **_: [0.0] * len(completions)])
    train(load(schema.RL, [*own, "reward.functions=[given:zero]", *words]), given=given)
    return rl.log(folder, "rollouts"), rl.log(folder)[0]


def both(pair: dict[str, Path], **others: str) -> str:
    return "algorithm.teachers=[" + ",".join(f"{n}={p}" for n, p in ({**pair, **others}).items()) + "]"


def test_each_row_is_compared_with_its_own_teacher(tiny: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    alone = {n: run(tiny, tmp_path / n, f"algorithm.teacher={path}")[0] for n, path in pair.items()}
    records, _ = run(tiny, tmp_path / "both", both(pair))
    assert len(records) == 32 and alone["a"] != alone["b"]
    for n, record in enumerate(records):
        name = "ab"[int(record["task"].rpartition(":")[2]) % 2]
        assert record["samples"] == alone[name][n]["samples"]
        assert record["advantage"] == pytest.approx(alone[name][n]["advantage"], abs=1e-5)


@pytest.mark.parametrize(
    "words",
    [(), ("algorithm.teacher_divergence=jsd",), ("algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=8")],
)
@pytest.mark.usefixtures("forking")
def test_micro_batches_and_ranks_change_nothing(
    tiny: Path, pair: dict[str, Path], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Ranks of sharded teachers meet in the same one, also where one of them has nothing left of it."""
    ways = (("one", ()), ("cut", ("learner.tokens_per_microbatch=400",)), ("two", ("parallel.fsdp=2",)))
    one, *others = (run(tiny, tmp_path / name, both(pair), *words, *more)[1] for name, more in ways)
    names = [name for name in ("loss", "grad_norm", "divergence") if name in one]
    for other in others:
        assert [other[n] for n in names] == pytest.approx([one[n] for n in names], rel=5e-4, abs=1e-6)


@pytest.mark.parametrize("words", [(), ("algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=8")])
def test_teachers_behind_addresses(tiny: Path, pair: dict[str, Path], tmp_path: Path, words: tuple[str, ...]) -> None:
    """One of them, where sampled tokens are compared; all, for top-k tokens."""
    _, here = run(tiny, tmp_path / "here", both(pair), *words)
    with running(pair["a"], model={"dtype": "float32"}) as a, running(pair["b"], model={"dtype": "float32"}) as b:
        there = {name: f"{server.url}/v1/completions" for name, server in (("a", a), ("b", b))}
        _, mixed = run(tiny, tmp_path / "there", both(pair, **(there if words else {"b": there["b"]})), *words)
    assert [mixed[n] for n in ("loss", "grad_norm")] == pytest.approx(
        [here[n] for n in ("loss", "grad_norm")], rel=1e-3
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.teachers=[a]",), "write each as name=model"),
        (("algorithm.teachers=[a=x,a=y]",), "every name once"),
        (("algorithm.teachers=[a=x]", "algorithm.teacher=y"), "set only one of them"),
        (("algorithm.teachers=[a=self]",), "self cannot be one of several"),
        (("algorithm.teacher=x", "algorithm.teacher_column=env"), "algorithm.teachers is empty"),
        (
            (
                "algorithm.teachers=[a=x,b=http://h/v1/completions]",
                "algorithm.teacher_divergence=jsd",
                "algorithm.teacher_top_k=4",
            ),
            "cannot be mixed with local models",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(BirlError, match=message):
        load(schema.RL, ["data.train=x", "algorithm=distill", *words])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "answer": "1"}, r"rows\.jsonl, row 2: has no column 'teacher'"),
        ({"prompt": "x", "teacher": "c", "answer": "1"}, r"rows\.jsonl, row 2: teacher is 'c'; there are a, b"),
        ({"prompt": "x", "teacher": 3, "answer": "1"}, r"rows\.jsonl, row 2: teacher is"),
    ],
)
def test_a_row_without_a_teacher_is_told_before_anything_is_loaded(
    pair: dict[str, Path], tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "x", "teacher": "a", "answer": "1"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(BirlError, match=message):
        check_names(load(schema.RL, [f"data.train=[{rows}]", "algorithm=distill", both(pair)]))


def test_a_teacher_that_is_not_there_is_told_before_anything_is_loaded(pair: dict[str, Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "x", "teacher": "a", "answer": "1"}) + "\n")
    words = [f"data.train=[{rows}]", "algorithm=distill", both(pair, b=str(tmp_path / "nothing"))]
    with pytest.raises(BirlError, match=r"algorithm\.teachers=.*nothing"):
        check_names(load(schema.RL, words))
