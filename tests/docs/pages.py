"""The pages of the documentation, as the tests read them: fenced blocks, tables and what stands in backticks."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from birl.config.peers import peers

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *DOCS]
#: pages whose commands and names are not looked up, only their links
OTHERS = [
    ROOT / name for name in ("recipes/README.md", "recipes/toy/README.md", "benchmarks/README.md", "CONTRIBUTING.md")
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: pages for those who come from elsewhere, and what their tables' first column is called
PEERS = {f"from_{name}.md": peer.name for name, peer in peers().items()}
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return ((found[1], found[2]) for found in FENCE.finditer(page.read_text(encoding="utf-8")))


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def scripts(page: Path) -> dict[str, str]:
    """Its blocks of Python that begin with `# their_name.py`, by that name."""
    python = [text for language, text in blocks(page) if language == "python"]
    return {m[1]: text for text in python if (m := re.match(r"# (\w+\.py)\n", text))}


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by its first header cell."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        found[head[0]] = rows
    return found


def names(rows: list[list[str]]) -> set[str]:
    """What the first column has in backticks."""
    return {name for row in rows for name in CODE.findall(row[0])}


def spans(page: Path) -> list[str]:
    """Everything in single backticks."""
    return CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def preset_rows(page: Path) -> list[list[str]]:
    return tables(page.read_text(encoding="utf-8").partition("## Presets")[2]).get("preset", [])
