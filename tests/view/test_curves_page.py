"""Curves in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import NARROW, chromium, opened, serving, until  # noqa: F401  chromium is a fixture
from tests.view.charts import at, drawn, slider, values, wait_drawn
from tests.view.runs import append, going_on, line, long, make, several


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = several(tmp_path_factory.mktemp("page") / "runs")
    make(folder / "short", steps=10, seed=6, optimizer__lr=1e-4)
    return folder


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


def test_curves_are_drawn_and_say_exact_values(chromium: Any, url: str, runs: Path) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "fast")
        wait_drawn(page, "reward/mean")
        rows = [json.loads(row) for row in (runs / "fast" / "metrics.jsonl").read_bytes().splitlines()]
        assert float(values(page, "reward/mean")) == pytest.approx(rows[-1]["reward/mean"], abs=6e-4)
        box = slider(page, "reward/mean").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        until(page, "document.querySelector('[data-metric=\"kl\"] .where')")
        step = int(values(page, "kl").split("\n")[0].removeprefix("step "))
        assert 10 < step < 20
        for name in ("kl", "reward/mean", "entropy"):
            where, value = values(page, name).split("\n")
            assert where == f"step {step}" and float(value) == pytest.approx(rows[step - 1][name], rel=1e-5), name
        groups = page.locator("details.group h2").all_inner_texts()
        assert groups[0] == "Overview" and groups[-1] == "Unchanged" and "Time" in groups


def test_a_run_that_trains_nothing_is_told_above_its_curves(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = make(tmp_path / "runs" / "idle", steps=0)
    (run / "metrics.jsonl").write_text("".join(line(n, {"updates/done": 0.0, "updates/skipped": 1.0}) for n in (1, 2)))
    with serving(tmp_path / "runs") as url, opened(chromium, url) as page:
        at(page, "curves", "idle")
        page.get_by_text("nothing was trained: all rewards of a group are equal or missing, in 2 of 2 steps").wait_for()


def test_keyboard_alone(chromium: Any, url: str) -> None:  # noqa: F811
    """From the first key to a value on a curve, and back."""
    with opened(chromium, url) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        at(page, "curves", "grpo/seed=0", "fast")
        wait_drawn(page, "reward/mean")
        for _ in range(60):
            page.keyboard.press("Tab")
            style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert style != "none", page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            if (
                page.evaluate("document.activeElement.getAttribute('aria-label')")
                == "Training reward, mean [reward]: value at"
            ):
                break
        else:
            raise AssertionError("the chart was not reached")
        told = lambda: slider(page, "reward/mean").get_attribute("aria-valuetext")  # noqa: E731
        page.keyboard.press("Home")
        page.wait_for_timeout(100)
        assert told().startswith("step 1: ")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(100)
        assert told().startswith("step 1: ") or told().startswith("step 2: ")
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(100)
        assert told().startswith("step 29: ") and "grpo/seed=0" in told() and "fast" in told()
        page.keyboard.press("+")
        page.wait_for_selector("button.reset:visible")
        assert "from=" in page.url
        page.keyboard.press("Escape")
        page.wait_for_selector("button.reset", state="hidden")
        assert "from=" not in page.url


def test_zoom_by_dragging_and_back(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "fast")
        wait_drawn(page, "kl")
        slider(page, "kl").scroll_into_view_if_needed()
        box = slider(page, "kl").bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 60, steps=5)
        page.mouse.up()
        page.wait_for_selector("button.reset:visible")
        low, high = (float(page.url.split(f"&{key}=")[1].split("&")[0]) for key in ("from", "to"))
        assert 0 < low < high < 30 and float(slider(page, "entropy").get_attribute("aria-valuemin")) == low
        page.reload()
        page.wait_for_selector("button.reset:visible")
        wait_drawn(page, "kl")
        slider(page, "kl").dblclick()
        page.wait_for_selector("button.reset", state="hidden")


def test_seeds_are_a_band_and_runs_can_be_hidden(chromium: Any, url: str) -> None:  # noqa: F811
    seeds = [f"grpo/seed={seed}" for seed in range(3)]
    with opened(chromium, url) as page:
        at(page, "curves", *seeds, "fast")
        wait_drawn(page, "reward/mean")
        dots = page.locator('[data-metric="reward/mean"] .values .dot')
        assert dots.count() == 2  # three seeds together, and the other run
        page.uncheck("label:has-text('seeds as a band') input")
        assert dots.count() == 4 and "band=0" in page.url
        page.click(".legend .run:has-text('fast')")
        assert dots.count() == 3
        page.reload()
        page.wait_for_selector(".legend .run[aria-pressed=false]")
        wait_drawn(page, "reward/mean")
        assert dots.count() == 3 and page.get_attribute(".legend .run:has-text('fast')", "aria-pressed") == "false"


def test_smoothing_log_scale_and_other_axes(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "fast")
        wait_drawn(page, "loss")
        picture = lambda name: page.evaluate(  # noqa: E731
            '(n) => document.querySelector(`[data-metric="${n}"] canvas`).toDataURL()', name
        )
        before = picture("reward/mean")
        page.locator("#smooth").fill("60")
        assert picture("reward/mean") != before and "smooth=0.9" in page.url
        page.check("label:has-text('log scale') input")
        assert "log=1" in page.url
        page.fill("#find", "staleness")
        wait_drawn(page, "staleness/mean")
        assert page.locator(".chart").count() == 1
        for axis, said in (("time", r"\d+m\d\ds|\d+s"), ("tokens", r"[\d,]+")):
            page.select_option("#axis", axis)
            page.wait_for_timeout(300)
            wait_drawn(page, "staleness/mean")
            slider(page, "staleness/mean").focus()
            page.keyboard.press("End")
            page.wait_for_timeout(150)
            assert re.fullmatch(f"{axis} ({said})", values(page, "staleness/mean").split("\n")[0]), axis
        page.fill("#find", "no such figure")
        assert "No figure is called" in page.inner_text("#content")


def test_a_run_is_watched_while_it_goes_on(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = make(tmp_path / "runs" / "live", steps=0, ended=False)
    with serving(tmp_path / "runs") as address, going_on(run), opened(chromium, address) as page:
        at(page, "curves", "live")
        until(page, "document.querySelector('.status').textContent.includes('1 running')")
        append(run, 1, 5)
        page.wait_for_selector('[data-metric="reward/mean"]')
        wait_drawn(page, "reward/mean")
        text = (run / "metrics.jsonl").read_text()
        before = values(page, "reward/mean")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step":6,"reward/mean":0.87')
        page.wait_for_timeout(2500)
        assert values(page, "reward/mean") == before
        with (run / "metrics.jsonl").open("a") as file:
            file.write('654,"new/figure":1.5}\n')
        page.wait_for_selector('[data-metric="new/figure"]')
        until(page, "document.querySelector('[data-metric=\"reward/mean\"] .values').textContent === '0.877'")
        (run / "metrics.jsonl").write_text(text)  # a resume cut it back
        until(
            page,
            "(was) => document.querySelector('[data-metric=\"reward/mean\"] .values').textContent === was",
            arg=before,
        )
    assert not (run / ".lock").exists()


def test_who_types_goes_on_typing_when_a_run_ends(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = make(tmp_path / "runs" / "live", ended=False)
    with serving(tmp_path / "runs") as address, opened(chromium, address) as page:
        with going_on(run):
            at(page, "curves", "live")
            page.wait_for_selector(".legend .state.running")
            page.fill("#find", "rew")
        page.wait_for_selector(".legend .state.running", state="detached")
        page.keyboard.type("ard")
        assert page.input_value("#find") == "reward"


def test_a_hidden_tab_asks_nothing(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = make(tmp_path / "runs" / "live", ended=False)
    with serving(tmp_path / "runs") as address, going_on(run), opened(chromium, address) as page:
        at(page, "curves", "live")
        wait_drawn(page, "kl")
        hide = """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        until(page, "document.readyState === 'complete'")
        for _ in range(60):
            page.wait_for_timeout(50 * (not asked))
        assert asked  # it does ask while it is seen
        page.evaluate(hide, True)
        page.wait_for_timeout(300)
        asked.clear()
        page.wait_for_timeout(2200)
        assert not asked
        page.evaluate(hide, False)
        page.wait_for_timeout(500)
        assert asked


