"""Escapes text for display: model output may contain characters that a terminal or a browser would obey."""

import unicodedata

_JOINERS = "\u200c\u200d"  # invisible, but required for emoji and Persian


def visible(text: str) -> str:
    """The text with control characters, bidi overrides, lone surrogates and invisible tags escaped; newline and tab are
    kept.

    Example: visible("a\\x1b[2J") == "a⟪U+001B⟫[2J"
    """
    text = text.replace("\r\n", "\n")
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(f"⟪U+{ord(c):04X}⟫" if _obeyed(c) else c for c in text)


def _obeyed(char: str) -> bool:
    return char not in "\n\t" and char not in _JOINERS and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
