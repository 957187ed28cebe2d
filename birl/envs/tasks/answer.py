"""What an answer says in the end: its last `<answer>...</answer>`, where it has one, else all of it; and the last
number in that."""

import re
from fractions import Fraction

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
SPELLED = "zero one two three four five six seven eight nine ten eleven twelve"
WORDS = {word: n for n, word in enumerate(SPELLED.split())}
LONGEST = 100_000  # characters that are looked at, from the end


def final(text: str) -> str:
    text = text[-LONGEST:]
    result = ANSWER.findall(text)
    return (result[-1] if result else text).strip()


def number(text: str, words: bool = False) -> Fraction | None:
    """The last number. With `words`, a number may be a word, as in "three times"."""
    text = final(text)
    result = [(m.start(), m[0]) for m in NUMBER.finditer(text)]
    if words:
        result += [
            (m.start(), str(WORDS[m[0].lower()])) for m in re.finditer(r"[A-Za-z]+", text) if m[0].lower() in WORDS
        ]
    if not result:
        return None
    digits = max(result)[1].replace(",", "").replace("\u2212", "-")
    return Fraction(digits) if len(digits) <= 1000 else None


def normal(text: str) -> str:
    """An answer in words: small letters, without articles, punctuation and superfluous blanks."""
    words = re.findall(r"[^\W_]+", text.lower())
    return " ".join(word for word in words if word not in ("a", "an", "the"))
