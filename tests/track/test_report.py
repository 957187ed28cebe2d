import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from birl.errors import BirlError
from birl.track.charts import MOST_POINTS, SCRIPT, Charts
from birl.track.panel import sparkline
from birl.track.report import write_report
from birl.track.runs import best_validation
from birl.track.summary import Pair, facts, figures, pairs, shown, tally
from birl.visible import visible
from tests.track import runs

TAGS = re.findall(
    r"\w+",
    "html head meta title style body main h1 h2 p div b i span details summary table tr td th pre script",
)


class Page(HTMLParser):
    """Collects all tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def _data(html: str) -> list[dict[str, Any]]:
    """The charts of a report."""
    return json.loads(html.partition('id="data">')[2].partition("</script>")[0])


def _report(run: Path, steps: int = 10, finish: bool = True) -> str:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(
        f"model: smollm2\nsystem_prompt: '{visible(runs.HOSTILE)}</pre><script>'\n", "utf-8"
    )
    with runs.tracker(run) as tracker:
        tracker.rewind(None, 0)
        if steps:
            runs.train(tracker, 1, steps)
        if finish:
            tracker.finish({"next": ["birl chat <run>"]})
    return write_report(run).read_text("utf-8")


def test_report_says_what_happened(tmp_path: Path) -> None:
    html = _report(tmp_path / "run")
    page = Page(html)
    text = " ".join(page.words)
    for words in (
        "smollm2 · sums",
        "0.400",
        "0.220",
        "2 became right",
        "What is 3 + 4?",
        "96.9 %",
        "birl chat <run>",
        "new/<thing>",
    ):
        assert words in text
    charts = _data(html)
    assert len(charts) > 10 and len(charts) == html.count("data-chart=")
    length = next(one for one in charts if one["heading"] == "Answer length [tokens]")
    assert [one["label"] for one in length["lines"]] == ["mean", "max"] and length["lines"][0]["y"] == [14.2] * 10
    (norm,) = (one["lines"][0] for one in charts if one["heading"] == "Gradient norm")
    assert norm["y"][2] is None and norm["x"] == list(range(1, 11))
    assert "Answer length [tokens], first to last step: mean 14.2 to 14.2; max 32 to 32" in text
    assert "ended in exactly one of these" in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    html = _report(tmp_path / "<run>")
    page = Page(html)
    assert set(page.tags) <= set(TAGS) and page.tags.count("script") == 2 and html.count("</script>") == 2
    assert html.count(SCRIPT) == 1
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "xlink:href")]
    assert "<script>alert(1)</script>" in " ".join(page.words)
    html = html.replace(SCRIPT, "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\ud800-\udfff]", html)
    assert "default-src 'none'" in html
    assert "http://" not in html and "https://" not in html


def test_report_of_a_stopped_and_of_an_empty_run(tmp_path: Path) -> None:
    assert "not finished" in _report(tmp_path / "stopped", steps=3, finish=False)
    assert "No step was finished" in _report(tmp_path / "empty", steps=0, finish=False)
    (tmp_path / "bare").mkdir()
    assert "bare" in write_report(tmp_path / "bare").read_text("utf-8")


def test_a_run_in_which_nothing_was_scored_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        for step in (0, 1):
            tracker.validation(step, {"validation/all/pass@1": math.nan}, [])
        tracker.step(1, {**runs.metrics(1), "reward/mean": math.nan})
        tracker.finish({"next": []})
    assert not {"validation", "reward/mean"} & set(facts(tmp_path)) and "None" not in write_report(tmp_path).read_text()


def test_sources_with_a_slash_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with runs.tracker(tmp_path) as tracker:
        tracker.rewind(None, 0)
        tracker.validation(0, {f"validation/{s}/pass@1": 0.5 for s in ("openai/gsm8k", "openai/math", "all")}, [])
        tracker.step(1, runs.metrics(1))
    (chart,) = (one for one in _data(write_report(tmp_path).read_text()) if one["heading"] == "Validation")
    assert {"openai/gsm8k/pass@1", "openai/math/pass@1"} <= {one["label"] for one in chart["lines"]}


def test_long_runs_are_thinned_and_gaps_stay() -> None:
    charts = Charts()
    assert charts.draw("long", [("a", range(10_000), [math.nan if 4000 < i < 6000 else i for i in range(10_000)])])
    assert charts.draw("nothing", [("a", [1], [math.nan])]) == ""
    assert charts.draw("one point", [("a", [5], [0.0])]) and charts.draw("one bar", [("a", [5], [0.0])], stacked=True)
    html = charts.page("x", "")
    (line,) = _data(html)[0]["lines"]
    assert len(line["x"]) == MOST_POINTS == len(line["y"]) and None in line["y"] and line["x"][-1] == 9999
    assert len(json.dumps(line)) < 5000 and len(_data(html)) == 3


def test_pairs_are_matched_by_prompt_and_no_loss_is_hidden() -> None:
    def record(step: int, *rows: tuple[str, str, float]) -> dict[str, object]:
        return {
            "step": step,
            "samples": [{"prompt": p, "completion": c, "score": s, "source": "x"} for p, c, s in rows],
        }

    first = record(0, ("p", "a", 0), ("p", "b", 1), ("q", "c", 0), ("gone", "d", 0), ("r", "e", 0))
    last = record(9, ("r", "E", 1), ("q", "C", 1), ("p", "A", 1), ("p", "B", 0))
    found = pairs([first, {"step": 5}, last])
    assert [(pair.before, pair.after) for pair in found] == [("a", "A"), ("b", "B"), ("c", "C"), ("e", "E")]
    assert [pair.change for pair in shown(found, 3)] == [1, 1, -1]
    assert [pair.change for pair in shown([found[0], *found], 4)] == [1, 1, 1, -1]  # equal ones once
    assert tally(found) == "of 4 answers 3 became right, 1 became wrong, 0 stayed right, 0 stayed wrong"
    assert pairs([first]) == []


def test_a_pair_without_scores_is_neither() -> None:
    pair = Pair(prompt="p", answer="", before="a", after="b", score_before=math.nan, score_after=math.nan)
    assert pair.change == 0


def test_visible_keeps_what_is_harmless() -> None:
    family = "👨\u200d👩 naïve\tنص\n中"
    assert visible(family) == family
    assert visible("a\x1b[2J\u202eb\ud800\r\n") == "a⟪U+001B⟫[2J⟪U+202E⟫b⟪U+D800⟫\n"


@pytest.mark.parametrize(
    "values",
    [
        [0.3625, 0.36250000000000004] * 2,  # a mean of equal values, rounded otherwise
        [0.0, -0.0],
        [5e-324, 0.0],
        [1e-14, 2e-14],
        [1.0, 1.0 + 1e-7],
        [-1e-300, 1e-300],
        [1e308, -1e308],
        [1e308, 1.0000000000000002e308],
        [-7.0] * 3,
        [math.inf, 1.0, -math.inf],
        [math.nan, math.inf],
        [2.0**53, 2.0**53 + 2],
    ],
)
def test_curves_survive_any_values(tmp_path: Path, values: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    charts = Charts()
    if charts.draw("a", [("a", range(len(values)), values)]):
        drawn = _data(charts.page("a", ""))[0]["lines"][0]["y"]
        assert [n for n, y in enumerate(drawn) if y is None] == [
            n for n, v in enumerate(values) if not math.isfinite(v)
        ]
        assert all(y is None or abs(y) <= 1e300 for y in drawn)
    assert len(sparkline(values, 20, 3)) == 3
    with runs.tracker(tmp_path, console="plain") as tracker:
        tracker.rewind(None, 0)
        for step, value in enumerate(values, start=1):
            tracker.validation(step, {"validation/all/score": value}, [])
            tracker.step(step, {**runs.metrics(1), "reward/mean": value, "time/step": value})
        tracker.finish({"next": []})
    assert "data-chart" in (tmp_path / "report.html").read_text() and "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ['"x"', '""', "[]", "{}", "true", "null", "NaN", "1e999", "1" + 400 * "0", "-1" + 400 * "0"]
)
def test_values_of_another_kind_do_not_end_a_report(tmp_path: Path, value: str) -> None:
    names = (
        "reward/mean",
        "time/step",
        "tokens/generated",
        "outcome/ok",
        "updates/done",
        "threshold",
        "validation/all/score",
    )
    fields = "".join(f', "{name}": {value}' for name in names)
    samples = f'{{"prompt": {value}, "completion": {value}, "score": {value}}}'
    lines = [f'{{"step": {n}{fields}, "samples": [{samples}, {value}]}}\n' for n in (1, 2, 2**62)]
    lines[1] = f'{{"step": 2, "samples": {value}, "validation/all/score": {value}}}\n'
    for name in ("metrics.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "summary.json").write_text(
        f'{{"finished": {value}, "ended": {value}, "validation": {value}, "title": {value}}}'
    )
    assert "<h1>" in write_report(tmp_path).read_text() and figures(facts(tmp_path))["steps"] == 2**62
    (tmp_path / "metrics.jsonl").write_text('{"step": NaN}\n')
    with pytest.raises(BirlError, match="line 1: it has no step"):
        facts(tmp_path)


def test_a_report_never_decides_how_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: object, **more: object) -> None:
        raise ZeroDivisionError("division by zero")

    for name in ("birl.track.report.write_report", "birl.track.tracker.closing", "birl.track.tracker.facts"):
        monkeypatch.setattr(name, broken)
    for name in ("start", "step", "validation", "message", "stop"):
        monkeypatch.setattr(f"birl.track.console.PlainView.{name}", broken)
    with runs.tracker(tmp_path, console="plain") as tracker:
        tracker.rewind(None, 0)
        runs.train(tracker, 1, 1)
        tracker.message("hello")
        tracker.finish({"next": [], "step": 1})
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] is True
    told = capsys.readouterr().err
    assert f"warning: {tmp_path}/report.html failed (ZeroDivisionError: division by zero)" in told


def test_scores_that_are_no_right_and_wrong_are_told_as_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's own reward gives 0.7 to 0.9: the mean is what a run is judged by, everywhere, and nothing is wrong."""

    def samples(*scores: float) -> list[dict[str, object]]:
        return [
            {"prompt": f"p{i}", "completion": f"c{i}", "answer": "a", "score": s, "source": "x"}
            for i, s in enumerate(scores)
        ]

    for name, threshold, said in (
        ("mean", {}, ("of 3 answers 2 score higher, 0 lower, 1 the same", "score 0.900")),
        ("cut", {"threshold": 0.8}, ("1 became right", "right: a score of at least 0.8", "wrong (score 0.720)")),
    ):
        with runs.tracker(tmp_path / name, console="plain") as tracker:
            tracker.rewind(None, 0)
            rate = {"validation/all/pass@1": 0.3333} if threshold else {}
            tracker.validation(0, {"validation/all/score": 0.6, **rate}, samples(0.4, 0.7, 0.7), threshold)
            tracker.step(1, runs.metrics(1))
            tracker.validation(1, {"validation/all/score": 0.732, **rate}, samples(0.4, 0.9, 0.72), threshold)
            tracker.finish({"next": []})
        told = " ".join(capsys.readouterr().out.split())
        page = " ".join(Page((tmp_path / name / "report.html").read_text()).words)
        assert "validation 0.732 (at first 0.600)" in told
        assert "0.600 before -> 0.732 after (+0.132, best 0.732)" in told and "points" not in told
        assert said[0] in told and all(words in page for words in said)
        assert best_validation(tmp_path / name) == ("validation/all/score", 0.732, 1)
        assert (": wrong" in page) is bool(threshold)
