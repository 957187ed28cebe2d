"""The timeline: what the server sends, and what a browser makes of it."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birl.view.folders import Runs
from tests.track import traces
from tests.track.traces import span
from tests.view.browser import NARROW, chromium, opened, serving

__all__ = ["chromium"]
HOSTILE = "engine <img src=x onerror=alert(1)>\u202e\x1b[2J"


def ask(url: str, **query: Any) -> dict[str, Any]:
    words = "&".join(f"{key}={value}" for key, value in query.items())
    try:
        with urllib.request.urlopen(f"{url}api/timeline?{words}") as answer:
            return json.load(answer)
    except urllib.error.HTTPError as problem:
        return {**json.load(problem), "status": problem.code}


def many(steps: int) -> list[dict[str, Any]]:
    """About 170 spans a step, most of them requests that overlap."""
    found = traces.ahead(steps, requests=0, reward=0.5)
    for step in range(steps):
        for n in range(160):
            t, version = 10 * step + 0.04 * n, max(step - n % 2, 0)
            found.append(
                span(
                    f"engine 127.0.0.1:80{n % 2:02}",
                    "requests",
                    "generate",
                    t,
                    0.5 + 0.02 * n,
                    step + 1,
                    version=version,
                )
            )
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The address, and the ids of the runs by name."""
    root = tmp_path_factory.mktemp("runs")
    traces.write(root / "some", traces.ahead())
    traces.write(root / "many", many(600))
    traces.write(root / "hostile", [*traces.ahead(), span(HOSTILE, HOSTILE, HOSTILE, 0, 60)])
    (root / "none").mkdir()
    (root / "none" / "metrics.jsonl").touch()
    ids = {run.name: run.id for run in Runs([root])}
    with serving(root) as url:
        yield url, ids


def lanes(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(p["name"], lane["lane"]): lane for p in found["processes"] for lane in p["lanes"]}


def test_all_of_a_small_run_is_sent(page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    found = ask(url, run=ids["some"], width=1000)
    assert (found["begin"], found["end"], found["last"]) == (0, 60, 60) and found["versions"] == [0, 6]
    loop = lanes(found)["learner", "loop"]
    drawn = sorted(zip(loop["start"], loop["end"], (found["names"][n] for n in loop["name"]), loop["row"], strict=True))
    assert (6.0, 9.0, "train", 0) in drawn and (6.0, 6.25, "wait:engines", 1) in drawn
    requests = lanes(found)["engine 127.0.0.1:8000", "requests"]
    assert requests["kind"] == "rows" and requests["rows"] == 4 and len(requests["start"]) == 24
    assert [s["first"] for s in found["steps"]] == [1, 2, 3, 4, 5, 6] and found["steps"][0]["seconds"]["train"] == 2.75
    assert found["limit"]["side"] == "generation" and found["shares"]["learner"]["wait:rollout"] == pytest.approx(0.6)
    assert found["longest"][0]["seconds"] == 10.0


def test_a_big_run_is_sent_in_pixels(page: tuple[str, dict[str, str]]) -> None:
    """10^5 spans: no more than the page has pixels for, and nothing is lost on the way."""
    url, ids = page
    found = ask(url, run=ids["many"], width=500)
    assert len(json.dumps(found)) < 500_000
    crowd = lanes(found)["engine 127.0.0.1:8000", "requests"]
    assert crowd["kind"] == "crowd" and len(crowd["crowd"]) == 500 and crowd["count"] == 600 * 80
    held = sum(s["seconds"] for s in many(600) if s["process"] == "engine 127.0.0.1:8000" and s["lane"] == "requests")
    assert np.sum(crowd["crowd"]) * found["end"] / 500 == pytest.approx(held, rel=1e-3)
    assert len(found["steps"]) <= 500 / 3 and {s["last"] - s["first"] for s in found["steps"][:-1]} == {3}
    assert sum(s["seconds"]["train"] for s in found["steps"]) == pytest.approx(600 * 2.75)
    loop = lanes(found)["learner", "loop"]
    assert len(loop["start"]) < 2500 and sum(loop["count"]) == 600 * 5 + 1
    part = ask(url, run=ids["many"], width=500, begin=101, end=112)
    assert part["begin"] == 101 and len(part["steps"]) == 2
    rewards = lanes(part)["rollout", "rewards"]
    assert max(rewards["count"]) == 1 and rewards["rows"] == 8


def test_spans_below_a_pixel_are_joined(tmp_path: Path) -> None:
    spans = [span("learner", "loop", "train", 0.1 * n, 0.05, n + 1, tokens=10) for n in range(1000)]
    traces.write(tmp_path / "run", spans)
    with serving(tmp_path) as url:
        loop = lanes(ask(url, run=next(iter(Runs([tmp_path]))).id, width=100))["learner", "loop"]
    assert len(loop["start"]) <= 101 and sum(loop["count"]) == 1000 and sum(loop["tokens"]) == 10_000
    assert sum(loop["seconds"]) == pytest.approx(50)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"run": "nobody"}, "There is no run"),
        ({}, "There is no run"),
        ({"run": "none"}, "track.trace=false"),
        ({"run": "some", "begin": "x"}, "is no number"),
        ({"run": "some", "end": "nan"}, "is no number"),
        ({"run": "some", "begin": 5, "end": 5}, "must be above"),
    ],
)
def test_what_is_wrong_is_said(page: tuple[str, dict[str, str]], query: dict[str, Any], says: str) -> None:
    url, ids = page
    found = ask(url, **{**query, "run": ids.get(query.get("run", ""), query.get("run", ""))})
    assert 400 <= found["status"] < 500 and says in found["error"]
    assert ask(url, run=ids["some"], width=10**9)["end"] == 60
    assert ask(url, run=ids["some"], begin=-50, end=-40)["steps"] == []
    assert ask(url, run=ids["some"], begin=1e6, end=2e6)["longest"] == []


