"""Every view of the shell in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import NARROW, chromium, opened, serving, until  # noqa: F401  chromium is a fixture
from tests.view.charts import at, wait_drawn
from tests.view.runs import HOSTILE, append, make, several


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = several(tmp_path_factory.mktemp("page") / "runs")
    make(folder / "broken", steps=12, ended=False)
    (folder / "broken" / "config.json").write_text('{"seed": 0,')
    make(folder / "empty", steps=0, ended=False)
    return folder


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


def test_the_list_of_runs_can_be_sorted_and_filtered(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        page.wait_for_selector("tbody tr")
        rows = lambda: [row.split("\n")[0] for row in page.locator("tbody th").all_inner_texts()]  # noqa: E731
        assert sorted(rows()) == ["broken", "empty", "fast", "grpo/seed=0", "grpo/seed=1", "grpo/seed=2"]
        page.click("th button:text-is('run')")
        assert rows() == sorted(rows())
        page.click("th button:text-is('run')")
        assert rows() == sorted(rows(), reverse=True)
        page.click("th button:text-is('best validation')")
        assert rows()[-1] == "empty" and page.get_attribute("th[aria-sort]", "aria-sort") == "descending"
        page.fill("#find", "other")
        assert rows() == ["fast"]
        text = page.inner_text("tbody tr")
        assert all(word in text for word in ("done", "30", "0.900", "other", "dr_grpo*", "2m15s"))
        page.fill("#find", "no such run")
        assert "No run fits" in page.inner_text("#content")


def test_the_list_links_to_reports_and_draws_sparklines(chromium: Any, url: str, runs: Path) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        page.wait_for_selector("tbody tr")
        row = page.locator("tbody tr").filter(has=page.get_by_role("link", name="fast", exact=True))
        rewards = [json.loads(line)["reward/mean"] for line in (runs / "fast/metrics.jsonl").read_text().splitlines()]
        drawn = row.locator("svg.spark polyline").get_attribute("points") or ""
        points = [tuple(map(float, point.split(","))) for point in drawn.split()]
        assert len(points) > 10 and [x for x, _ in points] == sorted(x for x, _ in points)
        assert points[0][1] > points[-1][1]  # it rises, and y points down
        assert all(0 <= x <= 96 and 0 <= y <= 18 for x, y in points)
        label = row.get_by_role("img").get_attribute("aria-label") or ""
        told = re.fullmatch(r"reward from (\S+) to (\S+)", label)
        assert told and [float(t.replace("\u2212", "-")) for t in told.groups()] == pytest.approx(
            [rewards[0], rewards[-1]], abs=1e-3
        )
        assert row.locator("progress").evaluate("it => [it.value, it.max]") == [30, 30]
        empty = page.locator("tbody tr").filter(has=page.get_by_role("link", name="empty", exact=True))
        assert empty.locator("svg.spark").count() == 0
        assert empty.locator("progress").evaluate("it => [it.value, it.max]") == [0, 30]
        for one in (row, empty):
            with page.expect_popup() as opening:
                one.get_by_role("link", name="report", exact=True).click()
            report = opening.value
            report.wait_for_load_state()
            wanted = "reward" if one is row else "No step"
            assert "/report?run=" in report.url and wanted in report.inner_text("body"), report.inner_text("body")
            report.close()


def test_chosen_runs_go_to_curves_and_comparison(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        for name in ("fast", "grpo/seed=0"):
            page.check(f"[aria-label='Choose {name}']")
        assert "2 of 6 chosen" in page.inner_text("#chosen")
        page.click("button:text-is('Compare')")
        page.wait_for_selector("table.sides")
        assert "optimizer.lr" in page.inner_text("#content") and "0.0001" in page.inner_text("#content")
        assert "rollout.group_size" not in page.inner_text("#content")
        page.fill("#find", "reward/mean")
        assert "No key that differs" in page.inner_text("#content")
        assert page.locator("tbody tr").count() == 1 and page.locator("tbody strong").count() == 1
        page.click("a:text-is('Curves')")
        page.wait_for_selector(".legend .run")
        assert page.locator(".legend .run").count() == 2


def test_a_broken_configuration_and_an_empty_run(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "broken")
        wait_drawn(page, "reward/mean")
        assert "config.json cannot be read" in page.inner_text(".status")
        at(page, "curves", "empty")
        until(page, "document.querySelector('.status').textContent.includes('No step is finished yet')")
        at(page, "compare", "broken", "empty", "fast")
        page.wait_for_selector(".problem")
        assert "config.json cannot be read" in page.inner_text(".problem")
        assert "reward/mean" in page.inner_text("#content")


def test_hostile_names_and_values_are_shown_and_do_nothing(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    name = HOSTILE.replace("/", "_").replace("\ud83d", "")
    run = make(tmp_path / "runs" / name, model__path=HOSTILE)
    other = make(tmp_path / "runs" / "other", model__path=HOSTILE + "2")
    append(other, 31, 31)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 31, HOSTILE: 0.5, "<b>x/</b>": 1.0, "__proto__": 2.0, "constructor/x": 1}) + "\n"
        )
    with serving(tmp_path / "runs") as address, opened(chromium, address) as page:
        page.on("dialog", lambda dialog: pytest.fail("a script ran"))
        page.wait_for_selector("tbody tr")
        shown = page.inner_text("tbody")
        assert "<script>alert(1)<" in shown and "⟪U+202E⟫gnp.exe⟪U+001B⟫" in shown and "\u202e" not in shown
        for view in ("curves", "compare"):
            at(page, view, name, "other")
            until(page, "document.body.innerText.includes('⟪U+202E⟫')")
            text = page.inner_text("body")
            assert "\u202e" not in text and "\x1b" not in text and "<script>alert(1)<" in text
            assert page.locator("main script, main img, main b").count() == 0
        page.evaluate("location.hash = '#/'")
        at(page, "curves", name, "other")
        page.fill("#find", "proto")
        wait_drawn(page, "__proto__")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [NARROW, None], ids=["narrow", "wide"])
def test_narrow_and_wide_light_and_dark(
    chromium: Any,  # noqa: F811
    url: str,
    scheme: str,
    viewport: dict | None,
) -> None:
    options: dict[str, Any] = {"color_scheme": scheme, **({"viewport": viewport} if viewport else {})}
    with opened(chromium, url, **options) as page:
        for view, names in (("", ()), ("curves", ("fast", "grpo/seed=1")), ("compare", ("fast", "grpo/seed=1"))):
            if view:
                at(page, view, *names)
                page.wait_for_selector("canvas" if view == "curves" else "table.sides")
            wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], (view, wide)  # only tables of many runs scroll, each in its own region
            over = page.evaluate("[...document.querySelectorAll('.scroll')].map((e) => e.scrollWidth - e.clientWidth)")
            assert view != "compare" or over == [0, 0]
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128")
            assert dark == (scheme == "dark")


def test_the_switch_of_colours_is_kept(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url, color_scheme="light") as page:
        at(page, "curves", "fast")
        wait_drawn(page, "kl")
        color = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
        light = color()
        page.click("#theme")
        page.click("#theme")
        assert page.inner_text("#theme") == "◐ dark" and color() != light
        page.reload()
        wait_drawn(page, "kl")
        assert page.inner_text("#theme") == "◐ dark" and color() != light


def test_without_a_server_the_page_says_what_to_do(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    make(tmp_path / "runs" / "demo")
    with serving(tmp_path / "runs") as address, opened(chromium, address, quiet=["ERR_", "Failed to load"]) as page:
        page.route("**/api/**", lambda route: route.abort())
        page.evaluate("location.hash = '#/compare'")
        page.wait_for_selector("[role=alert]")
        assert "Is it still running?" in page.inner_text("[role=alert]")


def test_a_run_that_is_gone_is_said(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url + "#/curves?run=nothing", quiet=["400"]) as page:
        assert "There is no run 'nothing'" in page.inner_text("[role=alert]")


def test_a_view_that_comes_too_late_says_nothing(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        page.wait_for_selector("tbody tr")
        held: list[Any] = []
        page.route("**/api/metrics*", lambda route: held.append(route))
        page.click("tbody th a:has-text('fast')")
        until(page, "location.hash.startsWith('#/curves')")
        while not held:
            page.wait_for_timeout(20)
        page.evaluate("location.hash = '#/'")
        page.wait_for_selector("tbody tr")
        held[0].continue_()
        page.wait_for_timeout(500)
        assert page.title() == "Runs · birl" and page.inner_text("h1") == "Runs"


def test_a_filter_that_is_typed_before_there_are_runs(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        held: list[Any] = []
        page.route("**/api/runs", lambda route: held.append(route))
        page.reload()
        page.fill("#find", "fast")
        page.wait_for_timeout(100)
        held[0].continue_()
        page.wait_for_selector("tbody tr")
        assert page.locator("tbody tr").count() == 1


def test_colours_of_runs_are_the_same_after_a_look_at_rollouts(chromium: Any, url: str) -> None:  # noqa: F811
    style = """() => { const its = getComputedStyle(document.querySelector(".legend .swatch"));
        return [its.borderTopColor, its.borderTopWidth, its.height]; }"""
    with opened(chromium, url) as page:
        at(page, "curves", "fast")
        before = page.evaluate(style)
        page.evaluate("location.hash = '#/rollouts'")
        page.wait_for_selector("h1:text-is('Rollouts')")
        page.wait_for_selector(".view:not([aria-busy])")
        at(page, "curves", "fast")
        assert page.evaluate(style) == before and before[1] == "3px"
