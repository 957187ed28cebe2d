"""The list of rollouts and the page of one episode, in a real browser."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import NARROW, chromium, opened, serving, until  # noqa: F401  chromium is a fixture
from tests.view.made import QUESTION, record, run_folder, spoken, write
from tests.view.runs import going_on
from tests.view.test_axe import source, violations  # noqa: F401  source is a fixture

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
    "\x1b[2J\x00 \u202egnirts\u202c \u2066 שלום עולם 👩‍👩‍👧 🙂 </span></bdi> ${x} \u2028 {{7*7}} " + "w" * 300
)
TALK = [
    ("<|im_start|>system\nBe brief.<|im_end|>\n" + QUESTION, False),
    ('I add. <tool_call>{"name": "add", "arguments": {"a": 3, "b": "<b>4"}}</tool_call><|im_end|>', True),
    ("\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n", False),
    ("So it\tis 7. 🙂<|im_end|>", True),
]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def lines() -> list[Any]:
    turns = [{"agent": "", "reward": 0.0, "text": ""}, {"agent": "", "reward": 1.0, "text": ""}]
    rows = [spoken(TALK, step=1, group=0, episode=0, turns=turns, pictures=["screenshots/000.png"])]
    rows.append(
        spoken(
            [(QUESTION, False), (HOSTILE, True)],
            step=1,
            group=0,
            episode=1,
            reward=0.0,
            score=0.0,
            task=HOSTILE,
            answer=HOSTILE,
            detail=HOSTILE,
        )
    )
    rows.append(
        record(
            step=1,
            group=0,
            episode=2,
            outcome="env_error",
            detail="it broke",
            samples=[],
            text="",
            reward=None,
            score=None,
            advantage=None,
        )
    )
    return rows + [
        record(step=s, group=s, episode=e, said=s % 7 + e, text=f"step {s}") for s in range(2, 40) for e in range(4)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = run_folder(tmp_path_factory.mktemp("rollouts") / "demo", lines())
    (made / "screenshots").mkdir()
    (made / "screenshots" / "000.png").write_bytes(PNG)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(folder) as address:
        yield f"{address}#/rollouts?run={_id(folder)}"


def _id(folder: Path) -> str:
    from birl.view.folders import Runs

    return next(iter(Runs([folder]))).id


def loaded(page: Any, count: str | None = None) -> None:
    page.wait_for_selector(".rows .row .start", state="attached")
    if count is not None:
        until(page, "text => document.querySelector('.counts').textContent.startsWith(text)", count)


def chosen(page: Any) -> str:
    return page.locator(".row.now .step").inner_text()


def test_the_list_is_searched_and_sorted(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        loaded(page, "155 of 155 episodes")
        page.fill("#where", "outcome = 'env_error'")
        page.keyboard.press("Enter")
        loaded(page, "1 of 155")
        assert page.locator(".rows .row").count() == 1 and "q=outcome+%3D+%27env_error%27" in page.url
        page.get_by_role("button", name="longest").click()
        loaded(page, "155 of 155")
        tokens = [int(text) for text in page.locator(".rows .row > :nth-child(5)").all_inner_texts()]
        assert tokens == sorted(tokens, reverse=True) and tokens[0] > 300
        page.get_by_role("button", name="step").click()
        page.wait_for_selector("[role=columnheader][aria-sort=descending]:has-text('step')")
        until(page, "() => document.querySelector('.rows .row .step')?.textContent === '39'")
        page.reload()
        loaded(page, "155 of 155")
        assert page.input_value("#where") == "order by step desc"


def test_a_mistake_in_the_query_is_told(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url, quiet=["400"]) as page:
        loaded(page)
        page.fill("#where", "rewrad>=1")
        page.keyboard.press("Enter")
        assert "Did you mean reward?" in page.locator("[role=alert]").inner_text()
        page.fill("#where", "reward>=1")
        page.keyboard.press("Enter")
        loaded(page, "153 of 155")
        assert page.locator("[role=alert]").count() == 0


def test_everything_by_keyboard(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        loaded(page, "155")
        page.keyboard.press("/")
        page.keyboard.press("Tab")
        page.keyboard.type("step>1 order by step")
        page.keyboard.press("Enter")
        loaded(page, "152 of 155")
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.getAttribute('role')") == "grid"
        for key in ("j", "ArrowDown", "j", "j", "k"):
            page.keyboard.press(key)
        assert page.locator(".row.now").get_attribute("data-at") == "3" and chosen(page) == "2"
        page.keyboard.press("End")
        until(page, "() => document.querySelector('.row.now .step')?.textContent === '39'")
        page.keyboard.press("Home")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".talk")
        assert page.locator("h1").inner_text() == "Step 2, train.jsonl:2, answer 2"
        page.keyboard.press("j")
        page.wait_for_selector("h1:has-text('answer 3')")
        page.keyboard.press("k")
        page.wait_for_selector("h1:has-text('answer 2')")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.wait_for_url("**token=4*")
        assert "4 of 6" in page.locator(".panel").inner_text()
        page.keyboard.press("Escape")
        loaded(page, "152 of 155")
        assert page.locator(".row.now").get_attribute("data-at") == "1"
        assert page.input_value("#where") == "step>1 order by step"


def test_an_episode_shows_turns_calls_pictures_and_values(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, f"{url}&row=0") as page:
        page.wait_for_selector(".cards")
        heads = page.locator(".block h3").all_inner_texts()
        assert [h.split()[0] for h in heads] == ["system", "user", "model", "tool", "model"]
        assert heads[2].split(maxsplit=1)[1] == "turn 1 · reward 0" and heads[4].endswith("reward 1")
        call = page.locator(".call").inner_text()
        assert call.startswith("calls add") and '"b": "<b>4"' in call
        assert page.locator(".pictures img").count() == 1
        until(page, "() => document.querySelector('.pictures img').naturalWidth === 1")
        assert page.locator(".tok .byte").all_inner_texts() == ["F0", "9F", "99", "82"]
        assert page.locator(".ws.tab").count() == 1
        own = page.locator(".tok:not(.given)")
        own.nth(0).hover()
        panel = page.locator(".panel").inner_text()
        for word in ("log-prob", "advantage", "ratio", "mismatch", "entropy", "version", "generated by the model"):
            assert word in panel
        for key in ("advantage", "logprob", "ratio", "mismatch", "entropy", "version", "mask", "none"):
            page.select_option("#colour", key)
            coloured = page.evaluate(
                "[...document.querySelectorAll('.tok')].map(t => getComputedStyle(t).backgroundColor)"
                ".filter(colour => colour !== 'rgba(0, 0, 0, 0)').length"
            )
            assert (coloured > 0) == (key != "none"), key
            assert page.locator(".legend .step").count() == {
                "none": 0,
                "mask": 2,
                "version": 2,
                "advantage": 11,
                "ratio": 7,
            }.get(key, 6)


def test_a_link_selects_its_token(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, f"{url}&row=1&token=400", viewport={"width": 700, "height": 500}) as page:
        page.wait_for_selector("#t400.here")
        box = page.locator("#t400").bounding_box()
        assert box and 0 <= box["y"] <= 500
        assert "400 of" in page.locator(".panel").inner_text()
        page.locator("#t399").click()
        assert "token=399" in page.url
    with opened(chromium, f"{url}&row=1&token=99999") as page:
        page.wait_for_selector(".talk")


def test_hostile_text_is_only_text(chromium: Any, url: str) -> None:  # noqa: F811
    for view in ("&q=order by step", "&row=1"):
        with opened(chromium, url + view) as page:
            page.wait_for_selector(".cards" if "row" in view else ".rows .row .start")
            shown = page.locator("main").inner_text()
            assert "<script>" in shown and "⟪U+001B⟫" in shown and "⟪U+202E⟫" in shown
            assert page.title() == "Rollouts · birl"
            assert page.locator("main script, main img").count() == 0
            text = page.evaluate("document.querySelector('main').textContent")
            assert not any(char in text for char in "\x1b\x00\u202e\u2066\u2028")
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, view


def test_a_group_stands_side_by_side(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, f"{url}&row=1") as page:
        page.wait_for_selector(".cards")
        assert [h.split(" advantage")[0] for h in page.locator(".card h3").all_inner_texts()] == [
            "answer 1 1",
            "answer 2 0",
            "answer 3 \u2013",
        ]
        assert "it broke" in page.locator(".card").nth(2).inner_text()
        page.get_by_role("link", name="answer 1", exact=True).click()
        page.wait_for_selector("h1:has-text('answer 1')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [None, NARROW], ids=["wide", "narrow"])
def test_it_can_be_read_by_everybody(chromium: Any, source: str, url: str, scheme: str, viewport: Any) -> None:  # noqa: F811
    options = {"color_scheme": scheme} | ({"viewport": viewport} if viewport else {})
    for view, there in (("", ".rows .row .start"), ("&row=0", ".cards"), ("&row=1&token=30", ".cards")):
        with opened(chromium, url + view, **options) as page:
            page.wait_for_selector(there)
            page.wait_for_timeout(200)
            assert not violations(page, source), (view, options)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, view


def test_strong_colours_leave_text_readable(chromium: Any, source: str, url: str) -> None:  # noqa: F811
    for scheme in ("light", "dark"):
        with opened(chromium, f"{url}&row=0", color_scheme=scheme) as page:
            page.wait_for_selector(".cards")
            for key in ("advantage", "logprob", "ratio", "mismatch", "entropy", "version", "mask"):
                page.select_option("#colour", key)
                assert not violations(page, source), (scheme, key)


def test_a_running_run_grows_on_the_page(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = run_folder(tmp_path / "demo", lines()[:10])
    with (
        going_on(folder),
        serving(folder) as address,
        opened(chromium, f"{address}#/rollouts?run={_id(folder)}") as page,
    ):
        loaded(page, "10 of 10")
        with (folder / "rollouts.jsonl").open("ab") as file:
            file.write(b"{broken\n")
        write(folder / "rollouts.jsonl", lines()[10:14], "ab")
        loaded(page, "14 of 14")
        assert "1 broken line passed over, first line 11" in page.locator(".counts").inner_text()
        assert page.locator(".rows .row").count() == 14


def test_an_address_names_a_row_that_was_not_read_yet(
    chromium: Any,  # noqa: F811
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> None:
    monkeypatch.setattr("birl.view.episodes.BLOCK", 4000)
    monkeypatch.setattr("birl.view.rollouts.PATIENCE", 0.0)
    with serving(folder) as address, opened(chromium, f"{address}#/rollouts?run={_id(folder)}&at=150") as page:
        loaded(page, "155 of 155")
        page.wait_for_selector(".row.now[data-at='150']")
        assert "at=150" in page.url


def test_a_list_that_was_left_changes_no_address(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        loaded(page)
        held: list[Any] = []
        page.route("**/api/rollouts?*", lambda route: held.append(route))
        page.evaluate("(to) => { location.hash = to; }", url.split("/", 3)[3] + "&at=5")
        while not held:
            page.wait_for_timeout(20)
        page.evaluate("location.hash = '#/'")
        page.wait_for_selector("tbody tr")
        page.evaluate("document.getElementById('said').textContent = ''")
        for route in held:
            route.continue_()
        page.wait_for_timeout(500)
        assert page.url.endswith("#/") and not page.locator("#said").inner_text()


def test_rows_that_a_resume_wrote_again_are_shown_anew(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = run_folder(tmp_path / "demo", [record(step=s, text=f"first {s}") for s in range(150)])
    with (
        going_on(folder),
        serving(folder) as address,
        opened(chromium, f"{address}#/rollouts?run={_id(folder)}") as page,
    ):
        loaded(page, "150 of 150")
        assert page.locator(".rows .row .start").first.inner_text() == "first 149"
        write(folder / "rollouts.jsonl", [record(step=s, text=f"again {s}") for s in range(150)])
        page.wait_for_selector(".rows .row .start:has-text('again 149')")


def test_a_server_that_is_away_empties_no_list(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = run_folder(tmp_path / "demo", lines()[:10])
    with (
        going_on(folder),
        serving(folder) as address,
        opened(chromium, f"{address}#/rollouts?run={_id(folder)}", quiet=["ERR_", "Failed to load"]) as page,
    ):
        loaded(page, "10 of 10")
        page.route("**/api/**", lambda route: route.abort())
        page.wait_for_selector("[role=alert]")
        assert page.locator(".rows .row .start").count() == 10 and "No matches" not in page.inner_text("main")


def test_two_keys_go_two_episodes_on(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, f"{url}&q=step%3E1&row=3&at=0", quiet=["ERR_", "Failed to load"]) as page:
        page.wait_for_selector(".cards")
        page.evaluate("['j', 'j'].forEach((key) => document.dispatchEvent(new KeyboardEvent('keydown', { key })))")
        page.wait_for_selector("h1:has-text('answer 3')")
        page.wait_for_selector(".cards")  # nothing is under way any more when requests begin to fail
        page.route("**/api/**", lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'j' }))")
        page.wait_for_selector("#trouble:not([hidden])")


def test_the_colours_of_a_very_long_episode(chromium: Any, url: str) -> None:  # noqa: F811
    with opened(chromium, url) as page:
        legend = page.evaluate(
            """() => import("/static/tokens.js").then(({ paint }) => paint(document.createElement("div"), "advantage",
            Array.from({ length: 300000 }, (_, n) => ({ n, mask: 1, advantage: n / 300000 }))).textContent)"""
        )
        assert "\u22121" in legend


def test_a_run_without_rollouts_says_why(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = run_folder(tmp_path / "demo", [])
    (folder / "rollouts.jsonl").unlink()
    with serving(folder) as address, opened(chromium, f"{address}#/rollouts") as page:
        page.get_by_role("link", name="demo").click()
        page.wait_for_selector(".note:has-text('track.rollouts=false')")


def test_a_hundred_thousand_rows_scroll(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    folder = run_folder(tmp_path / "demo", [])
    line = json.dumps(record(step=1, text="STEP"), separators=(",", ":"))
    head, tail = line.split('"step":1,', 1)
    with (folder / "rollouts.jsonl").open("w") as file:
        for n in range(100_000):
            file.write(f'{head}"step":{n // 100},{tail.replace("STEP", f"row {n}")}\n')
    with serving(folder) as address, opened(chromium, f"{address}#/rollouts?run={_id(folder)}") as page:
        for _ in range(3):  # a busy machine may take longer than one wait to read the file
            with suppress(AssertionError):
                loaded(page, "100,000 of 100,000")
        assert page.locator(".rows .row").count() < 60  # those that can be seen
        grid = page.locator(".grid")
        grid.evaluate("grid => { grid.scrollTop = grid.scrollHeight; }")
        page.wait_for_selector(".rows .row .start bdi:text-is('row 99')")
        grid.evaluate("grid => { grid.scrollTop = (grid.scrollHeight - grid.clientHeight) / 2; }")
        until(
            page,
            "() => /row (49|50)\\d{3}$/.test(document.querySelector('.rows .row:nth-child(9) .start')?.textContent)",
        )
        grid.focus()
        page.keyboard.press("End")
        page.wait_for_selector(".row.now .start bdi:text-is('row 99')")
        page.fill("#where", "step>700")
        page.fill("#has", "row 77777")
        page.keyboard.press("Enter")
        loaded(page, "1 of")
