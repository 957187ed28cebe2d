"""Escapes text for display: model output may contain characters that a terminal or a browser would obey."""

import unicodedata

_KEPT = "\n\t\u200c\u200d"  # the last two are invisible, but required for emoji and Persian


def visible(text: str) -> str:
    """The text with control characters, bidi overrides, lone surrogates and invisible tags escaped; newline and tab are
    kept.

    Example: visible("a\\x1b[2J") == "a⟪U+001B⟫[2J"
    """
    text = text.replace("\r\n", "\n")
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    obeyed = (c not in _KEPT and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)
    return "".join(f"⟪U+{ord(c):04X}⟫" if bad else c for c, bad in zip(text, obeyed, strict=True))
