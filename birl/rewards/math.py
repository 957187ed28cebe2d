"""Is an answer mathematically right? Judged by math-verify, in a worker process with a deadline."""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, parse, verify

from birl.errors import BirlError

# math-verify limits its time with SIGALRM and calls a late answer wrong. Here the worker process has a deadline and a
# late answer is a timeout, so its limits are off, and so is its warning that they are.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
GSM8K = re.compile(r"####[ \t]*(\S[^\n]*)")
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
# "1,000", "1/2", "50%", "72 dollars"
PLAIN = re.compile(rf"[$€£]?(?=[-+]?\.?\d){NUMBER}\.?(?:\s*%|\s*/\s*\d+)?(?:\s+[a-zA-Z ]+)?")
BARE = re.compile(rf"[$€£]?(?=[-+]?\.?\d){NUMBER}\s*%?\.?\s*")
NUMERAL = re.compile(r"\d(?:[\d,.]|[ ]\d{3}(?!\d))*")
PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
# four letters and more, or fewer with a vowel that is no usual name of a variable: yes, no, odd; but not xyz
WORD = re.compile(r"(?:[^\W\d_]{4,}|(?=[^\W\d_]*[eiou])[^\W\d_]{2,3})(?:[ '-]+[^\W\d_]+)*")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
DELIMITER = re.compile(r"\\[()\[\]]")
ANNOUNCED = re.compile(r"^.*\b(?:answer is|answer:)\s*", re.DOTALL | re.IGNORECASE)
SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d{1,2}")


def math(completions: list[str], gold: Sequence[object], **_: Any) -> list[float]:
    """1 where the last stated value equals the gold answer, else 0.

    The last `<answer>...</answer>` is judged where there is one, else what follows the last `####` (GSM8K) that has a
    number alone behind it or ends the text (others are headings), else the whole text, of which math-verify takes a
    boxed or announced answer, else the last expression or number. Where the gold answer is a number, so must the answer
    be: "3 + 4" equals 7 but only repeats the question.

    Example: math(["3 + 4 = 7", "3 + 4 = 8", "3 + 4"], gold=["7", "7", "7"]) == [1.0, 0.0, 0.0]
    """
    return [float(_right(c, _text(g, i))) for i, (c, g) in enumerate(zip(completions, gold, strict=True))]


def _text(gold: object, index: int) -> str:
    if gold is None:
        raise BirlError(f"completion {index}: its row has no right answer, which `math` needs (see data.answer_column)")
    return str(gold)


@lru_cache(maxsize=4096)  # the answers of a group repeat themselves
def _right(completion: str, gold: str) -> bool:
    want, text, wanted = _gold(gold), _final(completion), _words(_final(gold))
    if any(c.isalpha() for c in wanted) and _words(text) == wanted:
        return True
    if WORD.fullmatch(wanted):  # as mathematics, yes is y * e * s
        return False
    if _equal(want, _parse(text)):
        return True
    # LaTeX stands in the tag without its dollars, too
    return bool(ANSWER_TAG.search(completion)) and not _delimited(text) and _equal(want, _parse(f"${text.strip()}$"))


def _equal(want: list[Any], found: list[Any]) -> bool:
    return bool(found) and _computed(want, found) and verify(want, found, timeout_seconds=None)


def _words(text: str) -> str:
    """An answer that is a word or two, without what may stand around it."""
    boxed = BOXED.findall(text)
    text = boxed[-1] if boxed else text
    text = DELIMITER.sub("", WRAPPED.sub(r"\1", ANNOUNCED.sub("", text)))
    return " ".join(text.strip(" \t\r\n$*.()").casefold().split())


def _delimited(text: str) -> bool:
    return any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed"))


@lru_cache(maxsize=1024)
def _gold(gold: str) -> list[Any]:
    text = _final(gold).strip().replace("\u2212", "-").removeprefix("+")
    if SCIENTIFIC.fullmatch(text):
        text = f"{Decimal(text):f}"
    if PLAIN.fullmatch(text):
        found = _parse(text, [ExprExtractionConfig()])
    else:  # LaTeX without its dollars is what data sets hold: of 2\sqrt{3} math-verify would see the 2
        found = _parse(text if _delimited(text) else f"${text}$")
    if not found:
        raise BirlError(f"the gold answer {gold!r} cannot be read as mathematics")
    return found


def _final(text: str) -> str:
    if tagged := ANSWER_TAG.findall(text):
        return tagged[-1]
    marked = [m[1] for m in GSM8K.finditer(text) if BARE.fullmatch(m[1]) or not text[m.end() :].strip()]
    return marked[-1] if marked else text


def _parse(text: str, *how: Any) -> list[Any]:
    """[expression, its text] as math-verify found them, [text] when it could not read it, [] when there was nothing."""
    return parse(text, *how, parsing_timeout=None)  # type: ignore[arg-type]


def _computed(want: list[Any], found: list[Any]) -> bool:
    """Whether an answer to a numeric question is a number, and not a sum that still has to be done."""
    asked, stated = _number(want[0]), _number(found[0])
    if asked is None or stated is None:
        return asked is None
    # the text counts as well: of \frac{14}{2}, sympy has already done the division
    numerals = len(NUMERAL.findall(str(found[-1]).rpartition("=")[2]))
    return numerals <= 1 or asked != int(asked)


def _number(expression: Any) -> Any:
    """The number that is written, also as x = 7, as a fraction or as a percentage. None for everything else."""
    while isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if isinstance(expression, sympy.Number):
        return expression if expression.is_finite else None
    if not isinstance(expression, sympy.Mul):
        return None
    numbers = [part for part in expression.args if part.is_Number and part != -1]
    others = [part for part in expression.args if not part.is_Number]
    written = len(numbers) <= 1 and len(others) == 1 and (_is_reciprocal(others[0]) or others[0] == PERCENT)
    return sympy.Mul(*(part.doit() for part in expression.args)) if written else None


def _is_reciprocal(part: Any) -> bool:
    return isinstance(part, sympy.Pow) and part.exp == -1 and part.base.is_Number
