"""The pictures of README.md, from real runs of the toy language: python -m tests.view.pictures [FOLDER]

FOLDER keeps the runs (default: runs/pictures); where they are there, only the pictures are made again. Five minutes on
two quiet cores the first time. `--look OUT` writes every view into OUT instead, light and dark, wide and narrow.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.view.browser import FLAGS, NARROW, opened, program, serving

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
TOY = ROOT / "recipes" / "toy" / "toy.py"
MOST = 150_000  # bytes of a picture
SMALL = {"width": 1180, "height": 720}
QUIET = ("threads=1", "track.console=off", "track.tensorboard=false", "model.dtype=float32")
WORDS = ("data.apply_chat_template=false", "checkpoint.every=0")


def birl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "birl", *words, *QUIET, *WORDS], cwd=ROOT, check=True)


def train(folder: Path) -> None:
    """A model that sorts digits a little, then GRPO with three seeds, and with another rate."""
    data = folder.resolve() / "data"
    subprocess.run([sys.executable, str(TOY), "make", str(data)], cwd=ROOT, check=True)
    sft = ("optimizer.lr=2e-3", "optimizer.schedule=linear", "batch_size=64", "epochs=8", f"run={data}/sft")
    birl("sft", f"model.path={data}/model", f"data.train={data}/sft.jsonl", "data.answer_column=answer", *sft)
    export = ("checkpoints", f"{data}/sft", "export", "last", f"{data}/begun")
    subprocess.run([sys.executable, "-m", "birl", *export], cwd=ROOT, check=True)
    for name, seed, rate in (("sort-0", 0, "4e-4"), ("sort-1", 1, "4e-4"), ("sort-2", 2, "4e-4"), ("slow", 0, "5e-5")):
        birl(
            *("rl", f"model.path={data}/begun", f"data.train={data}/rl.jsonl", f"reward={TOY}:partly"),
            *(f"data.validation={data}/held_out.jsonl", "validation.every=10", "validation.max_tokens=7"),
            *("rollout.prompts=32", "rollout.group_size=8", "rollout.max_tokens=7", "steps=60", f"seed={seed}"),
            *(
                f"optimizer.lr={rate}",
                "optimizer.warmup_steps=5",
                "algorithm.kl_coef=0.001",
                f"run={folder}/runs/{name}",
            ),
        )


def pictures(page: Any, out: Path) -> None:
    runs = {run["name"]: run["id"] for run in page.evaluate("fetch('/api/runs').then((a) => a.json())")["runs"]}
    every, one = "&".join(f"run={runs[name]}" for name in sorted(runs, reverse=True)), f"run={runs['sort-0']}"
    views = {"curves": f"{every}&smooth=0.75", "compare": every, "rollouts": f"{one}&row=2", "waiting": one}
    for view, query in views.items():
        page.evaluate("(to) => { location.hash = to; }", f"#/{view}?{query}")
        page.wait_for_selector(f"[aria-current=page][href^='#/{view}']")
        page.wait_for_timeout(2500)
        if view == "curves":
            box = page.locator("[role=slider]").first.bounding_box()
            page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60)
            page.wait_for_timeout(400)
        page.screenshot(path=out / f"view_{view}.png")
        page.mouse.move(0, 0)


def main(words: list[str]) -> int:
    from playwright.sync_api import sync_playwright

    look = Path(words[words.index("--look") + 1]) if "--look" in words else None
    folder = Path(next((word for word in words if not word.startswith("-") and word != str(look)), "runs/pictures"))
    if not (folder / "runs" / "slow" / "summary.json").exists():
        train(folder)
    shots: dict[str, Any] = {"": {"viewport": SMALL}}
    if look:
        shots |= {"dark": {"viewport": SMALL, "color_scheme": "dark"}, "narrow": {"viewport": NARROW}}
    with serving(folder / "runs") as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=list(FLAGS))
        for name, options in shots.items():
            out = (look or IMAGES) / name
            out.mkdir(parents=True, exist_ok=True)
            with opened(browser, url, **options) as page:
                pictures(page, out)
        browser.close()
    sizes = {path.name: path.stat().st_size for path in (look or IMAGES).glob("view_*.png")}
    print(sizes)
    return 0 if all(size <= MOST for size in sizes.values()) or look else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
