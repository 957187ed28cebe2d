"""Every view of the shell in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import NARROW, chromium, opened, serving, until  # noqa: F401  chromium is a fixture
from tests.view.runs import HOSTILE, append, going_on, long, make

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "runs"
    for seed in range(3):
        make(folder / "grpo" / f"seed={seed}", seed=seed)
    make(folder / "fast", seed=5, optimizer__lr=1e-4, model__path="models/other", algorithm__clip_high=0.28)
    make(folder / "broken", steps=12, ended=False)
    (folder / "broken" / "config.json").write_text('{"seed": 0,')
    make(folder / "empty", steps=0, ended=False)
    return folder


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


def ids(page: Any) -> dict[str, str]:
    """The id of each run, by name."""
    found = page.evaluate("fetch('/api/runs').then((answer) => answer.json())")["runs"]
    return {run["name"]: run["id"] for run in found}


def at(page: Any, view: str, *names: str, more: str = "") -> None:
    """Go to a view of these runs and wait until it is there."""
    known = ids(page)
    query = "&".join(f"run={known[name]}" for name in names)
    page.evaluate("(to) => { location.hash = to; }", f"#/{view}?{query}{more}")
    page.wait_for_selector(f"h1:text-is('{view.capitalize()}')")
    page.wait_for_selector(".view:not([aria-busy])")


def drawn(page: Any, metric: str) -> bool:
    """Whether the canvas of a metric has colours on it, other than the greys of axes."""
    return page.evaluate(
        """(name) => {
          const canvas = document.querySelector(`[data-metric="${name}"] canvas`);
          if (!canvas || !canvas.width) return false;
          const { data } = canvas.getContext("2d").getImageData(50, 0, canvas.width - 50, canvas.height - 25);
          for (let i = 0; i < data.length; i += 4) {
            const [r, g, b, a] = data.slice(i, i + 4);
            if (a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 60) return true;
          }
          return false;
        }""",
        metric,
    )


def wait_drawn(page: Any, metric: str) -> None:
    for _ in range(100):
        if drawn(page, metric):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{metric} was not drawn")


def values(page: Any, metric: str) -> str:
    return page.inner_text(f'[data-metric="{metric}"] .values')


def slider(page: Any, metric: str) -> Any:
    return page.locator(f'[data-metric="{metric}"] canvas[role=slider]')


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


def test_curves_are_drawn_and_say_exact_values(chromium: Any, url: str, runs: Path) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        at(page, "curves", "fast")
        wait_drawn(page, "reward/mean")
        rows = [json.loads(row) for row in (runs / "fast" / "metrics.jsonl").read_text().splitlines()]
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
        assert groups[0] == "overview" and {"outcome", "groups", "tokens", "time"} <= set(groups)


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
            if page.evaluate("document.activeElement.getAttribute('aria-label')") == "reward/mean: value at":
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
            assert wide[0] <= wide[1], (view, wide)  # only tables scroll, each in its own region
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
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[9_999])
        shown = float(values(page, "reward/mean").split("\n")[1])
        assert row["step"] == 10_000 and shown == pytest.approx(row["reward/mean"], rel=1e-5)


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
