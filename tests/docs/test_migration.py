"""The tables for those who come from TRL, verl and RL2: every key of birl exists, and no key of a peer comes twice."""

import re
from pathlib import Path

import pytest

from birl.config.peers import peers
from tests.docs.migration import page_of, written
from tests.docs.pages import CODE, DOCS, PEERS, tables
from tests.docs.test_names import KEYS


def rows(page: str) -> list[list[str]]:
    """Of all tables of a page that begin with the peer's name."""
    text = next(path for path in DOCS if path.name == page).read_text(encoding="utf-8")
    parts = text.split("\n## ")
    return [row for part in parts for row in tables(part).get(PEERS[page], [])]


@pytest.mark.parametrize("page", PEERS)
def test_every_key_of_birl_in_the_table_exists(page: str) -> None:
    found = rows(page)
    assert len(found) > 10
    wrong = [key for row in found for key in CODE.findall(row[1]) if key not in KEYS]
    assert not wrong


@pytest.mark.parametrize("name", peers())
def test_the_tables_are_those_that_hints_come_from(name: str) -> None:
    text = page_of(name).read_text(encoding="utf-8")
    assert written(text, peers()[name]) == text, "python -m tests.docs.migration writes them anew"


@pytest.mark.parametrize("page", PEERS)
def test_every_row_says_something(page: str) -> None:
    for row in rows(page):
        assert len(row) == 3 and CODE.findall(row[0]), row
        assert CODE.findall(row[1]) or row[2], f"{row[0]} has neither a key nor a word about it"


@pytest.mark.parametrize("page", PEERS)
def test_no_key_of_a_peer_comes_twice(page: str) -> None:
    text = Path(next(p for p in DOCS if p.name == page)).read_text(encoding="utf-8")
    for part in re.split(r"\n## ", text):
        keys = [key for row in tables(part).get(PEERS[page], []) for key in CODE.findall(row[0])]
        assert len(keys) == len(set(keys)), {key for key in keys if keys.count(key) > 1}
