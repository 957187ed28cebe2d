"""The tables of the pages are what the code does: metrics, presets, rows, functions."""

import json
import re
from pathlib import Path

import pytest

from birl.config import schema
from birl.config.keys import presets, written
from birl.config.load import load
from birl.config.schema import RL
from birl.track.figures import OTHER, figure
from tests.docs.commands import ABOUT, AHEAD, CHOSEN, Figures
from tests.docs.pages import CODE, DOCS, ROOT, blocks, names, preset_rows, spans, tables


def test_the_table_of_metrics_is_what_a_run_writes(demo: Path) -> None:
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    named = {s for line in page.splitlines() if line.startswith("|") for s in CODE.findall(line.split("|")[1])}
    written: set[str] = set()
    for log in ("metrics.jsonl", "validation.jsonl"):
        record = json.loads((demo / log).read_bytes().splitlines()[-1])
        written |= {k for k in record if k not in (*ABOUT, "samples")}
    pattern = {name: re.sub(r"<\w+>", r"[^/]+", name) for name in named}
    assert not {w for w in written if not any(re.fullmatch(p, w) for p in pattern.values())}
    assert not {n for n, p in pattern.items() if not any(re.fullmatch(p, w) for w in written)}


def test_every_figure_of_a_run_has_a_title_and_a_sentence(figures: Figures, demo: Path) -> None:
    written = set().union(*(names for pair in figures.values() for names in pair))
    for log in ("metrics", "validation"):
        written |= set(json.loads((demo / f"{log}.jsonl").read_text().splitlines()[-1])) - {*ABOUT, "samples"}
    assert not [name for name in written if not figure(name).about]


def test_the_tables_of_figures_are_what_the_stages_write(figures: Figures) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    told = {head.replace("`", "").removeprefix("birl "): names(rows) for head, rows in tables(page).items()}
    common = told.pop("all of them, in metrics.jsonl")
    assert set(told) == {line for line in figures if not line.startswith("rl")}
    for line, own in told.items():
        metrics, validation = figures[line]
        assert metrics == own | common, line
        assert validation == {f"validation/{name}" for name in own}, line


def test_the_table_of_figures_is_what_algorithms_add(figures: Figures, demo: Path) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("## Figures")[2]
    plain = set(json.loads((demo / "metrics.jsonl").read_bytes().splitlines()[-1]))
    (metrics,) = (metrics for line, (metrics, _) in figures.items() if line.startswith("rl algorithm=ppo"))
    assert names(tables(page)["name"]) == metrics - plain


def test_the_table_of_figures_is_what_the_order_by_results_adds(figures: Figures, demo: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("## Prompts by difficulty")[2]
    plain = set(json.loads((demo / "metrics.jsonl").read_bytes().splitlines()[-1]))
    assert names(tables(page)["figure"]) == figures[CHOSEN][0] - plain


def test_the_table_of_figures_is_what_asynchronous_runs_add(figures: Figures, demo: Path) -> None:
    page = (ROOT / "docs" / "async.md").read_text(encoding="utf-8").partition("## The bound")[2]
    plain = set(json.loads((demo / "metrics.jsonl").read_bytes().splitlines()[-1]))
    told = names(tables(page)["metric"])
    assert figures[AHEAD][0] - plain - {"factor"} <= told <= figures[AHEAD][0] | plain


@pytest.mark.parametrize("page", ["runs.md", "training.md", "data.md"])
def test_units_are_those_of_the_report_and_the_page(page: str) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE):
        if "| unit | meaning |" not in block:
            continue
        for cells in (re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()[2:]):
            named, units = CODE.findall(cells[0]), cells[1].strip().split(", ")
            for name, unit in zip(named, units if len(units) == len(named) else units * len(named), strict=True):
                assert (figure(name).section != OTHER, figure(name).unit) == (True, unit), name


