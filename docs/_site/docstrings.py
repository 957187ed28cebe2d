"""How docstrings become Markdown: examples are code, and what else has a meaning in Markdown is shown as it is."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example: (.+(?:\n(?!\n).+)*)", re.MULTILINE)


class Plain(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Indented blocks stay code; outside of them and of backticks, brackets, stars and `<` are escaped."""
    pieces, end = [], 0
    for found in EXAMPLE.finditer(text):
        pieces += [escaped(text[end : found.start()]), f"```python\n{dedented(found[1])}\n```\n"]
        end = found.end()
    return "".join([*pieces, escaped(text[end:])])


def dedented(code: str) -> str:
    first, *rest = code.splitlines()
    return "\n".join([first, *(line.strip().rjust(len(line.strip()) + 4) for line in rest)])


def escaped(text: str) -> str:
    lines = []
    for line in text.splitlines(keepends=True):
        pieces = [line] if line.startswith("    ") else re.split(r"(`[^`\n]+`)", line)
        lines += [p if p.startswith(("`", "    ")) else re.sub(r"([\[\]<*])", r"\\\1", p) for p in pieces]
    return "".join(lines)
