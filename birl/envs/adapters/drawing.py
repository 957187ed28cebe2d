"""What a game draws for a terminal, as plain text."""

import re

COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)


def plain(drawing: str) -> str:
    """A drawing without colours. Their meaning is written in brackets: a coloured background, which is where the player
    is, in [ ], and a coloured letter in { }, or in ( ) where it is blue: Taxi's passenger."""

    def bracketed(found: re.Match[str]) -> str:
        codes = found[1].split(";")
        if any(code.startswith(("4", "10")) for code in codes):
            return f"[{found[2]}]"
        return f"({found[2]})" if "34" in codes else f"{{{found[2]}}}"

    return COLOURED.sub(bracketed, drawing).strip("\n")
