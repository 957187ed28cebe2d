"""The commands of the pages run, and their blocks are what they say."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.docs.commands import execute
from tests.docs.pages import PAGES, ROOT, blocks, commands
from tests.envs.browser.browsers import missing


def shell_blocks() -> list:
    """Each shell block, with the scripts of its page: Python that begins with `# its_name.py`."""
    found = []
    for page in PAGES:
        python = [text for language, text in blocks(page) if language == "python"]
        scripts = {m[1]: text for text in python if (m := re.match(r"# (\w+\.py)\n", text))}
        shell = [text for language, text in blocks(page) if language in ("sh", "bash")]
        found += [pytest.param(commands(t), scripts, id=f"{page.name}-{n}") for n, t in enumerate(shell, 1)]
    return found


@pytest.mark.parametrize(("block", "scripts"), shell_blocks())
def test_commands_work(
    block: list[list[str]],
    scripts: dict[str, str],
    demo: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if missing() and any("env=miniwob" in words for words in block):
        pytest.skip("no browser: make setup-browser")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path / "cache"))
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(demo, tmp_path / "runs" / "demo")
    for name, text in scripts.items():
        Path(name).write_text(text)
    for words in block:
        execute(words, tiny, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_what_they_say(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            compile(text, str(page), "exec")
        elif language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in text.encode().splitlines())
