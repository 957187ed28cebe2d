"""What MkDocs calls while it builds the site: pages that come from other files or from the code, and links to them.

The pages in docs/ are written for GitHub; nothing in them is particular to the site.
"""

import posixpath
import re
from functools import cache
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: pages of the site that are files elsewhere in the repository
OUTSIDE = {
    "recipes/README.md": "recipes_measured.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "THIRD_PARTY.md": "third_party.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {name: (ROOT / path).read_text(encoding="utf-8") for path, name in OUTSIDE.items()}
    for name, text in {**pages, **reference.pages(ROOT)}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    source = next((path for path, name in OUTSIDE.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return relinked(markdown, posixpath.dirname(source))


def on_page_content(content: str, **_: object) -> str:
    """Long names in tables may break behind a dot or an underscore."""
    return re.sub(r"(?<=<code>)[\w.]{24,}(?=</code>)", lambda m: re.sub(r"([._])", r"\1<wbr>", m[0]), content)


def relinked(markdown: str, folder: str) -> str:
    """Links as the site has them: pages stay links, other files of the repository become plain text."""
    parts, end = [], 0
    for fence in FENCED.finditer(markdown):
        parts += [LINK.sub(lambda m: _link(m, folder), markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(lambda m: _link(m, folder), markdown[end:])])


def _link(found: re.Match, folder: str) -> str:
    text, target, anchor = found[1], found[2], found[3] or ""
    path = posixpath.normpath(posixpath.join(folder, target))
    if text == target:  # a file's name says little on a site
        text = title(path)
    if path in OUTSIDE:
        return f"[{text}]({OUTSIDE[path]}{anchor})"
    if path == "docs" or path.startswith("docs/"):
        page = path.removeprefix("docs").removeprefix("/") or "README.md"
        return f"[{text}]({page}{anchor})"
    return text


@cache
def title(path: str) -> str:
    """The first heading of a page; for any other file its name."""
    if not path.endswith(".md"):
        return posixpath.basename(path)
    first = (ROOT / path).read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ")
