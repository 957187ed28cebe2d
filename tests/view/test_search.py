import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birl.errors import BirlError
from birl.view import episodes as reader
from birl.view import search as module
from birl.view.episodes import OUTCOMES, Episodes
from birl.view.flags import NAMES
from birl.view.query import FIELDS, Between, OneOf, Query, Said
from birl.view.search import Search
from tests.view.made import record, write

LONG = "Forty characters are the least that is looked at, so here they are."


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Episodes:
    rows = [
        record(step=1, group=0, reward=1.0, text="It is 7."),
        record(step=1, group=1, reward=0.0, text="It is SEVEN", outcome="truncated", said=50, source="gsm8k"),
        record(step=2, group=2, reward=1.0, text="seven, of course", said=9),
        record(step=2, group=3, reward=None, score=None, advantage=None, text="", outcome="env_error", said=0),
        record(step=3, group=4, reward=0.5, advantage=-1.5, text=r"\boxed{} a/b 'x' \"y\" ½ 🙂", said=20),
        record(step=30, group=5, reward=-1.0, text="no\nno", task="other:1", said=3),
    ]
    found = Episodes(write(tmp_path_factory.mktemp("search") / "rollouts.jsonl", rows))
    found.read_on()
    return found


def rows(episodes: Episodes, query: str) -> list[int]:
    found = Search(episodes, Query.parse(query))
    assert found.go_on()
    return found.rows.tolist()


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("reward>=1", [0, 2]),
        ("reward>=1 -/\\d/", [2]),
        ("reward<1", [1, 4, 5]),
        ("-reward>=0", [3, 5]),
        ("reward=0.5", [4]),
        ("reward!=1", [1, 3, 4, 5]),
        ("reward:-1..0", [1, 5]),
        ("step:2", [2, 3]),
        ("step:2..3", [2, 3, 4]),
        ("step:3..", [4, 5]),
        ("step:..1", [0, 1]),
        ("step>1 step<30", [2, 3, 4]),
        ("advantage<-1", [4]),
        ("outcome:truncated", [1]),
        ("outcome:truncated,env_error", [1, 3]),
        ("-outcome:ok", [1, 3]),
        ("source:gsm8k", [1]),
        ("source:nowhere", []),
        ("task:other", [5]),
        ("task:train.jsonl:1", [1]),
        ("seven", [1, 2]),
        ("SEVEN -course", [1]),
        ('"of course"', [2]),
        ('"It is"', [0, 1]),
        ("/seven/", [2]),
        ("/seven/i", [1, 2]),
        ("/^no$/m", [5]),
        ("/no.no/s", [5]),
        (r"/a\/b/", [4]),
        ("🙂", [4]),
        ("½", [4]),
        ("flag:format", [4]),
        ("flag:any", [1, 2, 4, 5]),
        ("flag:none", [0, 3]),
        ("flag:none,format", [0, 3, 4]),
        ("flag:any,format", [1, 2, 4, 5]),
        ("flag:any,none", [0, 1, 2, 3, 4, 5]),
        ("-flag:any", [0, 3]),
        ("sort:-tokens", [1, 4, 2, 0, 5, 3]),
        ("sort:reward", [5, 1, 4, 0, 2, 3]),
        ("sort:-reward", [0, 2, 4, 1, 5, 3]),
        ("reward>=0.5 sort:-tokens", [4, 2, 0]),
        ("  step:2\t reward>=1 ", [2]),
    ],
)
def test_queries(episodes: Episodes, query: str, wanted: list[int]) -> None:
    assert rows(episodes, query) == wanted


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("rewrad>=1", "there is no rewrad.*Did you mean reward"),
        ("reward>=one", "reward>=one: one is no number"),
        ("reward>=", "nothing is no number"),
        ("reward:nan", "nan is no number"),
        ("step:1...2", "the smaller number comes first"),
        ("outcome:good", "outcome is one of ok, truncated"),
        ("outcome:trunkated", "Did you mean truncated"),
        ("outcome>ok", "outcome has names, not numbers"),
        ("outcome:", "outcome is one of"),
        ("flag:loud", "flag is one of repetition"),
        ("sort:text", "write sort:reward or sort:-tokens"),
        ("sort>tokens", "write sort:reward or sort:-tokens"),
        ("/(/", r"/\(/ is no regular expression"),
        ("/a/x", "there is no mode x"),
        (f"/{'a' * 301}/", "may have 300 characters"),
        ("/never closed", "not closed"),
        ('"never closed', "not closed"),
        ('"a"b', "stands right"),
        ("x=3", "there is no x; .*write it in quotes"),
    ],
)
def test_what_cannot_be_understood_is_named(query: str, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        Query.parse(query)


NUMBERS = st.one_of(st.integers(-(10**6), 10**6).map(float), st.floats(allow_nan=False, allow_infinity=False))
NEGATED = st.booleans()
BETWEEN = st.one_of(
    st.builds(
        lambda f, a, b, n: Between(field=f, low=min(a, b), high=max(a, b), negated=n),
        st.sampled_from(FIELDS),
        NUMBERS,
        NUMBERS,
        NEGATED,
    ),
    st.builds(
        lambda f, a, o, n: Between(field=f, low=a, low_open=o, negated=n),
        st.sampled_from(FIELDS),
        NUMBERS,
        NEGATED,
        NEGATED,
    ),
    st.builds(
        lambda f, a, o, n: Between(field=f, high=a, high_open=o, negated=n),
        st.sampled_from(FIELDS),
        NUMBERS,
        NEGATED,
        NEGATED,
    ),
)
ANY = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=","), min_size=1)


