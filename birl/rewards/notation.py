"""Normalises numbers and formulas to the notation that math-verify parses, and detects context that changes the meaning
of a number, or makes it a bound: in "less than 7" math-verify finds the 7."""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

DIGITS = r"\d{1,9}"  # of a part that is computed
SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
WIDE = re.compile(r"[^\x00-\x7f]")
SYMBOLS = {
    "\u2212": "-",
    "\uff0d": "-",
    "\ufe63": "-",
    "\u2205": r"\emptyset ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u00b0": r"^\circ ",
}
ROOT = re.compile(r"\u221a\s*(?:(\d+|[^\W\d_])|\(([^()]*)\))")
TIMES = r"\s*(?:\\times|\\cdot|[\u00d7\u00b7x*])\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d{1,2})\s*\}|([-+]?\d{1,2}))"
SCIENTIFIC = re.compile(rf"(?<![\w.,])(?:(\d+(?:\.\d*)?)[eE]([-+]?\d{{1,2}})|(\d(?:\.\d+)?){TIMES})(?![\d.]*\d|\w)")
MIXED = re.compile(rf"(?<![\w./^,])({DIGITS}) ({DIGITS})/({DIGITS})(?![\w/^]|\.\d)")
NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
CIRCLE = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"
TRIGONOMETRIC = r"\\?(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?"
INNER = r"(?:[^{}]|\{[^{}]*\})*"
PERCENTAGE = re.compile(  # 33\frac{1}{3}\%, 33 1/3%
    rf"(?<![\w.,/])({DIGITS})?\s*(?:\\[dt]?frac\s*(?:\{{({DIGITS})\}}\s*\{{({DIGITS})\}}|(\d)(\d))"
    rf"|(?<!\d)({DIGITS})/({DIGITS}))\s*\\?%"
)
REPEATING = re.compile(r"(?<![\d.,])(\d{0,9})\.(\d{0,9})\\(?:overline|bar|dot)\s*\{(\d{1,9})\}")
MANY = {"dozen": "12", "hundred": "1e2", "thousand": "1e3", "million": "1e6", "billion": "1e9", "trillion": "1e12"}
COUNTED = re.compile(
    rf"(?<![\w./,])(\d[\d,]*(?:\.\d+)?)(?:\s|\\[ ,;:])*(?:\\text\{{\s*({'|'.join(MANY)})\s*\}}|\b({'|'.join(MANY)})\b)"
)
RULES = [
    (re.compile(r"(?:\$\$|(?<!\\)\\\[)\s*([^$]{0,999}?)\s*(?:\$\$|\\\])"), r"$\1$"),  # a formula on lines of its own
    (re.compile(r"\\(?:display|text)style(?![a-z])\s*"), ""),
    (re.compile(r"\\(?:mathbb|Bbb)\s*(?:\{\s*([A-Z])\s*\}|([A-Z])(?![a-z]))"), r"\\mathbb{\1\2}"),
    (re.compile(rf"(\\[dt]?frac)\{{\s*\\pm\s*({INNER})\}}"), r"\\pm\1{\2}"),
    (re.compile(rf"(\\[dt]?frac)\{{({INNER})\\pm\s*({INNER})\}}\s*(\{{{INNER}\}})"), r"\1{\2}\4\\pm\1{\3}\4"),
    (re.compile(r"\\fbox\b"), r"\\boxed"),
    (re.compile(rf"(\d+)\s*{CIRCLE}\s*(\d+)\s*(?:'|\^\s*\{{?\\prime\}}?)"), r"\\frac{\1*60+\2}{60}"),  # angular minutes
    (re.compile(rf"({TRIGONOMETRIC}\s*(?:\\left)?[({{]?)\s*({NUMBER})\s*{CIRCLE}"), r"\1\\frac{\2\\pi}{180}"),
    (  # math-verify takes the c of 10b + c and the ab of 2ab for units
        re.compile(
            r"((?<=[\w)}])\s*[-+]\s*|(?<=[a-zA-Z)}])\s*[-+]\s*\d+\s*|(?:\\pi|[\d}])\s*[a-zA-Z]\s+)([cdghlmost])"
            r"(?=\s*(?:[$}]|\\[)\]]|$))|(?<=[\d}i])\s*(a ?b|b ?c|h r)(?=\s*(?:[$}]|\\[)\]]|$))"
        ),
        r"\1{\2\3}",
    ),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"\\text(?:up|rm|normal)(?=\{)"), r"\\text"),
    (re.compile(r"\\color\{[^{}]*\}|(?<=\d)~(?=\\)|\s*\\pmod\s*(?:\{[^{}]*\}|\d+)"), ""),
    (re.compile(r"\\textcolor\{[^{}]*\}\{([^{}]*)\}"), r"\1"),
    (re.compile(rf"\\boxed\{{\{{\s*({NUMBER})\s*\}}\}}"), r"\\boxed{\1}"),
    (re.compile(r"(?<![\w.,\\])\.(?=\d)"), "0."),
    (re.compile(r"(?<![\d)}$%]\s)\b(?:negative|minus)\s+(?=\\?[$]?\d)", re.IGNORECASE), "-"),
    (re.compile(r"\bper cent\b", re.IGNORECASE), "percent"),
    (re.compile(r"(?<![\w\u2013)])\u2013\s*(?=\d)"), "-"),  # a dash that is no range
    (re.compile(rf"\\(?:text|textbf|mathrm|mathbf)\{{\s*({NUMBER}|[ie])\s*\}}"), r"\1"),
    (re.compile(rf"\\boxed\{{\s*({NUMBER})\s*\\?%\s*\}}"), r"$\1%$"),
    (re.compile(rf"\\boxed\{{\s*({NUMBER})\.\s*\}}"), r"\\boxed{\1}"),
    (re.compile(rf"(?<![\w\"'`])(?:[\"'`]|__)({NUMBER})(?:[\"'`]|__)(?!\w)"), r"\1"),
    (re.compile(r"(?<=\d)\\%"), "%"),
    (re.compile(r"\\\$(?=\s*[-+]?[\d.])|[\u20ac\u00a3](?=\s*[-+]?\d)|(?<=\d)\s?[\u20ac\u00a3](?!\s*\d)"), ""),
    (re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3}(?!\d))"), ""),  # thousands
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # a decimal comma
    (re.compile(r"(?:^|(?<=[=:(]))\s*-\s+(?=\d)"), "-"),
    (re.compile(r"^\s*([-+])\s*\$(?=[\d.][^$]*$)"), r"\1"),
]
BEFORE = re.compile(
    r"(?:\b(?:(?:less|more|greater|fewer|smaller|larger|bigger|higher|lower|other) than|anything but"
    r"|everything but|except|(?:not|cannot|n't)(?: be| equal to| exactly)?|root of|half of|twice|sqrt"
    r"|sin|cos|tan|exp|log|ln|\d+ (?:to|through|plus|minus|times))"
    r"|n't(?: be)?|[<>\u2264\u2265\u2260]=?|(?:^|(?<=[\s=(]))\d*[b-z]\s*[-+])[\s$*(]*[-+]?$",
    re.IGNORECASE,
)
AFTER = re.compile(
    r"\^(?!\{?\\circ)|\*\*\d|\s+(?:squared|cubed)\b|[xyznike](?![a-zA-Z])|\s*\+\s*[a-zA-Z](?![a-zA-Z'])|\s*-\s*[b-z]\b"
)
BOUND = re.compile(r"(?:\\(?:[gl](?:e|eq|t)|neg|lnot|neq?|not)(?![a-z])|[<>])")