def test_a_hundred_thousand_steps(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = long(tmp_path / "runs" / "long", steps=100_000, figures=12)
    with serving(tmp_path / "runs") as address, opened(chromium, address) as page:
        at(page, "curves", "long")
        wait_drawn(page, "reward/mean")
        until(page, "document.querySelector('.status').textContent.includes('100,000 steps')", seconds=90)
        slider(page, "reward/mean").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Shift+ArrowRight")
        until(page, "document.querySelector('[data-metric=\"reward/mean\"] .where')?.textContent === 'step 10,000'")
        row = json.loads((run / "metrics.jsonl").read_bytes().splitlines()[9_999])
        shown = float(values(page, "reward/mean").split("\n")[1])
        assert row["step"] == 10_000 and shown == pytest.approx(row["reward/mean"], rel=1e-5)


def test_a_server_that_went_away_and_came_back(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = make(tmp_path / "runs" / "live", ended=False)
    quiet = ["ERR_", "Failed to load"]
    with serving(tmp_path / "runs") as address, going_on(run), opened(chromium, address, quiet=quiet) as page:
        at(page, "curves", "live")
        wait_drawn(page, "kl")
        page.route("**/api/**", lambda route: route.abort())
        page.wait_for_selector("#trouble:not([hidden])")
        assert "does not answer" in page.inner_text("#trouble") and drawn(page, "kl")
        page.unroute("**/api/**")
        page.wait_for_selector("#trouble", state="hidden")


def test_an_address_that_makes_no_sense(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "fast", more="&x=constructor&smooth=-3&from=abc&to=NaN&hide=nobody&log=yes&%E0%A4%A")
        wait_drawn(page, "kl")
        assert page.input_value("#axis") == "step" and page.is_hidden("button.reset")
        page.evaluate("location.hash = '#/no/such/view'")
        page.wait_for_selector("h1:text-is('Runs')")


def picture(page: Any, metric: str) -> str:
    return page.evaluate('(n) => document.querySelector(`[data-metric="${n}"] canvas`).toDataURL()', metric)


def test_a_chart_that_comes_into_sight_is_drawn_as_the_others_are(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url, viewport={"width": 700, "height": 500}) as page:
        at(page, "curves", "fast")
        wait_drawn(page, "reward/mean")
        metric = "speed/train"
        last = page.locator(f"[data-metric='{metric}']")
        last.scroll_into_view_if_needed()
        wait_drawn(page, metric)
        before = picture(page, metric)
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(300)
        page.locator("#smooth").fill("60")
        last.scroll_into_view_if_needed()
        for _ in range(60):
            page.wait_for_timeout(50 * (picture(page, metric) == before))
        assert picture(page, metric) != before


def test_a_run_has_no_value_beyond_its_end(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "short", "fast")
        wait_drawn(page, "kl")
        slider(page, "kl").focus()
        page.keyboard.press("End")
        until(page, "document.querySelector('[data-metric=\"kl\"] .where')?.textContent === 'step 30'")
        where, ended, other = values(page, "kl").split("\n")
        assert (where, ended) == ("step 30", "\u2013") and float(other) >= 0
        page.keyboard.press("Home")
        until(page, "document.querySelector('[data-metric=\"kl\"] .where')?.textContent === 'step 1'")
        assert "\u2013" not in values(page, "kl")


@pytest.mark.parametrize("value", [1e-6, 0.1])
def test_a_value_that_never_changes_is_a_line(chromium: Any, tmp_path: Path, value: float) -> None:  # noqa: F811
    """Smoothed, or as the mean of three seeds, it differs from itself in the last bit."""
    for seed in range(3):
        run = make(tmp_path / "runs" / f"seed={seed}", seed=seed, steps=0)
        (run / "metrics.jsonl").write_text("".join(line(step, {"lr": value}) for step in range(1, 31)))
    with serving(tmp_path / "runs") as address, opened(chromium, address) as page:
        at(page, "curves", *(f"seed={seed}" for seed in range(3)), more="&smooth=0.9")
        page.click("summary:has-text('Unchanged')")
        wait_drawn(page, "lr")
        page.uncheck("label:has-text('seeds as a band') input")
        wait_drawn(page, "lr")


def test_steps_between_the_first_two_questions_are_told(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    run = make(tmp_path / "runs" / "demo", steps=5)
    first = [True]

    def later(route: Any) -> None:
        if first.pop() if first else False:
            append(run, 6, 9)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(line(10, {"late/figure": 1.0}))
        route.continue_()

    with serving(tmp_path / "runs") as address, opened(chromium, address) as page:
        page.route("**/api/curves*", later)
        at(page, "curves", "demo")
        until(page, "document.querySelector('.status').textContent.startsWith('10 steps')")
        page.wait_for_selector('[data-metric="late/figure"]')


def test_a_band_keeps_every_peak(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        found = page.evaluate(
            """() => import("/static/smooth.js").then(({ band }) => band([{ x: [], y: [] },
            { x: [0, 2], y: [1, 1], min: [0, 1], max: [9, 1] }, { x: [0, 1, 5], y: [3, 3, 3] }]))"""
        )
    assert found == {"x": [0, 1, 2, 5], "y": [2, 2, 2, 3], "min": [0, 0.5, 1, 3], "max": [9, 5, 3, 3]}


def test_marks_of_an_axis_are_told_apart(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        told = lambda *given: page.evaluate(  # noqa: E731
            "(given) => import('/static/chart.js').then((m) => m.labels(...given))", list(given)
        )
        assert told([0, 0.025, 0.05], False) == ["0.000", "0.025", "0.050"]
        assert told([0, 0.00025, 0.001], False) == ["0", "2.5e-4", "1e-3"]
        assert told([0, -2e-10, -4e-10], False) == ["0", "-2e-10", "-4e-10"]
        assert told([0, 20_000, 1_500_000], False) == ["0", "20k", "1.5M"]
        assert told([1e-4, 0.001, None, 0.0596, 0.1, 1, 100, 20_000], True) == [
            "1e-4",
            "0.001",
            "",
            "",
            "0.1",
            "1",
            "100",
            "20k",
        ]


def test_the_pointer_shows_the_figure_the_runs_and_short_numbers(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    for name, value in (("one", 0.00000836823), ("two", 0.25)):
        run = make(tmp_path / "runs" / name, steps=0)
        text = "".join(line(n, {"kl": value * n, "staleness/max": 0.0}) for n in (1, 2, 3))
        (run / "metrics.jsonl").write_text(text)
    with serving(tmp_path / "runs") as address, opened(chromium, address, viewport=NARROW) as page:
        at(page, "curves", "one", "two", more="&band=0")
        wait_drawn(page, "kl")
        assert page.locator("[data-metric='staleness/max']:visible").count() == 0
        assert "1, 1 of them 0" in page.locator("summary:has-text('Unchanged')").inner_text()
        slider(page, "kl").hover(position={"x": 47, "y": 60})
        tip = page.locator("[data-metric=kl] .tip")
        tip.wait_for()
        assert tip.inner_text().split("\n") == ["KL [nats]", "step 1", "one", "8.37e-6", "two", "0.250"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