def names(values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.sets(values, min_size=1, max_size=3).map(sorted).map(tuple)


ONE_OF = st.one_of(
    st.builds(OneOf, field=st.just("outcome"), names=names(st.sampled_from(OUTCOMES)), negated=NEGATED),
    st.builds(OneOf, field=st.just("flag"), names=names(st.sampled_from([*NAMES, "any", "none"])), negated=NEGATED),
    st.builds(OneOf, field=st.sampled_from(["source", "task"]), names=names(NAME), negated=NEGATED),
)
SAID = st.one_of(
    st.builds(Said, text=ANY, negated=NEGATED),
    st.builds(
        Said,
        text=st.sampled_from(["a+", r"\d", "x y", r"a\/b", "^$"]),
        is_pattern=st.just(True),
        mode=st.sampled_from(["", "i", "ims"]),
        negated=NEGATED,
    ),
)
QUERIES = st.builds(
    lambda columns, said, sort: Query(columns=tuple(columns), said=tuple(said), sort=sort),
    st.lists(st.one_of(BETWEEN, ONE_OF), max_size=4),
    st.lists(SAID, max_size=3),
    st.sampled_from(["", *FIELDS, *(f"-{f}" for f in FIELDS)]),
)


@given(QUERIES)
def test_a_query_that_is_written_is_read_as_the_same(query: Query) -> None:
    assert Query.parse(str(query)) == query


@given(st.text())
def test_any_text_is_a_query_or_a_named_mistake(text: str) -> None:
    try:
        query = Query.parse(text)
    except BirlError as error:
        assert str(error)
    else:
        assert Query.parse(str(query)) == query


@given(BETWEEN)
def test_a_term_and_its_opposite_share_the_rows_out(between: Between) -> None:
    values = np.array([-1e6, -1.5, 0, 0.5, 1, 7, 1e6, np.nan])
    table = np.zeros(len(values), [(name, "<f8") for name in FIELDS])
    table[between.field] = values
    fits = between.fits(table, None)  # type: ignore[arg-type]
    assert not fits[-1]  # no number is in no range
    inside = [between.low <= v <= between.high for v in values[:-1]]
    edge = [(between.low_open and v == between.low) or (between.high_open and v == between.high) for v in values[:-1]]
    assert fits[:-1].tolist() == [i and not e for i, e in zip(inside, edge, strict=True)]


def test_a_search_goes_on_where_it_stopped_and_finds_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK", 8)
    path = write(tmp_path / "rollouts.jsonl", [record(step=n, text=f"number {n % 3}") for n in range(60)])
    episodes = Episodes(path)
    episodes.read_on()
    search = Search(episodes, Query.parse('"number 1" sort:-step'))
    looks = 1
    while not search.go_on(0):
        looks += 1
        assert search.rows.tolist() == sorted(search.rows.tolist(), reverse=True)
    assert looks >= 7 and search.rows.tolist() == list(range(58, 0, -3))
    write(path, [record(step=61, text="number 1 again")], "ab")
    episodes.read_on()
    assert search.go_on() and search.rows[0] == 60 and len(search.rows) == 21


def test_a_search_begins_anew_when_rows_were_taken_back(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [record(step=n, text="old") for n in range(9)])
    episodes = Episodes(path)
    episodes.read_on()
    search = Search(episodes, Query.parse("old"))
    search.go_on()
    write(path, [record(step=1, text="new"), record(step=2, text="old")])
    episodes.read_on()
    assert search.go_on() and search.rows.tolist() == [1]


def test_a_search_in_a_file_that_is_being_read_sees_flags_of_groups_that_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BLOCK", 3000)
    path = write(tmp_path / "rollouts.jsonl", [record(group=n // 5, text=f"{LONG} {n // 5}") for n in range(80)])
    episodes = Episodes(path)
    search, looks = Search(episodes, Query.parse("flag:duplicate")), 1
    while not episodes.read_on(0):
        search.go_on()
        looks += 1
    assert search.go_on() and search.rows.tolist() == list(range(80)) and looks > 5


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*a){25}", r"(?:a?){60}a{60}x"])
def test_a_catastrophic_expression_is_given_up(tmp_path: Path, pattern: str) -> None:
    """Each of them would take longer than anybody waits."""
    path = write(tmp_path / "rollouts.jsonl", [record(text="a" * 2000 + "!b") for _ in range(30)])
    episodes = Episodes(path)
    episodes.read_on()
    search, start = Search(episodes, Query.parse(f"/{pattern}/")), time.monotonic()
    try:
        search.go_on()
    except BirlError as error:
        assert "took more than 0.05 s on 20 answers" in str(error)
    assert time.monotonic() - start < 300


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{1,9999}){1,9999}){1,9999}",
        "a{99999999}",
        "(?R)",
        "(" * 150 + "a" + ")" * 150,
        "[[:alpha:]--[a]]",
        "(?e)(abc){e<=9}",
    ],
)
def test_a_strange_expression_does_no_harm(episodes: Episodes, pattern: str) -> None:
    start = time.monotonic()
    try:
        rows(episodes, f"/{pattern}/")
    except BirlError as error:
        assert str(error)
    assert time.monotonic() - start < 200