def plain(text: str) -> str:
    """Convert Unicode signs, currencies, mixed numbers and powers of ten to the notation that math-verify parses.

    Example: plain("2\u221a3") == r"2\\sqrt{3}", plain("1.5e3") == "1500", plain("2 1/2") == "5/2"
    """
    text = SUPERSCRIPT.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}".replace("\u2212", "-"), text)
    text = VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/"), text)
    text = ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or ''}}}", text)
    text = WIDE.sub(lambda m: str(unicodedata.decimal(m[0], SYMBOLS.get(m[0], m[0]))), text)
    for pattern, instead in RULES:
        text = pattern.sub(instead, text)
    text = PERCENTAGE.sub(_percentage, text)
    text = COUNTED.sub(_counted, REPEATING.sub(_repeating, text))
    return MIXED.sub(_fraction, SCIENTIFIC.sub(_digits, text))


def _digits(match: re.Match[str]) -> str:
    number, power = match[1] or match[3], match[2] or match[4] or match[5]
    return f"{Decimal(f'{number}e{power}'):f}"


def _fraction(match: re.Match[str]) -> str:
    whole, above, below = (int(part) for part in match.groups())
    return f"{whole * below + above}/{below}" if above < below else match[0]


def _percentage(match: re.Match[str]) -> str:
    whole, above, below = (int(part or 0) for part in (match[1], *filter(None, match.groups()[1:])))
    return rf"\frac{{{whole * below + above}}}{{{100 * below}}}" if below else match[0]


def _counted(match: re.Match[str]) -> str:
    return f"{Decimal(match[1].replace(',', '')) * Decimal(MANY[match[2] or match[3]]):f}"


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1 with a line over 6 is (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    above = int(whole + fixed + repeated) - int(f"0{whole}{fixed}")
    return str(Fraction(above, (10 ** len(repeated) - 1) * 10 ** len(fixed)))


def qualified(text: str, number: str, first: bool) -> bool:
    """Whether the context in `text` changes the meaning of `number`, which was parsed from it: looks at the first
    occurrence if an answer is announced (`first`), else at the last.

    Example: qualified("x is less than 7", "7", first=False)
    """
    if BOUND.match(number):
        return True
    places = [m.span() for m in re.finditer(rf"(?<![\d.,]){re.escape(number.lstrip('-+ '))}(?!\d|[.,]\d)", text)]
    if not places or "\\boxed" in text:
        return False
    begin, end = places[0 if first else -1]
    return bool(BEFORE.search(text[max(0, begin - 40) : begin]) or AFTER.match(text[end:]))
