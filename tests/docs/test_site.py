"""The site: every page is in its navigation, its reference has every key, and it builds without a broken link."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from birl.cli.commands import ALL, CONFIGURED
from birl.config.keys import documentation
from birl.named import from_file
from tests.docs.pages import DOCS, FENCE, ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def in_navigation(tree: list | dict | str) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from in_navigation(branch)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return from_file(ROOT / "docs" / "_site" / "reference.py")


def test_every_page_is_in_the_navigation_once() -> None:
    told = list(in_navigation(CONFIG["nav"]))
    assert len(told) == len(set(told))
    missing = {path.name for path in DOCS} - set(told)
    assert not missing, "mkdocs.yml, nav"


def test_pages_from_elsewhere_take_no_page_s_place() -> None:
    text = (ROOT / "docs" / "_site" / "hooks.py").read_text(encoding="utf-8")
    outside = dict(re.findall(r'^    "([\w/]+\.md)": "(\w+\.md)",$', text, re.MULTILINE))
    assert "recipes/README.md" in outside and not set(outside.values()) & {path.name for path in DOCS}
    assert set(outside.values()) <= set(in_navigation(CONFIG["nav"]))


def test_every_page_is_in_the_list_of_pages() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in DOCS if f"]({path.name})" not in text and path.name != "README.md"]


def test_the_reference_has_every_key_with_its_default_and_meaning(reference: ModuleType) -> None:
    pages = reference.pages(ROOT)
    for name, schema in reference.COMMANDS.items():
        text = pages[f"reference/{name}.md"]
        rows = re.findall(r'^\| <span id="([^"]+)"></span>`([^`]+)` \| .* \| .* \| (.*) \|$', text, re.MULTILINE)
        assert sorted(key for key, _, _ in rows) == sorted(documentation(schema))
        assert all(key == again and meaning for key, again, meaning in rows)
    commands = re.findall(r"^## `birl (\w+)`$", pages["reference/commands.md"], re.MULTILINE)
    assert commands == [command.name for command in ALL if command.name not in CONFIGURED]
    assert (
        "`launch.partition`" in pages["reference/places.md"]
        and "`env.count`" in pages["reference/tasks.md"]
        and "birl checkpoints RUN" in pages["reference/commands.md"]
    )
    assert "::: birl.types" in pages["reference/api.md"]


def test_what_has_a_meaning_in_markdown_is_shown_as_it_is(reference: ModuleType) -> None:
    assert reference.text("a | b_c *d* <e> {f} `g|h`") == ("a &#124; b&#95;c &#42;d&#42; &lt;e&gt; &#123;f&#125; `g|h`")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_anchors_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for name, anchor in re.findall(r"\]\(([\w.]*)#([\w-]+)\)", text):
        other = FENCE.sub("", (page.parent / name).read_text(encoding="utf-8")) if name else text
        assert anchor in {slug(title) for title in re.findall(r"^#+ (.+)$", other, re.MULTILINE)}, (name, anchor)


def slug(title: str) -> str:
    """As GitHub and MkDocs make it."""
    return re.sub(r"[ -]+", "-", re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower())


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs `make docs`, which installs MkDocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = {p.relative_to(site).as_posix(): p.read_text(encoding="utf-8") for p in site.rglob("*.html")}
    for path in in_navigation(CONFIG["nav"]):
        assert path.replace("README.md", "index.html").replace(".md", ".html") in pages
    fetched = r'<(?:script|img|iframe)[^>]+src="https?://|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="https?://'
    assert not {name for name, text in pages.items() if re.search(fetched, text)}
    assert 'id="rollout.max_tokens"' in pages["reference/rl.html"]
    assert "Trainer" in pages["reference/api.html"] and "SamplingParams" in pages["reference/api.html"]
