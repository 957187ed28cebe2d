"""Accessibility: axe-core finds nothing serious or critical on any view."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from birl.view.command import STATIC
from tests.view.browser import NARROW, chromium, opened, serving  # noqa: F401  chromium is a fixture
from tests.view.runs import make

AXE = Path(__file__).parents[2] / ".venv-axe" / "package" / "axe.min.js"
VIEWS = ["", *sorted({"curves", "compare", "rollouts", "waiting"} & {path.stem for path in STATIC.glob("*.js")})]


@pytest.fixture(scope="module")
def source() -> str:
    if not AXE.is_file():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs axe-core: make setup-axe")
    return AXE.read_text("utf-8")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("axe")
    make(folder / "one", seed=0)
    make(folder / "two", seed=1, ended=False, optimizer__lr=1e-3)
    with serving(folder) as address:
        yield address


def violations(page: Any, source: str) -> list[str]:
    """What axe calls serious or critical, with the first place of each."""
    page.evaluate(source)  # through the debugger: the page's own policy lets no foreign script in
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{one['id']}: {one['help']} at {one['nodes'][0]['html'][:160]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view or "runs")
def test_axe_finds_nothing_serious(chromium: Any, source: str, view: str, url: str) -> None:  # noqa: F811
    for options in ({"color_scheme": "light"}, {"color_scheme": "dark", "viewport": NARROW}):
        with opened(chromium, url, quiet=["400"], **options) as page:  # a run without a trace has no waits
            runs = page.evaluate("fetch('/api/runs').then((a) => a.json())")["runs"]
            page.evaluate(
                "(to) => { location.hash = to; }", f"#/{view}?" + "&".join(f"run={run['id']}" for run in runs)
            )
            page.wait_for_selector(f"[aria-current=page][href^='#/{view}']")
            page.wait_for_timeout(500)
            page.wait_for_selector(".view:not([aria-busy])")
            assert not violations(page, source), options
