"""What the tests of several views ask of a page: its runs, and what is drawn in its charts."""

from typing import Any


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
    return page.locator(f'[data-metric="{metric}"] [role=slider]')