@pytest.mark.parametrize("page", DOCS, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_metrics_that_are_mentioned_exist(page: Path, demo: Path, figures: Figures) -> None:
    written = set().union(*(names for pair in figures.values() for names in pair))
    written |= {"reward/endpoint", "reward/model", "mismatch/rounding"}  # tests/rewards, tests/train/test_rl.py
    for log in ("metrics", "validation"):
        written |= set(json.loads((demo / f"{log}.jsonl").read_bytes().splitlines()[-1]))
    families = {name.split("/")[0] for name in written if "/" in name}
    for span in spans(page):
        if span.split("/")[0] in families and re.fullmatch(r"[a-z_]+(/[\w@<>]+)+", span):
            assert any(re.fullmatch(re.sub(r"<\w+>", r"[^/]+", span), name) for name in written), span


def test_the_table_of_presets_is_what_they_set() -> None:
    words = {"distill": ["algorithm.teacher=x"], "echo": ["env=guess_number"]}
    loaded = {
        name: load(RL, ["data.train=x", *words.get(name, ()), f"algorithm={name}"]).algorithm
        for name in presets(RL)["algorithm"]
    }
    page = ROOT / "docs" / "algorithms.md"
    rows = {row[0].strip("`"): dict(key.split("=", 1) for key in CODE.findall(row[2])) for row in preset_rows(page)}
    assert set(rows) == set(loaded)
    default = vars(loaded["dr_grpo"])
    for name, told in rows.items():
        given = [word.split("=")[0].removeprefix("algorithm.") for word in words.get(name, ())]
        sets = {k: written(v) for k, v in vars(loaded[name]).items() if v != default[k] and k not in given}
        assert told == sets, name
    three = tables(page.read_text(encoding="utf-8").partition("OpenAI's recipe")[2])["key"]
    columns = ("ppo", "grpo", "dr_grpo")
    differ = {k for k in default if len({str(getattr(loaded[name], k)) for name in columns}) > 1}
    assert {row[0].strip("`").removeprefix("algorithm.") for row in three} == differ
    for key, *values in three:
        for name, value in zip(columns, values, strict=True):
            found = written(getattr(loaded[name], key.strip("`").removeprefix("algorithm.")))
            assert "not read" in value or value == found, (name, key)


def test_the_rows_of_the_page_are_read(tiny: Path) -> None:
    from birl.data.examples import load_examples
    from birl.models.load import load_tokenizer
    from birl.text.chat import Chat

    chat = Chat(load_tokenizer(tiny))
    texts, pairs, single = (text for language, text in blocks(ROOT / "docs" / "training.md") if language == "jsonl")
    rows = [[json.loads(line) for line in text.encode().splitlines()] for text in (texts, pairs, single)]
    for row in rows[0]:
        assert len(load_examples(schema.Texts(train=["given"]), "train", chat, 512, given=[row])[0][0].sequences) == 1
    for row in rows[1]:
        assert len(load_examples(schema.Pairs(train=["given"]), "train", chat, 512, given=[row])[0][0].sequences) == 2
    labelled = schema.LabelledPairs(train=["given"], chosen_column="answer", label_column="good")
    assert [e.good for e in load_examples(labelled, "train", chat, 512, given=rows[2])[0]] == [True, False]


def test_what_a_function_may_ask_for_is_listed() -> None:
    from birl.train import credit, objective

    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("## Your own loss")[2]
    surrogate, advantage = tables(page)[""]
    assert tuple(CODE.findall(surrogate[2])) == objective.TENSORS
    assert set(CODE.findall(advantage[2])) == set(credit.TENSORS)


def test_the_table_of_math_is_what_it_judges() -> None:
    from birl.rewards.math import math

    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (`.+?`) \| (`.+?`) \|$", page.partition("## What `math`")[2], re.MULTILINE)
    assert len(rows) >= 4
    for gold, *sides in rows:
        for expected, side in zip((1.0, 0.0), sides, strict=True):
            for answer in CODE.findall(side):
                assert math([answer], gold=[gold.strip("`")]) == [expected], (gold, answer)


def test_the_keys_that_may_change_are_listed() -> None:
    from birl.track.folder_lock import FREE, FREE_SECTIONS

    page = ROOT / "docs" / "runs.md"
    told, sections = (
        set(spans(page)),
        page.read_text(encoding="utf-8").partition("everything under ")[2].partition(".")[0],
    )
    assert not {key for key in FREE if key not in told} - {"run", "resume"}
    assert [name for name in FREE_SECTIONS if name.rstrip(".") not in re.split(r"\W+", sections)] == []


def test_the_readme_counts_the_presets() -> None:
    count = len(list((ROOT / "birl" / "config" / "presets" / "algorithm").glob("*.yaml")))
    assert f"| {count} presets: " in (ROOT / "README.md").read_text(encoding="utf-8")