def test_a_run_that_goes_on_and_one_that_is_cut_back(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "run", traces.ahead()) / "trace.jsonl"
    whole, run = path.read_bytes(), next(iter(Runs([tmp_path]))).id
    lines = whole.splitlines(keepends=True)
    with serving(tmp_path) as url:
        path.write_bytes(b"".join(lines[:40]) + lines[40][:20])
        assert 0 < ask(url, run=run)["last"] < 60
        path.write_bytes(whole)
        assert ask(url, run=run)["last"] == 60
        path.write_bytes(b"".join(lines[:30]))
        assert ask(url, run=run)["last"] < 60
        path.write_bytes(b"")
        assert "empty so far" in ask(url, run=run)["error"]


def test_a_trace_of_as_many_spans_that_says_something_else(tmp_path: Path) -> None:
    traces.write(tmp_path / "run", traces.ahead())
    run = next(iter(Runs([tmp_path]))).id
    with serving(tmp_path) as url:
        assert ask(url, run=run)["shares"]["learner"]["train"] == pytest.approx(0.275)
        traces.write(tmp_path / "run", traces.ahead(wait=2.0, train=7.5, sync=0.5, busy=0.9))
        assert ask(url, run=run)["shares"]["learner"]["train"] == pytest.approx(0.725)


def test_a_span_that_began_before_the_window_joins_no_long_one(tmp_path: Path) -> None:
    spans = [span("learner", "loop", "train", 10, 5), span("learner", "loop", "sync", 9.999, 0.001)]
    traces.write(tmp_path / "run", [])
    (tmp_path / "run" / "trace.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in [*spans, span("x", "calls", "y", 0, 1)])
    )
    with serving(tmp_path) as url:
        loop = lanes(ask(url, run=next(iter(Runs([tmp_path]))).id, begin=10, end=20, width=100))["learner", "loop"]
    assert loop["count"] == [1, 1]


