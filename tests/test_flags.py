"""Flags of commands."""

from typing import Any

import pytest

from birl.errors import BirlError
from birl.flags import JSON, Flag, taken, whole

LIMIT = Flag(name="--limit", value="N", takes="a whole number, as in --limit 5", read=whole)


@pytest.mark.parametrize(
    ("words", "found", "rest"),
    [
        ("a --limit 3 b", {"--limit": 3}, ["a", "b"]),
        ("--limit=3 --json a=b", {"--limit": 3, "--json": True}, ["a=b"]),
        ("--limit 3 --limit=4", {"--limit": 4}, []),
        ("-flag:any", {}, ["-flag:any"]),
        ("", {}, []),
    ],
)
def test_flags_are_taken_out_of_the_words(words: str, found: dict[str, Any], rest: list[str]) -> None:
    assert taken("x", words.split(), (LIMIT, JSON)) == (found, rest)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--limit", "--limit takes a whole number, as in --limit 5"),
        ("--limit=", "--limit takes a whole number"),
        ("--limit --json", "not '--json'"),
        ("--limit ten", "not 'ten'"),
        ("--limt 3", "--limt: `birl x` has --limit N, --json. Did you mean --limit?"),
        ("--json=yes", "--json=yes: `birl x` has"),
    ],
)
def test_mistakes(words: str, said: str) -> None:
    with pytest.raises(BirlError) as caught:
        taken("x", words.split(), (LIMIT, JSON))
    assert said in str(caught.value)
