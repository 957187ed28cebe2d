"""The query language of the rollout list.

    reward>=1 -/\\d/ outcome:ok step:10..20 flag:repetition sort:-tokens "exact words"

Terms are separated by spaces, and a row has to fit all of them; `-` before a term turns it round.

    step>=10  tokens<5  reward=1  step:10..20  step:10..  group:7      numbers: FIELDS
    outcome:ok,truncated  source:gsm8k  flag:any  flag:repetition      one of the names
    task:train.jsonl:1                                                 text within the task's name
    prompt:word  prompt:"two words"                                    text within the prompt, in any case
    word  "two words"                                                  text within the model's output, in any case
    /regular expression/  /in any case/i                               of the module `regex`
    sort:reward  sort:-tokens                                          the order; without it that of the file

Numbers and names are looked up in the index; only for text is the file read again (search.py).
"""

import math
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import numpy as np
import regex

from birl.errors import BirlError, did_you_mean
from birl.view import flags
from birl.view.episodes import BITS, OUTCOMES, Episodes

FIELDS = ("step", "group", "episode", "turns", "tokens", "prompt", "reward", "score", "advantage")
NAMED = ("outcome", "source", "flag", "task")
LONGEST = 300  # characters of a regular expression
REPEATED = 10_000  # product of all counts such as {3,20} in a regular expression

