from pathlib import Path

import pyarrow
import pytest

from birl.errors import BirlError
from birl.view import episodes as reader
from birl.view import query as module_query
from birl.view import search as module
from birl.view.episodes import Episodes
from birl.view.query import Query, select
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
        ("reward>=1 and not regexp_matches(text, '\\d')", [2]),
        ("reward<1", [1, 4, 5]),
        ("reward is null or reward < 0", [3, 5]),
        ("reward <> 1", [1, 4, 5]),
        ("reward is distinct from 1", [1, 3, 4, 5]),
        ("step between 2 and 3", [2, 3, 4]),
        ("STEP in (1, 30) and advantage > -1", [0, 1, 5]),
        ('"group" = 4 and row = 4 and turns = 1 and prompt_tokens = 3 and episode = 0 and score = 1', [4]),
        ("outcome = 'truncated'", [1]),
        ("outcome not in ('ok', 'truncated')", [3]),
        ("source like 'gsm%'", [1]),
        ("task = 'other:1'", [5]),
        ("text ilike '%seven%'", [1, 2]),
        ("contains(text, 'seven') or contains(text, '🙂')", [2, 4]),
        ("regexp_matches(text, 'SEVEN', 'i') and reward = 1", [2]),
        ("text ~ 'no\\nno'", [5]),
        ("text = ''", [3]),
        ("answer = '7' and text = ''", [3]),
        ("'format' in flags", [4]),
        ("len(flags) > 0", [1, 2, 4, 5]),
        ("flags = []", [0, 3]),
        ("order by tokens desc", [1, 4, 2, 0, 5, 3]),
        ("order by reward", [5, 1, 4, 0, 2, 3]),
        ("order by reward desc, step desc", [2, 0, 4, 1, 5, 3]),
        ("reward >= 0.5 order by -tokens", [4, 2, 0]),
        ("reward >= 0.5 -- and more;", [0, 2, 4]),
        ("case when step > 1 then reward else 0 end = 1", [2]),
        ("(text = '' or reward > 0.5) and step > 1", [2, 3]),
    ],
)
def test_queries(episodes: Episodes, query: str, wanted: list[int]) -> None:
    assert rows(episodes, query) == wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("SEVEN", [1, 2]), ("it's %' or true --", []), ("'X' \\\"y", [4]), ("½ 🙂", [4]), ("", [0, 1, 2, 3, 4, 5])],
)
def test_words_are_text_and_nothing_else(episodes: Episodes, words: str, wanted: list[int]) -> None:
    search = Search(episodes, Query.parse("", words))
    assert search.go_on() and search.rows.tolist() == wanted


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rewrad>=1", "no column rewrad.*Did you mean reward"),
        ("apples", "no column apples.*--text"),
        ("reward >=", "syntax error.*Write a condition in SQL"),
        ("flag:any sort:-step", 'near ":"'),
        ("group = 1", 'write it in double quotes, "group"'),
        ("text::integer = 1", "Could not convert string"),
        ("regexp_matches(text, '(')", "missing \\)"),
        ("regexp_matches(text, '(.{1,90}x){90,}')", "repeats too much"),
        ("regexp_matches(text, prompt)", "a regular expression in single quotes"),
        ("order by text", "order by text: the order is of row"),
        ("not " * 200 + "true", "nesting depth"),
        ("1 = 1 and " * 150 + "true", "at most 1000 characters"),
        ("\ud800", "cannot be read"),
        ("$1 > 2", "not for conditions"),
        ("x.reward > 2", "no column x.reward"),
    ],
)
def test_what_cannot_be_understood_is_named(episodes: Episodes, query: str, problem: str) -> None:
    with pytest.raises(BirlError, match=problem):
        rows(episodes, query)


@pytest.mark.parametrize(
    "query",
    [
        "true; drop table rollouts",
        "true; select 1",
        "true; attach 'other.db'",
        "true union select 1",
        "true union select size from read_text('FILE')",
        "step in (select 1 from 'FILE')",
        "exists (from glob('*'))",
        "true limit 1",
        "true group by row",
        "true using sample 1",
        "true qualify sum(reward) over () > 0",
        "sum(reward) over () > 0",
        "count(*) > 1",
        "columns(*) > 1",
        "true order by all",
        "true order by random()",
        "getenv('HOME') = 'x'",
        "current_setting('memory_limit') = 'x'",
        "nextval('s') > 1",
        "len(repeat('a', 3000000000)) > 1",
        "len(range(1000000000)) > 1",
        "len(lpad('a', 1000000000, 'b')) > 1",
        "text || text = 'a'",
        "list_transform(flags, lambda x: x) = []",
        "[x for x in flags] = []",
        "text::json = '{}'",
        "text::varchar[100000000] = 'a'",
        "{'a': text} is null",
        "main.len(text) > 1 and error('x')",
    ],
)
def test_a_condition_from_elsewhere_only_looks_at_its_row(episodes: Episodes, tmp_path: Path, query: str) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(BirlError, match=r"here|Only SELECT|syntax error"):
        Query.parse(query.replace("FILE", str(tmp_path / "secret")))


def test_the_database_itself_reads_no_file_and_no_variable(tmp_path: Path) -> None:
    """Behind the check of the condition there is a second lock."""
    (tmp_path / "secret.csv").write_text("row\n1\n")
    secret = pyarrow.table({"row": [1]})
    for sql in (f"select row from read_csv('{tmp_path}/secret.csv')", "select row from secret", "attach 'x.db'"):
        with pytest.raises(BirlError):
            select(sql, pyarrow.table({"row": [2]}))
    with pytest.raises(BirlError, match="locked"):
        select("set enable_external_access = true", secret)


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_query, "PATIENCE", 0.05)
    with pytest.raises(BirlError, match=r"took more than 0\.05 s"):
        select("select count(*) as row from range(100000000) a, range(100000000) b", pyarrow.table({"row": [1]}))


def test_a_search_goes_on_where_it_stopped_and_finds_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 8)
    path = write(tmp_path / "rollouts.jsonl", [record(step=n, text=f"number {n % 3}") for n in range(60)])
    episodes = Episodes(path)
    episodes.read_on()
    search = Search(episodes, Query.parse("order by step desc", "number 1"))
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
    search = Search(episodes, Query.parse("", "old"))
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
    search, looks = Search(episodes, Query.parse("'duplicate' in flags")), 1
    while not episodes.read_on(0):
        search.go_on()
        looks += 1
    assert search.go_on() and search.rows.tolist() == list(range(80)) and looks > 5
