"""Mathematical correctness of answers, checked by math-verify in a worker process with a deadline."""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, parse, verify

from birl.errors import BirlError
from birl.rewards.extent import joins_logs, large, near, same_at_points, unfinished
from birl.rewards.notation import plain, qualified
from birl.rewards.text import THOUGHT

# math-verify limits its time with SIGALRM and calls a late answer wrong. Here the worker process has a deadline and a
# late answer is a timeout, so its limits are off, and so is its warning that they are.
logging.getLogger("math_verify").setLevel(logging.ERROR)

LONGEST = 5_000  # characters that are read, from the end
CLOSE = 5e-6  # relative tolerance of numbers
DEEPEST = 12  # depth of nested brackets: parsing time doubles with each
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
OPENED = re.compile(r"^.*<answer>", re.DOTALL | re.IGNORECASE)
GSM8K = re.compile(r"####[ \t]*(\S[^\n]*)")
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
# "1,000", "1/2", "50%", "72 dollars"
PLAIN = re.compile(rf"[$]?(?=[-+]?\.?\d){NUMBER}\.?(?:\s*%|\s*/\s*\d+)?(?:\s+[a-zA-Z ]+(?:/[a-zA-Z]+)?)?")
BARE = re.compile(rf"[$]?(?=[-+]?\.?\d){NUMBER}\s*%?\.?\s*")
NUMERAL = re.compile(r"\d(?:[\d,.]|[ ]\d{3}(?!\d))*")
# sympy factors radicands, and divides angles by pi, while it parses
HUGE = re.compile(r"(?:\^|\*\*)[\s{(+-]*\d{4,}|\d{400}")
FUNCTION = re.compile(r"\\?(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln)")
BASE = re.compile(r"_(?:\d|\{\w*\})")
# 3 or 4: a list is no number, even if one of them is correct
LISTED = re.compile(
    rf"(?>\W*+\b(?:or|and|to|through|maybe|perhaps|possibly|either|both)\b|[-+$]?{NUMERAL.pattern}|[\s,;.*?!()]+)++"
)
HEDGED = re.compile(rf"\d\W*\bor\b(?:\s+(?:maybe|perhaps|possibly|even))*\s+[-+$]?{NUMERAL.pattern}[^\w\n]*$")
# not 7: a negated answer
DENIED = re.compile(rf"\D*(?:\bnot\s+|\\neq?(?![a-z])\s*|\u2260\s*)[-+$]*{NUMERAL.pattern}[^\w\n]*")
BASED = re.compile(rf"{NUMERAL.pattern}_(?:(\d)|\{{(\d+)\}})")
AND = re.compile(r"\s+(?:and|or)\s+")
PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
BOUNDS = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)
BOUND = {(True, False), (False, True)}  # sides of x < 2: whether they are a symbol, a number
# four letters and more, or fewer with a vowel that is no usual name of a variable: yes, no, odd; but not xyz
WORD = re.compile(r"(?:[^\W\d_]{4,}|(?=[^\W\d_]*[eiou])[^\W\d_]{2,3})(?:[ '-]+[^\W\d_]+)*")
FUNCTIONS = re.compile(r"\\(?:begin|end|mathbb)\{\w+\}|\\[a-zA-Z]+|\b(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)\b")
SPELLED = re.compile(r"(?<![\\a-z])(?:(pi)|inf(?:ini)?ty)\b", re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
FACTORIAL = re.compile(r"[\d)]!\W*$")  # 5! is not 5
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
# at the end of a sentence: in "it is 2\frac{1}{3}" math-verify would find 1/3
FRACTION = re.compile(r"((?:(?<![\\\w])[^\W\d_]{2,}|[:,.])\s+)([-+]?\d*\\[dt]?frac\{[^{}]*\}\{[^{}]*\})(?=[\s.]*$)")
DELIMITER = re.compile(r"\\[()\[\]]")
SPACE = re.compile(r"~|\\(?:(?:q?quad|displaystyle)\b|[ ,;:])")
ANNOUNCED = re.compile(r"^.*\b(?:answer|option|choice)s?(?:\s+(?:is|are)\b|\W*:)[\s:*]*", re.DOTALL | re.IGNORECASE)
CHOICE = re.compile(r"(?:(?i:option|choice)\s+)?\(?([A-Z])(?:[).:]\s+\S.*|[).])?", re.DOTALL)
SEVERAL = re.compile(r"(?i:options?\s+)?\(?[A-J]\)?(?:(?:[\s,;&]|\band\b)*\(?[A-J]\)?)+")  # A, C or (A) and (C) or AC
CHOICES = re.compile(r"(?<![a-zA-Z])[A-Z][).:]")
# a time or a date: 12:30 would be 2/5
TIME = re.compile(
    r"(?<![\d:])\d{1,2}:\d\d(?::\d\d)?(?:\s*[ap]\.?m\b)?|\b\d\d?\s*[ap]\.?m\b|\b\d{4}-\d\d-\d\d\b|\b\d\d?[/.]\d\d?[/.]\d{2,4}\b"
)


def math(completions: list[str], gold: Sequence[object], **_: Any) -> list[float]:
    """1 if the last stated value equals the gold answer, else 0.

    After the thinking, the last `<answer>...</answer>` is checked if there is one, else the text after the last `####`
    (GSM8K) that is a number alone or ends the text (others are headings), else the whole text, in which math-verify
    takes a boxed or announced answer, else the last expression or number. If the gold answer is a number, the answer
    must be one, too: "3 + 4" equals 7 but only repeats the question.

    Example: math(["3 + 4 = 7", "3 + 4 = 8", "3 + 4"], gold=["7", "7", "7"]) == [1.0, 0.0, 0.0]
    """
    return [float(_right(c, _text(g, i))) for i, (c, g) in enumerate(zip(completions, gold, strict=True))]


def _text(gold: object, index: int) -> str:
    if gold is None:
        raise BirlError(f"completion {index}: its row has no right answer, which `math` needs (see data.answer_column)")
    return str(gold)


@lru_cache(maxsize=4096)  # answers in a group repeat
def _right(completion: str, gold: str) -> bool:
    text, wanted = _final(THOUGHT.sub("", completion))[-LONGEST:], _final(gold)
    if _as_text(text, wanted):
        return True
    if (several := _several(wanted)) and (several == _several(text) or not wanted.isalpha()):
        return several == _several(text)
    if TIME.fullmatch(_words(wanted)) or WORD.fullmatch(_signs(_words(wanted))):
        return False  # as mathematics, yes is y * e * s
    want, text = _gold(gold), plain(text)[-LONGEST:]
    text = text if _delimited(text) else FRACTION.sub(r"\1$\2$", text)
    if _depth(text) > DEEPEST or (HUGE.search(text) and FUNCTION.search(text)):
        return False
    marks = " \t\r\n*.?" + "!" * (FACTORIAL.search(wanted) is None)
    stated = _signs(ANNOUNCED.sub("", text).strip(marks).lstrip("= "))
    if stated.casefold().startswith("not "):
        text = stated  # math-verify takes the first number after an announcement
    if _asked(want[0]) is None:
        stated = AND.sub(", ", stated)
    elif _listed(stated) or HEDGED.search(text) or DENIED.fullmatch(stated):
        return False
    if len({a or b for a, b in BASED.findall(wanted)} | {a or b for a, b in BASED.findall(text)[-1:]}) > 1:
        return False  # in another base, which math-verify ignores
    # an expression alone may lack its dollar signs
    bare = not _delimited(stated) and not any(map(WORD.fullmatch, re.findall(r"[^\W\d_]+", FUNCTIONS.sub("", stated))))
    # math-verify takes the last number of (3, \frac{1}{2})
    whole = _latex(stated) if bare and "\\" in stated and _asked(want[0]) is not None else []
    answers = whole if whole and isinstance(whole[0], sympy.Basic) else _parse(text)
    if answers and _asked(want[0]) is not None and qualified(text, str(answers[-1]), bool(ANNOUNCED.match(text))):
        return False
    if _equal(want, answers):
        return True
    return (bare or bool(ANSWER_TAG.search(completion))) and not _delimited(stated) and _equal(want, _latex(stated))


def _as_text(text: str, wanted: str) -> bool:
    """Whether the answer equals the gold answer as words, as a time, or as a letter of a choice."""
    words, right = _words(text), _words(wanted)
    if words == right and right and not FACTORIAL.search(wanted):
        return True
    if TIME.fullmatch(right):
        return [_squeezed(t) for t in TIME.findall(WRAPPED.sub(r"\1", text).casefold())][-1:] == [_squeezed(right)]
    choice = CHOICE.fullmatch(_bare(text))
    return choice is not None and choice[1].casefold() == right and len(CHOICES.findall(text)) < 2


def _several(text: str) -> list[str]:
    """The letters of a choice of several, sorted; without separators they must be in order. Else empty."""
    bare = _bare(text)
    letters = re.findall("[A-J]", bare) if SEVERAL.fullmatch(bare) else []
    return sorted(letters) if not bare.isalpha() or letters == sorted(set(letters)) else []


def _signs(text: str) -> str:
    return SPELLED.sub(lambda m: r"\pi " if m[1] else r"\infty", text)


def _squeezed(time: str) -> str:
    return time.replace(" ", "").replace(".m", "m")


def _listed(stated: str) -> bool:
    return len({n.rstrip(".,") for n in NUMERAL.findall(stated)}) > 1 and LISTED.fullmatch(stated) is not None


def _depth(text: str) -> int:
    deepest = depth = 0
    for bracket in re.findall(r"[(\[{}\])]", text):
        depth = max(0, depth + (1 if bracket in "([{" else -1))
        deepest = max(deepest, depth)
    return deepest


def _equal(want: list[Any], answers: list[Any]) -> bool:
    if not answers or not _computed(want, answers):
        return False
    if isinstance(answers[0], sympy.Expr) and answers[0].free_symbols and getattr(want[0], "is_number", False):
        return False  # trigsimp of sin(pi/9) - exp(99999 x) takes minutes
    pair = (want[0], answers[0])
    if all(isinstance(e, sympy.And) for e in pair):
        want, answers = ([_joined(e, sympy.And, sympy.Intersection)] for e in pair)
    elif any(isinstance(e, sympy.Tuple | sympy.Interval) for e in pair):
        want, answers = ([_point(e)] for e in pair)
    if unfinished(answers[0]):
        return bool(want[0] == answers[0])
    if large(answers[0]) or large(want[0]) or joins_logs(want[0], answers[0]):
        return same_at_points(want[0], answers[0])
    right = verify(want, answers, allow_set_relation_comp=_is_range(want[0]), timeout_seconds=None)
    return (right and _close(want[0], answers[0])) or _same_equation(want[0], answers[0])


def _same_equation(wanted: Any, stated: Any) -> bool:
    """Whether the differences of both sides are multiples of each other: math-verify solves equations one way only."""
    if not all(isinstance(e, sympy.Eq) and all(isinstance(a, sympy.Expr) for a in e.args) for e in (wanted, stated)):
        return False  # x = [0, 1] is an Eq, too
    one, other = (e.lhs - e.rhs for e in (wanted, stated))  # pyright: ignore
    return one.free_symbols == other.free_symbols and same_at_points(one, other, scaled=True)


def _point(expression: Any) -> Any:
    """x = 1, y = 2 as (1, 2): math-verify takes (2, 1) for it, too."""
    parts = expression.args if isinstance(expression, sympy.FiniteSet) else ()
    values = {str(p.lhs): p.rhs for p in parts if isinstance(p, sympy.Eq) and p.lhs.is_Symbol}
    return sympy.Tuple(*(values[name] for name in sorted(values))) if 1 < len(values) == len(parts) else expression


def _is_range(wanted: Any) -> bool:
    """Whether it is certainly a range of numbers: (1, 2) may be a point."""
    if not isinstance(wanted, sympy.Interval):
        return isinstance(wanted, sympy.Union)
    return not wanted.left_open or not wanted.right_open or not wanted.measure.is_finite


def _close(wanted: Any, stated: Any) -> bool:
    """Whether numbers agree to six digits: math-verify compares six decimals, so all numbers below 1e-6 are equal."""
    pair = (wanted, stated)
    if not all(isinstance(e, sympy.Expr) and e.is_number and not e.has(sympy.UnevaluatedExpr) for e in pair):
        return True
    want, have = wanted.evalf(15), stated.evalf(15)
    return not want.is_finite or near(have, want, CLOSE)


def _words(text: str) -> str:
    """Normalise an answer of one or two words, without surrounding marks."""
    text = _bare(text)
    around = "()" if any(c.isalpha() for c in text) else ""
    return " ".join(text.strip(f" \t\r\n{around}").casefold().split())


def _bare(text: str) -> str:
    text = text.rstrip(" \t\r\n*.!")  # 7! in a box is a factorial
    boxed = BOXED.findall(text)
    text = boxed[-1] if len(set(boxed)) == 1 else text
    text = DELIMITER.sub("", SPACE.sub(" ", WRAPPED.sub(r"\1", ANNOUNCED.sub("", text))))
    return text.rstrip(" \t\r\n$*`\"'.").lstrip(" \t\r\n$*`\"'")


def _delimited(text: str) -> bool:
    return any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed"))


@lru_cache(maxsize=1024)
def _gold(gold: str) -> list[Any]:
    text = _signs(plain(_final(gold)).strip().removeprefix("+"))
    if PLAIN.fullmatch(text):
        result = _parse(text, [ExprExtractionConfig()])
    else:  # data sets have LaTeX without dollar signs: in 2\sqrt{3} math-verify would find the 2
        result = _parse(text) if _delimited(text) else _latex(text)
    if not result:
        raise BirlError(f"the gold answer {gold!r} cannot be read as mathematics")
    return result


def _latex(text: str) -> list[Any]:
    return _parse(f"${text.strip()}$")


def _final(text: str) -> str:
    """The part of an answer that is checked, see `math`."""
    if tagged := ANSWER_TAG.findall(text):
        return tagged[-1]
    text = OPENED.sub("", text)  # generation stopped at </answer>
    marked = [m[1] for m in GSM8K.finditer(text) if BARE.fullmatch(m[1]) or not text[m.end() :].strip()]
    return marked[-1] if marked else text


def _parse(text: str, *how: Any) -> list[Any]:
    """[expression, its text] as math-verify parses them, [text] if it cannot parse it, [] if it finds nothing."""
    result: list[Any] = parse(text, *how, parsing_timeout=None)  # type: ignore[arg-type]
    if not result or not isinstance(result[0], sympy.Basic):
        return result
    # the i of "4 i" is not real, that of "4i" is
    names = {s: sympy.Symbol(str(s), real=True) for s in result[0].free_symbols if s.is_real is False}
    return [_joined(result[0].xreplace(names) if names else result[0]), *result[1:]]


def _joined(expression: Any, kind: Any = sympy.FiniteSet, join: Any = sympy.Union) -> Any:
    """x < 1 or x > 2, which math-verify reads as a set of relations, as a union of intervals, or 1 < x < 5 as one."""
    parts = expression.args if isinstance(expression, kind) and len(expression.free_symbols) == 1 else ()
    simple = (p for p in parts if isinstance(p, BOUNDS) and {(a.is_Symbol, a.is_number) for a in p.args} == BOUND)
    bounds = [p.as_set() for p in simple]  # pyright: ignore
    return join(*bounds) if bounds and len(bounds) == len(parts) else expression


def _computed(want: list[Any], answers: list[Any]) -> bool:
    """Whether an answer to a numeric question is a number, not an unevaluated sum."""
    asked, stated = _asked(want[0]), _number(answers[0])
    if asked is None or stated is None:
        return asked is None
    # the text counts as well: sympy has already divided in \frac{14}{2}
    numerals = len(NUMERAL.findall(BASE.sub("", str(answers[-1]).rpartition("=")[2])))
    return numerals <= 1 or asked != int(asked)


def _asked(wanted: Any) -> Any:
    """The number that is asked for; None also for an equation of several variables, such as x + y = 2."""
    return _number(wanted) if not isinstance(wanted, sympy.Eq) or len(wanted.free_symbols) < 2 else None


def _number(expression: Any) -> Any:
    """The number written, also as x = 7, a fraction or a percentage. None for everything else."""
    while isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if isinstance(expression, sympy.Number):
        return expression if expression.is_finite else None
    if not isinstance(expression, sympy.Mul):
        return None
    numbers = [part for part in expression.args if part.is_Number and part != -1]
    others = [part for part in expression.args if not part.is_Number]
    if len(numbers) > 1 or len(others) != 1:
        return None
    part = others[0]
    reciprocal = isinstance(part, sympy.Pow) and part.exp == -1 and part.base.is_Number
    return sympy.Mul(*(p.doit() for p in expression.args)) if reciprocal or part == PERCENT else None
