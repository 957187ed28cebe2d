"""Time that `birl view` takes to show runs of 10^5 steps, and CPU cost of a page that only watches.

    python -m benchmarks.view [--steps 100000] [--figures 40] [--runs 3] [--watch 20] [--json FILE]

`first_s`: from the page's address to drawn curves with a server that has read nothing, from samples of the files;
`read_s`: until they are read whole; `again_s`: the page once more; `zoom_s`: from the mouse button's release to other
curves; `idle_share`: CPU seconds of the server, Playwright and Chromium together per second that the page watches an
idle run.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import ROOT, machine

DRAWN = """() => [...document.querySelectorAll('.chart')].filter((c) => {
  const box = c.getBoundingClientRect();
  return box.top < innerHeight && box.bottom > 0;
}).every((c) => c.querySelector('.values .dot')) && document.querySelectorAll('.chart').length > 3"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 100_000, "figures": 40, "runs": 3, "watch": 20, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    from tests.view.runs import going_on, long

    with tempfile.TemporaryDirectory() as folder:
        made = [
            long(Path(folder) / f"run{i}", steps=options.steps, figures=options.figures, seed=i)
            for i in range(options.runs)
        ]
        size = sum((run / "metrics.jsonl").stat().st_size for run in made)
        rounds = [measured(folder, 0) for _ in range(options.rounds - 1)]
        with going_on(made[0]):
            rounds.append(measured(folder, options.watch))
    found = {name: statistics.median(r[name] for r in rounds if name in r) for name in rounds[-1]}
    print(f"view: {options.runs} runs x {options.steps} steps x {options.figures} figures, {size / 1e6:.0f} MB")
    for name, value in found.items():
        print(f"  {name:<12} {value:.3f}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(), "bytes": size, "found": found, "rounds": rounds}, indent=1)
        )
    return 0


def measured(folder: str, watch: int) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    from tests.view.browser import FLAGS, WIDE, program

    command = [sys.executable, "-m", "birl", "view", folder, "--no-browser", "--port", "0"]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        browser = playwright.chromium.launch(executable_path=program(), args=list(FLAGS))
        try:
            page = browser.new_context(viewport=WIDE).new_page()
            start = time.perf_counter()
            found = {"first_s": opened(page, url)}
            found["read_s"] = drawn(page, start, "!document.querySelector('.status').textContent.includes('reading')")
            found["server_mb"] = memory(server.pid)
            page.goto("about:blank")
            found["again_s"] = opened(page, url)
            found["zoom_s"] = zoomed(page)
            if watch:
                page.wait_for_timeout(1000)
                before = processor(server.pid, browser)
                page.wait_for_timeout(1000 * watch)
                found["idle_share"] = (processor(server.pid, browser) - before) / watch
            return found
        finally:
            browser.close()
            server.terminate()


def opened(page: Any, url: str) -> float:
    start = time.perf_counter()
    page.goto(url)
    return drawn(page, start)


def drawn(page: Any, start: float, ready: str = DRAWN) -> float:
    while not page.evaluate(ready):
        assert time.perf_counter() - start < 120, "the curves were not drawn"
        time.sleep(0.01)
    return time.perf_counter() - start


def zoomed(page: Any) -> float:
    """Wait until the response for the zoomed range has arrived and two frames were painted."""
    box = page.locator("canvas[role=slider]").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 50, steps=3)
    with page.expect_response(lambda answer: "/api/curves" in answer.url and "from=" in answer.url):
        start = time.perf_counter()
        page.mouse.up()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - start


def memory(pid: int) -> float:
    """Resident MB; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        for row in Path(f"/proc/{pid}/status").read_text().splitlines():
            if row.startswith("VmRSS:"):
                return int(row.split()[1]) / 1000
    return 0.0


def processor(pid: int, browser: Any) -> float:
    """CPU seconds so far of the server, and of this process's other descendants: Playwright and Chromium."""
    parents, times = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                times[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(one: int) -> bool:
        while one in parents:
            if one == os.getpid():
                return True
            one = parents[one]
        return False

    return sum(seconds for one, seconds in times.items() if one != os.getpid() and ours(one))


if __name__ == "__main__":
    sys.exit(main())
