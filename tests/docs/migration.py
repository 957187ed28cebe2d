"""The tables of docs/from_*.md, from `birl/config/peers/*.toml`.

python -m tests.docs.migration        write them anew
"""

import re
from pathlib import Path

from birl.config.peers import Peer, Row, peers
from tests.docs.pages import ROOT

TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def page_of(name: str) -> Path:
    return ROOT / "docs" / f"from_{name}.md"


def table(peer: Peer, rows: list[Row]) -> str:
    lines = [f"| {peer.name} | birl | differs |", "|---|---|---|"]
    for row in rows:
        theirs, ours = (", ".join(f"`{word}`" for word in words) for words in (row.names, row.keys))
        lines.append(re.sub(r" +", " ", f"| {theirs} | {ours} | {row.note} |"))
    return "\n".join(lines) + "\n"


def written(text: str, peer: Peer) -> str:
    """The page with its tables as the data has them. Each is under a heading of its title."""
    parts = re.split(r"(?=^## )", text, flags=re.MULTILINE)
    for title, rows in peer.tables.items():
        number = next((i for i, part in enumerate(parts) if part.startswith(f"## {title}\n")), None)
        if number is None:
            parts[-1] = parts[-1].rstrip("\n") + "\n\n"
            parts.append(f"## {title}\n\n{table(peer, rows)}")
        else:
            parts[number] = TABLE.sub(lambda _, rows=rows: table(peer, rows), parts[number], count=1)
    return "".join(parts)


def main() -> None:
    for name, peer in peers().items():
        page = page_of(name)
        page.write_text(written(page.read_text(encoding="utf-8"), peer), encoding="utf-8")


if __name__ == "__main__":
    main()
