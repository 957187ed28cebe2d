"""The commands of the pages run, and their blocks are what they say."""

import json
import re
import shutil
from pathlib import Path

import pytest

from birl.config.load import load_with_choices, run_folder
from birl.config.schema import TRAINING
from tests.docs.commands import execute
from tests.docs.pages import PAGES, ROOT, blocks, commands, scripts
from tests.envs.browser.browsers import missing


def shell_blocks() -> list:
    """Each shell block, with the scripts of its page: Python that begins with `# its_name.py`."""
    found = []
    for page in PAGES:
        shell = [text for language, text in blocks(page) if language in ("sh", "bash")]
        found += [pytest.param(commands(t), scripts(page), id=f"{page.name}-{n}") for n, t in enumerate(shell, 1)]
    return found


@pytest.mark.parametrize(("block", "own"), shell_blocks())
def test_commands_work(
    block: list[list[str]], own: dict[str, str], demo: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing() and any("env=miniwob" in words for words in block):
        pytest.skip("no browser: make setup-browser")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIRL_CACHE", str(demo.parent / "cache"))  # one for all: kernels and proofs are made once
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(demo, tmp_path / "runs" / "demo")
    for name, text in own.items():
        Path(name).write_text(text)
    for words in block:
        execute(words, tiny, monkeypatch)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_pages_name_files_that_a_reader_has(page: str) -> None:
    """In the repository, or with the words to save them as that."""
    text = (ROOT / page).read_text(encoding="utf-8")
    shell = "\n".join(block for language, block in blocks(ROOT / page) if language == "sh")
    files = set(re.findall(r"[\w./-]+\.(?:jsonl|csv|yaml|py)\b", " ".join(w for c in commands(shell) for w in c)))
    assert files
    assert not {name for name in files if not (ROOT / name).is_file() and f"as `{name}`" not in text}


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_runs_of_the_first_pages_have_folders_of_their_own(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader types one after the other, and a folder with another configuration is refused."""
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in scripts(ROOT / page).items():
        Path(name).write_text(text)
    text = (ROOT / page).read_text(encoding="utf-8")
    typed = [words[1:] for language, block in blocks(ROOT / page) if language == "sh" for words in commands(block)]
    runs = [w for w in typed if w and w[0] in TRAINING and not any(word.startswith("--") for word in w)]
    folders = [run_folder(*load_with_choices(TRAINING[command], words)) for command, *words in runs]
    folders += re.findall(r'output_dir="(.+?)"', text)
    assert len(folders) == len(set(folders)) == len(runs) + len(re.findall(r"= Trainer\(", text)), folders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_what_they_say(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            compile(text, str(page), "exec")
        elif language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in text.encode().splitlines())
