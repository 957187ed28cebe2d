"""Conditions on episodes in DuckDB's SQL:

    reward < 0.5 and step > 3 order by tokens desc
    'repetition' in flags and text ilike '%apples%'

A condition may come from an untrusted link, so it is not executed as it is: DuckDB parses it, and only nodes that
compute with the values of one row are allowed. None can name a file, a table or a setting, or enlarge a text. The
executed SQL is generated from the checked tree.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from threading import Timer
from typing import TYPE_CHECKING, Any

import numpy as np

from birl.errors import BirlError, did_you_mean

if TYPE_CHECKING:
    import duckdb
    import pyarrow

NUMBERS = ("row", "step", "group", "episode", "turns", "tokens", "prompt_tokens", "reward", "score", "advantage")
NAMES = ("outcome", "source", "task", "flags")
TEXTS = ("text", "prompt", "answer", "detail")  # read from the file for each row that the other conditions leave
COLUMNS = (*NUMBERS, *NAMES, *TEXTS)
LONGEST = 1000  # characters
PATIENCE = 5.0  # s for one table
#: length times counted repetitions: RE2 takes that many steps a character, and a text cannot be interrupted
REGEX = 2000
SHAPES = {
    *("BETWEEN", "CASE", "CAST", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR", "TYPE")
}
TYPES = {"bigint", "boolean", "double", "integer", "varchar"}
FUNCTIONS = {
    *("+", "-", "*", "/", "//", "%", "abs", "ceil", "floor", "round", "greatest", "least"),
    *("~~", "!~~", "~~*", "!~~*", "regexp_matches", "regexp_full_match", "contains", "prefix", "suffix", "starts_with"),
    *("ends_with", "lower", "upper", "trim", "left", "right", "substring", "strpos", "len", "length"),
    *("list_contains", "list_has", "list_has_any", "list_has_all", "list_value"),
}
HINT = "Write a condition in SQL, as in: reward < 0.5 and step > 3 order by step desc"
Node = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """SELECTs of `row` from a table `rollouts`: conditions on columns only, conditions on texts, and the order; "" if
    there is none.

    Example: Query.parse("reward >= 1 order by tokens desc", words="apples")
    """

    by_columns: str
    by_texts: str
    ordered: str
    columns: frozenset[str]

    @classmethod
    def parse(cls, condition: str, words: str = "", order: str = "row") -> "Query":
        """`words`: text that prompt or answer must contain, ignoring case. `order`: used if the condition has none.
        Raises `BirlError` that names what is not valid."""
        if max(len(condition), len(words)) > LONGEST:
            raise BirlError(f"A condition and the words each have at most {LONGEST} characters.")
        where, orders = _parsed(condition)
        if words:
            quoted = "'" + words.replace("'", "''") + "'"
            has = (f"contains(lower({name}), lower({quoted}))" for name in ("text", "prompt"))
            where = where + _parsed(" or ".join(has))[0]
        orders = (orders or _parsed(f"order by {order}")[1]) + _parsed("order by row")[1]
        if texts := _named(orders) & set(TEXTS):
            raise BirlError(f"order by {min(texts)}: the order is of {', '.join((*NUMBERS, *NAMES))}.")
        by_columns = [one for one in where if not _named(one) & set(TEXTS)]
        return cls(
            by_columns=_written(by_columns) if by_columns else "",
            by_texts=_written([one for one in where if one not in by_columns]) if len(by_columns) < len(where) else "",
            ordered=_written([], orders),
            columns=frozenset(_named(where) | _named(orders)),
        )


def select(sql: str, table: "pyarrow.Table") -> np.ndarray:
    """The column `row` of a SELECT from `rollouts`. Raises `BirlError`."""
    import duckdb

    with _connection().cursor() as cursor:
        cursor.register("rollouts", table)
        timer = Timer(PATIENCE, cursor.interrupt)
        timer.start()
        try:
            return cursor.execute(sql).fetchnumpy()["row"].astype(np.int64)
        except duckdb.InterruptException:
            raise BirlError(
                f"The search took more than {PATIENCE:g} s for a part. Write a simpler condition."
            ) from None
        except duckdb.Error as error:
            raise BirlError(f"{str(error).splitlines()[0]}. {HINT}") from None
        finally:
            timer.cancel()


@cache
def _connection() -> "duckdb.DuckDBPyConnection":
    """A database in memory that cannot read files, load extensions or see our variables."""
    import duckdb

    off = ("enable_external_access", "autoinstall_known_extensions", "autoload_known_extensions")
    options = {**dict.fromkeys((*off, "python_enable_replacements"), "false"), "threads": "1", "memory_limit": "1GB"}
    connection = duckdb.connect(":memory:", config={**options, "temp_directory": ""})
    return connection.execute("set lock_configuration = true")


def _translated(function: str, text: str) -> str:
    """Convert between SQL and its syntax tree as JSON. Raises `BirlError`."""
    import duckdb

    try:
        with _connection().cursor() as cursor:
            return cursor.execute(f"select {function}(?)", [text]).fetchall()[0][0]
    except (duckdb.Error, UnicodeError) as error:
        raise BirlError(f"This condition cannot be read: {str(error).splitlines()[0]}. {HINT}") from None


def _tree(sql: str) -> Node:
    try:
        return json.loads(_translated("json_serialize_sql", sql))
    except RecursionError:
        raise BirlError(f"This condition is nested too deeply. {HINT}") from None


def _parsed(condition: str) -> tuple[list[Node], list[Node]]:
    """The conjunctive conditions, and the terms of the order. Raises `BirlError`."""
    condition, plain = condition.strip(), "select row from rollouts"
    begin = " " if not condition or condition.casefold().split()[0] == "order" else " where "
    tree = _tree(plain + begin + condition)
    if tree["error"]:
        group = 'near "group"' in tree["error_message"]
        quotes = '. group is a word of SQL: write it in double quotes, "group"' if group else ""
        raise BirlError(f"{condition}: {tree['error_message']}{quotes}. {HINT}")
    (empty,), statements = _tree(plain)["statements"], tree["statements"]
    node = statements[0]["node"] if len(statements) == 1 else {}
    where, modifiers = node.get("where_clause"), node.get("modifiers", [])
    alone = {**node, "where_clause": None, "modifiers": []} == empty["node"]
    if not alone or any(one["type"] != "ORDER_MODIFIER" for one in modifiers):
        raise BirlError(f"{condition}: only a condition can stand here, and `order by` behind it. {HINT}")
    orders = [one for modifier in modifiers for one in modifier["orders"]]
    for one in _expressions([where, orders]):
        _check(one)
    if where is None:
        return [], orders
    return (where["children"] if where["type"] == "CONJUNCTION_AND" else [where]), orders


def _check(one: Node) -> None:
    """Raises `BirlError` for a node that is not an expression of one row."""
    if one["class"] == "COLUMN_REF":
        name = ".".join(one["column_names"])
        if name.lower() not in COLUMNS:
            raise BirlError(
                f"There is no column {name}; there are {', '.join(COLUMNS)}.{did_you_mean(name, COLUMNS)} Text "
                "stands in single quotes; for words of prompt and answer there is --text, or the page's first box."
            )
        return
    kind = {"FUNCTION": FUNCTIONS, "TYPE": TYPES}.get(one["class"])
    name = (one.get("function_name") or one.get("type_name") or "").lower()
    if one["class"] not in SHAPES or (kind is not None and (name not in kind or one.get("children"))):
        what, functions = name or one["type"].lower().replace("_", " "), sorted(filter(str.isidentifier, FUNCTIONS))
        raise BirlError(
            f"{what} is not for conditions here; there are comparisons, and, or, not, in, between, like, case and the "
            f"functions {', '.join(functions)}."
        )
    if name.startswith("regexp_"):
        second = [argument["expression"] for argument in one["arguments"]][1:2]
        pattern = second[0].get("literal", {}).get("text") if second else None
        if not isinstance(pattern, str):
            raise BirlError(f"{name} takes a column and a regular expression in single quotes. {HINT}")
        counts = (max(1, int(count)) for count in re.findall(r"(\d{1,9}),?\}", pattern))
        if len(pattern) * math.prod(counts) > REGEX:
            raise BirlError(
                f"This regular expression repeats too much: its {len(pattern)} characters times its counted "
                f"repetitions are at most {REGEX:,}. Write * or + in place of counts such as {{1,500}}."
            )


def _expressions(tree: Any) -> Iterator[Node]:
    waiting = [tree]
    while waiting:
        match waiting.pop():
            case dict() as node:
                if "class" in node:
                    yield node
                waiting += node.values()
            case list() as nodes:
                waiting += nodes


def _named(tree: Any) -> set[str]:
    return {one["column_names"][0].lower() for one in _expressions(tree) if one["class"] == "COLUMN_REF"}


def _written(where: list[Node], orders: list[Node] | None = None) -> str:
    tree = _tree("select row from rollouts where true and true order by row")
    node = tree["statements"][0]["node"]
    node["where_clause"] = node["where_clause"] | {"children": where} if where else None
    node["modifiers"] = [node["modifiers"][0] | {"orders": orders}] if orders else []
    return _translated("json_deserialize_sql", json.dumps(tree))
