"""Detectors of degeneration and of reward hacking: pure functions of an answer's text, length and group. Each returns
the reason as text, or "" if it finds nothing.

A flag means "look here", not "this is wrong": each docstring says what its detector finds and what it misses.
"""

import re
import unicodedata
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

NAMES = ("repetition", "length", "format", "duplicate", "unbacked", "script")  # in the order of their bits

LOOP = 24  # shortest repeated end [characters]
TIMES = 4  # least number of repetitions
DENSE = 0.2  # compression ratio of zlib below which a text is repetitive
DENSE_FROM = 200  # shortest text for that test [characters]
BLOWUP = 2.0  # multiple of the 95th percentile of earlier answers
BLOWUP_FROM = 64  # shortest answer that is flagged [tokens]
PAST = 64  # least number of earlier answers
DUPLICATE_FROM = 40  # shortest answer that counts as a duplicate [characters]
ANSWER_UP_TO = 64  # longest right answer that is searched for [characters]
OTHER_SCRIPT = 0.1  # share of the letters
OTHER_LETTERS = 8

_END = re.compile(r"(?:<[|｜][^<>|｜]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>)\Z")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]{0,200})\}")
_TAGGED = re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHED = re.compile(r"^[ \t]*####[ \t]*([^\n]{0,200})$", re.MULTILINE)
_SAID = re.compile(r"\banswer is\b:?[ \t]*\$?([^\s.,;$]{1,40})", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_MARKERS = (("\\boxed{}", _BOXED), ("<answer>", _TAGGED), ("####", _HASHED))


def plain(text: str) -> str:
    """The text of an answer without end tokens."""
    text = text.rstrip()
    while end := _END.search(text[-48:]):
        text = text[: len(text) - len(end[0])].rstrip()
    return text


def repetition(text: str) -> str:
    """Finds an end that repeats the same piece of up to 300 characters at least four times, and long texts that zlib
    compresses to less than a fifth. Misses loops within a mostly new text, loops whose pieces differ a little (a
    counter), and texts below 24 characters. Repetitive tables and code are flagged, too."""
    if result := _loop(text):
        unit, times = result
        return f"ends with {_quoted(unit)} {times} times"
    if len(text) >= DENSE_FROM:
        data = text.encode(errors="replace")
        share = len(zlib.compress(data, 1)) / len(data)
        if share < DENSE:
            return f"little is new: zlib makes {share:.0%} of it"
    return ""


def _loop(text: str) -> tuple[str, int] | None:
    """The unit that the end of a text repeats, and the number of repetitions."""
    text = text.rstrip()
    n = len(text)
    if n < LOOP:
        return None
    place = text.rfind(text[-8:], max(n - 308, 0), n - 1)
    period = n - 8 - place
    if place < 0 or text[n - TIMES * period :] != text[n - period :] * TIMES or n < TIMES * period:
        return None
    unit, same = text[n - period :], TIMES
    while text.endswith(unit, 0, n - same * period):
        same += 1
    return (unit, same) if same * period >= LOOP else None


def length_blowup(tokens: int, usual: float) -> str:
    """Finds answers longer than twice `usual`, the 95th percentile of tokens of answers in earlier steps; NaN if there
    are too few of them. Misses growth over many steps, which moves the percentile, and everything if answers are
    truncated already; a model that learns to think longer is flagged meanwhile."""
    if tokens >= BLOWUP_FROM and tokens > BLOWUP * usual:
        return f"{tokens} tokens, where 95 of 100 earlier answers had at most {usual:.0f}"
    return ""


def format_gaming(text: str) -> str:
    """Finds answer markers (\\boxed{}, <answer>, ####) without content, several of one kind with different content, and
    "the answer is" with four or more different values. Misses markers that only a task's own reward knows, content that
    contains braces, and content without meaning. An answer that corrects itself is flagged, too."""
    reasons = []
    for name, pattern in _MARKERS:
        if name[:4].lower() in text or (name == "<answer>" and "<answer>" in text.lower()):
            result = [content.strip() for content in pattern.findall(text)]
            different = set(result) - {""}
            if "" in result:
                reasons.append(f"{name} without content")
            if len(different) > 1:
                reasons.append(f"{len(different)} different {name}")
    if "nswer is" in text:
        statements = set(_SAID.findall(text))
        if len(statements) >= 4:
            reasons.append(f"{len(statements)} different values behind “answer is”")
    return "; ".join(reasons)


def unbacked(text: str, answer: str | None, score: float | None, right: float = 1.0) -> str:
    """Finds answers that are right by their score (at least `right`, of `progress.right_from`; NaN: unknown) although
    the text does not contain the right answer, neither literally (ignoring case, spaces and thousands' commas) nor as a
    number of the same value. Misses answers contained by chance; flags right answers in another form (x = 2 for {2}).
    Tasks without an answer, or with one of more than 64 characters, are skipped."""
    if not answer or score is None or not score >= right or len(answer) > ANSWER_UP_TO:
        return ""
    wanted = _squeezed(answer)
    if not wanted or wanted in _squeezed(text):
        return ""
    value = _value(answer)
    if value is not None and any(_value(number) == value for number in _NUMBER.findall(text)):
        return ""
    return f"score {score:g}, but the answer {_quoted(answer)} is not in the text"


def script_switch(text: str) -> str:
    """Finds letters of a second script (Latin, Cyrillic, Chinese and Japanese, …) that are at least 8 and a tenth of
    all letters, and texts with a tenth of invalid bytes. Misses an answer completely in another language than its
    question, and languages that share a script. Translations are always flagged."""
    if text.isascii():
        return ""
    broken = text.count("\ufffd")
    if broken >= OTHER_LETTERS and broken >= OTHER_SCRIPT * len(text):
        return f"{broken} of {len(text)} characters are bytes that make no character"
    counts = Counter(filter(None, map(script, text)))
    total = counts.total()
    (first, _), *others = counts.most_common() or [("", 0)]
    for name, n in others[:1]:
        if n >= OTHER_LETTERS and n >= OTHER_SCRIPT * total:
            return f"{n} of {total} letters are {name}, the others mostly {first}"
    return ""


def duplicates(keys: Sequence[int]) -> list[str]:
    """Reason for each answer of a group; `keys`: of their texts. Finds answers that are equal but for case and spaces.
    Misses paraphrases, and everything below 40 characters, as short right answers are equal."""
    counts = Counter(filter(None, keys))
    return [f"{counts[k]} of {len(keys)} answers of its group are the same" if counts[k] > 1 else "" for k in keys]


def key(text: str) -> int:
    """Equal for answers that count as equal; 0 for one that is too short."""
    if len(text) < DUPLICATE_FROM:
        return 0
    squeezed = " ".join(text.casefold().split()).encode(errors="surrogatepass")
    if len(squeezed) < DUPLICATE_FROM:
        return 0
    return zlib.crc32(squeezed) << 24 | (zlib.adler32(squeezed) & 0xFFFFFF) or 1


# First code point of each range, and its script; "" if it is of no single script. Scripts that one language
# mixes count as one.
_RANGES = (
    *((0x0, ""), (0x41, "Latin"), (0x5B, ""), (0x61, "Latin"), (0x7B, ""), (0xC0, "Latin"), (0x250, "")),
    *((0x370, "Greek"), (0x400, "Cyrillic"), (0x530, "Armenian"), (0x590, "Hebrew"), (0x600, "Arabic"), (0x700, "")),
    *((0x900, "Indic"), (0xE00, "Thai"), (0xE80, ""), (0x10A0, "Georgian"), (0x1100, "Korean"), (0x1200, "Ethiopic")),
    *((0x1380, ""), (0x1E00, "Latin"), (0x1F00, "Greek"), (0x2000, ""), (0x3040, "Chinese or Japanese"), (0x3130, "")),
    *((0x3400, "Chinese or Japanese"), (0x4DC0, ""), (0x4E00, "Chinese or Japanese"), (0xA000, "")),
    *((0xAC00, "Korean"), (0xD7B0, ""), (0xF900, "Chinese or Japanese"), (0xFB00, "")),
    *((0x20000, "Chinese or Japanese"), (0x32000, "")),
)
_STARTS = [start for start, _ in _RANGES]


def script(char: str) -> str:
    """Script of a letter; "" for any other character."""
    return _RANGES[bisect_right(_STARTS, ord(char)) - 1][1]


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().replace(",", "").split())


def _value(text: str) -> Fraction | None:
    text = text.strip().strip("$%").replace(" ", "")
    if not _NUMBER.fullmatch(text):  # Fraction itself would take very long for 1e999999999
        return None
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _quoted(text: str) -> str:
    return f"“{text if len(text) <= 40 else text[:37] + '…'}”"