RANGE = regex.compile(r"[\d.eE+-]*")  # of numbers
COUNTS = regex.compile(r"\{\s*(?:\d*\s*,)?\s*0*([1-9]\d*)\s*,?\s*\}")
TERM = regex.compile(
    r"""(?P<field>[a-z_]+)(?P<op>>=|<=|!=|>|<|=|:)(?P<value>"(?:[^"\\]|\\.)*"|[^\s"]*)(?=\s|\Z)
    | /(?P<pattern>(?:[^/\\]|\\.)+)/(?P<mode>[a-z]*)(?=\s|\Z)
    | (?P<quoted>"(?:[^"\\]|\\.)*")(?=\s|\Z)
    | (?P<word>[^\s"/]\S*)""",
    regex.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """A number from `low` to `high`, without the bounds themselves where they are open. NaN fits nothing."""

    field: str
    low: float = -inf
    high: float = inf
    low_open: bool = False
    high_open: bool = False
    negated: bool = False

    def fits(self, rows: np.ndarray, episodes: Episodes) -> np.ndarray:
        values = rows[self.field]
        above = values > self.low if self.low_open else values >= self.low
        below = values < self.high if self.high_open else values <= self.high
        return above & below

    def __str__(self) -> str:
        name = f"{'-' * self.negated}{self.field}"
        if self.low == self.high:
            return f"{name}={_figure(self.low)}"
        if not (self.low_open or self.high_open or inf in (-self.low, self.high)):
            return f"{name}:{_figure(self.low)}..{_figure(self.high)}"
        if self.low > -inf:
            return f"{name}>{'=' * (not self.low_open)}{_figure(self.low)}"
        return f"{name}<{'=' * (not self.high_open)}{_figure(self.high)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf:
    """An outcome, source or flag that has one of the names; of a task, a part of its name."""

    field: str
    names: tuple[str, ...]
    negated: bool = False

    def fits(self, rows: np.ndarray, episodes: Episodes) -> np.ndarray:
        match self.field:
            case "outcome":
                return np.isin(rows["outcome"], [OUTCOMES.index(n) for n in self.names])
            case "source":
                return np.isin(rows["source"], [n for n, s in enumerate(episodes.sources) if s in self.names])
            case "task":
                # one look at each name, and then at the places: there may be a million of both
                good = np.array([any(n in task for n in self.names) for task in episodes.tasks], bool)
                return good[rows["task"]] if len(good) else np.zeros(len(rows), bool)
        wanted = BITS if "any" in self.names else set(self.names) - {"none"}
        found = (rows["flags"] & sum(BITS[n] for n in wanted)) != 0
        return found | (rows["flags"] == 0) if "none" in self.names else found

    def __str__(self) -> str:
        value = ",".join(self.names)
        plain = regex.fullmatch(r'[^\s"]+', value) is not None
        return f"{'-' * self.negated}{self.field}:{value if plain else _quote(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Text within the model's output or its prompt, in any case; or a regular expression, with its mode (i, m, s)."""

    text: str
    is_pattern: bool = False
    mode: str = ""
    negated: bool = False
    of: str = ""  # "prompt": within the prompt instead

    def __str__(self) -> str:
        of = f"{self.of}:" * bool(self.of)
        return f"{'-' * self.negated}{of}" + (f"/{self.text}/{self.mode}" if self.is_pattern else _quote(self.text))

    def compiled(self) -> Any:
        """Raises `BirlError`."""
        if len(self.text) > LONGEST:
            raise BirlError(f"/{self.text[:20]}…/: a regular expression may have {LONGEST} characters here.")
        if math.prod(int(n) for n in COUNTS.findall(self.text)) > REPEATED:  # would take the memory of this machine
            raise BirlError(f"/{self.text}/: repeats something more than {REPEATED} times; write * or + instead.")
        if unknown := set(self.mode) - set("ims"):
            raise BirlError(f"/{self.text}/{self.mode}: there is no mode {unknown.pop()}; there are i, m and s.")
        try:
            modes = sum({"i": regex.IGNORECASE, "m": regex.MULTILINE, "s": regex.DOTALL}[m] for m in set(self.mode))
            return regex.compile(self.text, regex.VERSION0 | modes)
        except (regex.error, OverflowError, RecursionError, ValueError, MemoryError) as error:
            raise BirlError(f"/{self.text}/ is no regular expression: {error}.") from None


Column = Between | OneOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What to look for, and the order: a field of FIELDS, with `-` before it for the largest first, or "".

    Example: Query.parse("reward>=1 -/\\\\d/ sort:-tokens")
    """

    columns: tuple[Column, ...] = ()
    said: tuple[Said, ...] = ()
    sort: str = ""

    @classmethod
    def parse(cls, text: str) -> "Query":
        """Raises `BirlError` with the term that cannot be understood."""
        columns: list[Column] = []
        said: list[Said] = []
        sort, place = "", 0
        while (place := _past_spaces(text, place)) < len(text):
            negated = text[place] == "-" and text[place + 1 : place + 2].strip() != ""
            found = TERM.match(text, place + negated)
            if found is None:
                raise BirlError(
                    f"{text[place:][:40]}: this quotation mark or slash is not closed, or something stands right "
                    'behind it. To look for the sign itself write it in quotes, as in "/" or "\\"".'
                )
            place = found.end()
            if found["field"] == "sort":
                sort = _sort(found["op"], found["value"])
            elif found["field"] == "prompt" and found["op"] == ":" and _is_text(found["value"]):
                said.append(Said(text=_unquote(found["value"]), negated=negated, of="prompt"))
            elif found["field"] is not None:
                columns.append(_column(found["field"], found["op"], found["value"], negated))
            elif found["pattern"] is not None:
                said.append(Said(text=found["pattern"], is_pattern=True, mode=found["mode"], negated=negated))
            else:
                said.append(Said(text=_unquote(found["quoted"] or found["word"]), negated=negated))
        for one in said:
            if one.is_pattern:
                one.compiled()
        return cls(columns=tuple(columns), said=tuple(said), sort=sort)

    def __str__(self) -> str:
        return " ".join([*map(str, self.columns), *map(str, self.said), *([f"sort:{self.sort}"] if self.sort else [])])


def _column(field: str, op: str, value: str, negated: bool) -> Column:
    whole, value = f"{field}{op}{value}", _unquote(value)
    if field in NAMED:
        if op not in (":", "="):
            raise BirlError(f"{whole}: {field} has names, not numbers; write {field}:NAME.")
        names = tuple(sorted(set(filter(None, value.split(",")))))
        known = {"outcome": OUTCOMES, "flag": (*flags.NAMES, "any", "none")}.get(field, names)
        if wrong := [n for n in names if n not in known] or ([""] if not names else []):
            raise BirlError(
                f"{whole}: {field} is one of {', '.join(known) or 'the names'}.{did_you_mean(wrong[0], known)}"
            )
        return OneOf(field=field, names=names, negated=negated)
    if field not in FIELDS:
        fields = (*FIELDS, *NAMED, "sort")
        raise BirlError(
            f"{whole}: there is no {field}; there are {', '.join(fields)}.{did_you_mean(field, fields)} To look for "
            "the text, write it in quotes."
        )
    if op == "!=":
        op, negated = "=", not negated
    low, dots, high = value.partition("..") if op == ":" else (value, "", value)
    low, high = (
        _number(low, whole, -inf if dots else None),
        _number(high if dots else low, whole, inf if dots else None),
    )
    if low > high:
        raise BirlError(f"{whole}: nothing is from {_figure(low)} to {_figure(high)}; the smaller number comes first.")
    return Between(
        field=field,
        low=-inf if op in ("<", "<=") else low,
        high=inf if op in (">", ">=") else high,
        low_open=op == ">",
        high_open=op == "<",
        negated=negated,
    )


def _number(text: str, whole: str, absent: float | None) -> float:
    if not text and absent is not None:
        return absent
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if isnan(found):
        raise BirlError(f"{whole}: {text or 'nothing'} is no number. Write step:10..20, reward>=0.5 or tokens:100.. ")
    return found


def _is_text(value: str) -> bool:
    """`prompt:10..20` is about its tokens, `prompt:apples` and `prompt:"10"` about its text."""
    return value != "" and RANGE.fullmatch(value) is None


def _sort(op: str, value: str) -> str:
    name = value.removeprefix("-")
    if op != ":" or name not in FIELDS:
        raise BirlError(f"sort{op}{value}: write sort:reward or sort:-tokens, with one of {', '.join(FIELDS)}.")
    return value


def _past_spaces(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquote(text: str) -> str:
    return regex.sub(r"(?s)\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text


def _figure(value: float) -> str:
    return repr(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)
