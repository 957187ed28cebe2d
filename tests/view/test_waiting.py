"""Where the time went: what the server sends, and what a browser makes of it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from birl.view.folders import Runs
from tests.track import traces
from tests.track.traces import span
from tests.view.browser import NARROW, chromium, opened, serving

__all__ = ["chromium"]
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


def ask(url: str, path: str = "", **query: Any) -> Any:
    words = "&".join(f"{key}={value}" for key, value in query.items())
    try:
        with urllib.request.urlopen(f"{url}api/waiting{path}?{words}") as answer:
            return json.load(answer)
    except urllib.error.HTTPError as problem:
        return {**json.load(problem), "status": problem.code}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The address, and the ids of the runs by name."""
    root = tmp_path_factory.mktemp("runs")
    traces.write(root / "some", traces.ahead())
    traces.write(root / "hostile", [*traces.ahead(), span(HOSTILE, "calls", HOSTILE, 0, 60)])
    (root / "none").mkdir()
    (root / "none" / "metrics.jsonl").touch()
    ids = {run.name: run.id for run in Runs([root])}
    with serving(root) as url:
        yield url, ids


def test_the_shares_and_the_sentence_are_sent(page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    answer = ask(url, run=ids["some"])
    assert answer["shares"]["learner"]["wait:rollout"] == pytest.approx(0.6) and answer["shares"]["steps"] == [2, 6]
    assert answer["limit"].startswith("The learner waits 60% of the time for generation")
    assert answer["words"]["wait:rollout"] == "waiting for groups" and answer["spans"] == len(traces.ahead())


def test_the_trace_is_a_file_for_perfetto(page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    events = ask(url, "/trace", run=ids["hostile"])
    assert len([e for e in events if e["ph"] == "X"]) == len(traces.ahead()) + 1
    with urllib.request.urlopen(f"{url}api/waiting/trace?run={ids['some']}") as answer:
        assert answer.headers["content-disposition"] == 'attachment; filename="some.trace.json"'


@pytest.mark.parametrize("path", ["", "/trace"])
@pytest.mark.parametrize(
    ("run", "says"), [("nobody", "There is no run"), ("", "There is no run"), ("none", "track.trace=false")]
)
def test_what_is_wrong_is_told(page: tuple[str, dict[str, str]], path: str, run: str, says: str) -> None:
    url, ids = page
    answer = ask(url, path, run=ids.get(run, run))
    assert 400 <= answer["status"] < 500 and says in answer["error"]


def test_a_run_that_goes_on_and_one_that_is_cut_back(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "run", traces.ahead()) / "trace.json"
    whole, run = path.read_bytes(), next(iter(Runs([tmp_path]))).id
    lines = whole.splitlines(keepends=True)
    with serving(tmp_path) as url:
        path.write_bytes(b"".join(lines[:60]) + lines[60][:20])
        assert ask(url, run=run)["spans"] == b"".join(lines[:60]).count(b'"ph": "X"') > 20
        path.write_bytes(whole)
        assert ask(url, run=run)["shares"]["learner"]["train"] == pytest.approx(0.275)
        path.write_bytes(b"".join(lines[:50]))
        assert ask(url, run=run)["spans"] == b"".join(lines[:50]).count(b'"ph": "X"')
        traces.write(tmp_path / "run", traces.ahead(wait=2.0, train=7.5, sync=0.5, busy=0.9))  # as many, and others
        assert ask(url, run=run)["shares"]["learner"]["train"] == pytest.approx(0.725)
        path.write_bytes(b"")
        assert "empty so far" in ask(url, run=run)["error"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_table_in_a_narrow_window(chromium: Any, page: tuple[str, dict[str, str]], scheme: str) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/waiting?run={ids['some']}", viewport=NARROW, color_scheme=scheme) as tab:
        assert "The learner waits 60% of the time for generation" in tab.inner_text(".note")
        assert tab.locator(".shares tbody tr").first.inner_text().split("\t")[:3] == [
            "learner",
            "waiting for groups",
            "60.0 %",
        ]
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        with tab.expect_download() as download:
            tab.get_by_role("link", name="Download the trace").click()
        assert len(json.loads(download.value.path().read_text())) > len(traces.ahead())


def test_hostile_names_are_shown_harmlessly(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/waiting?run={ids['hostile']}") as tab:
        assert tab.locator("img").count() == 0
        shown = tab.inner_text("main")
        assert "<img src=x onerror=alert(1)>⟪U+202E⟫⟪U+001B⟫[2J" in shown and "\u202e" not in shown


def test_a_run_without_a_trace_says_so(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/waiting?run={ids['none']}", quiet=["400"]) as tab:
        assert "track.trace=false" in tab.inner_text("[role=alert]")
    with opened(chromium, f"{url}#/waiting") as tab:
        assert tab.get_by_role("link", name="some").count() == 1
