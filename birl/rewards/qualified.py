"""Words and signs around a number that make it another one, or a bound: of "less than 7" math-verify sees the 7."""

import re

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


def qualified(text: str, number: str, first: bool) -> bool:
    """Whether `text` says something else than `number`, which was read from it: its first occurrence behind what
    announces an answer, else the last.

    Example: qualified("x is less than 7", "7", first=False)
    """
    if BOUND.match(number):
        return True
    places = [m.span() for m in re.finditer(rf"(?<![\d.,]){re.escape(number.lstrip('-+ '))}(?!\d|[.,]\d)", text)]
    if not places or "\\boxed" in text:
        return False
    begin, end = places[0 if first else -1]
    return bool(BEFORE.search(text[max(0, begin - 40) : begin]) or AFTER.match(text[end:]))
