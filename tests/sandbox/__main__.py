"""`python -m tests.sandbox [KIND...]`: try every hostile program in sandboxes of this machine, and print the table."""

import asyncio
import sys

from birl.errors import BirlError
from birl.sandbox.open import AUTO, tried
from tests.sandbox import hostile


async def table(kinds: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """For every hostile program, what it reached in each kind. Raises `BirlError`."""
    found: dict[str, dict[str, str]] = {}
    for kind in kinds:
        if kind not in AUTO:
            raise BirlError(f"{kind}: must be one of {', '.join(AUTO)}; others are no boundary of this machine.")
        works = await tried(kind)
        if not works.python:
            raise BirlError(f"sandbox.kind={kind} does not work on this machine ({works.reason}).")
        for name, what in (await hostile.all_of(kind, works.python)).items():
            found.setdefault(name, {})[kind] = what
    return found


def main(words: list[str]) -> int:
    """0 when everything was stopped."""
    kinds = tuple(words) or AUTO
    try:
        found = asyncio.run(table(kinds))
    except BirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"| attack | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for name, results in found.items():
        print(f"| {name} | {' | '.join('stopped' if not results[k] else '**not stopped**' for k in kinds)} |")
    broken = [(name, kind, what) for name, results in found.items() for kind, what in results.items() if what]
    for name, kind, what in broken:
        print(f"{kind}: {name}: {what}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