def test_many_ask_at_once(page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    found: list[int] = []
    work = [threading.Thread(target=lambda: found.append(len(ask(url, run=ids["some"])["steps"]))) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == [6] * 8


def canvas_is_drawn(page: Any) -> bool:
    """Whether there is more than one colour on it."""
    return page.evaluate(
        """() => {
        const its = document.querySelector("canvas.lanes"), pen = its.getContext("2d");
        const data = pen.getImageData(0, 0, its.width, its.height).data, seen = new Set();
        for (let i = 0; i < data.length; i += 4 * 97) seen.add(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
        return seen.size > 5; }"""
    )


def window(page: Any) -> tuple[float, float]:
    found = dict(pair.split("=") for pair in page.url.split("?")[1].split("&"))
    return (float(found["from"]), float(found["to"])) if "from" in found else (0.0, 0.0)


def test_it_is_shown_and_moved_by_keys_buttons_wheel_and_hand(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/timeline?run={ids['many']}") as tab:
        assert "The learner waits 60% of the time for generation" in tab.inner_text(".note")
        assert canvas_is_drawn(tab)
        canvas = tab.locator("canvas.lanes")
        canvas.focus()
        tab.keyboard.press("+")
        begin, end = window(tab)
        assert end - begin == pytest.approx(6000 / 1.6, rel=1e-3)
        tab.keyboard.press("ArrowRight")
        assert window(tab)[0] > begin
        tab.get_by_role("button", name="Zoom out").click()
        tab.get_by_role("button", name="Earlier").click()
        tab.keyboard.press("Tab")
        tab.get_by_role("button", name="Show all").click()
        assert window(tab) == (0.0, 0.0)
        box = canvas.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + 110
        tab.mouse.move(x, y)
        tab.mouse.wheel(0, -100)
        assert window(tab) == (0.0, 0.0)  # the wheel alone scrolls the page
        tab.keyboard.down("Control")
        tab.mouse.wheel(0, -100)
        tab.keyboard.up("Control")
        tab.wait_for_function("location.hash.includes('from=')")
        begin, end = window(tab)
        assert end - begin == pytest.approx(0.8 * 6000, rel=1e-3)
        tab.mouse.move(x, y)
        tab.mouse.down()
        tab.mouse.move(x - 200, y, steps=4)
        tab.mouse.up()
        assert window(tab)[0] > begin + 100 and canvas_is_drawn(tab)
        tab.reload()  # the address has it
        tab.wait_for_selector(".view:not([aria-busy])")
        assert window(tab)[0] > begin + 100


def test_a_key_goes_on_from_the_one_before(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/timeline?run={ids['some']}&from=10&to=20") as tab:
        assert window(tab) == (10, 20)
        tab.evaluate("""() => ["0", "+"].forEach((key) =>
            document.querySelector("canvas.lanes").dispatchEvent(new KeyboardEvent("keydown", { key })))""")
        begin, end = window(tab)
        assert (begin + end) / 2 == pytest.approx(30) and end - begin == pytest.approx(60 / 1.6, rel=1e-3)


def test_versions_have_the_colours_that_are_drawn(chromium: Any, tmp_path: Path) -> None:
    spans = [s | {"version": s["version"] + 5} if "version" in s else s for s in traces.ahead(steps=3)]
    traces.write(tmp_path / "run", spans)
    with (
        serving(tmp_path) as url,
        opened(chromium, f"{url}#/timeline?run={next(iter(Runs([tmp_path]))).id}&by=version") as tab,
    ):
        keys = tab.locator(".legend .lane-key")
        hues = keys.locator(".lane-bit").evaluate_all("all => all.map((one) => one.style.getPropertyValue('--hue'))")
        assert keys.all_inner_texts() == ["5", "6", "7", "8"]
        assert hues == ["var(--c6)", "var(--c7)", "var(--c8)", "var(--c1)"]


def test_exact_values_are_told_where_the_pointer_is(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/timeline?run={ids['some']}") as tab:
        place = tab.evaluate("""() => { const its = document.querySelector("canvas.lanes").getBoundingClientRect();
            return [its.left, its.top, its.width]; }""")
        seen = set()
        for y in range(25, 240, 6):
            tab.mouse.move(place[0] + place[2] * 7.5 / 60, place[1] + y)  # while the first step is trained
            tip = tab.locator(".tip")
            if tip.is_visible():
                seen.add(tip.inner_text().replace("\n", " | "))
        assert any("27.5 % train" in text and text.startswith("Step 1") for text in seen), seen
        assert any(text.startswith("train") and "3.000 s, from 6.000 s" in text for text in seen), seen
        assert any("version 1 of the weights" in text and "9,000 tokens, 3,000 a second" in text for text in seen), seen
        tab.get_by_label("Colour by").select_option("version")
        assert "Versions 0 to 6" in tab.inner_text(".legend") and canvas_is_drawn(tab)


def test_hostile_names_are_shown_harmlessly(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/timeline?run={ids['hostile']}") as tab:
        assert tab.locator("img").count() == 0
        said = tab.inner_text("main")
        assert "<img src=x onerror=alert(1)>⟪U+202E⟫⟪U+001B⟫[2J" in said and "\u202e" not in said
        box = tab.locator("canvas.lanes").bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 12)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_narrow_window(chromium: Any, page: tuple[str, dict[str, str]], scheme: str) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/timeline?run={ids['some']}", viewport=NARROW, color_scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360 and canvas_is_drawn(tab)


def test_a_run_without_a_trace_says_so(chromium: Any, page: tuple[str, dict[str, str]]) -> None:
    url, ids = page
    with opened(chromium, f"{url}#/timeline?run={ids['none']}", quiet=["400"]) as tab:
        assert "track.trace=false" in tab.inner_text("[role=alert]")
    with opened(chromium, f"{url}#/timeline") as tab:
        assert tab.get_by_role("link", name="some").count() == 1
