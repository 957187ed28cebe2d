"""Requirements, extras, pins and licences fit together. The slow whole: make check-extras, make check-install."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

from tests.packaging import licences
from tests.packaging.extras import PROJECT, PYTHONS, ROOT

EXTRAS = PROJECT["optional-dependencies"]
PINS = {
    line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
}


def pinned(requirement: Requirement) -> str:
    return PINS.get(requirement.name.lower().replace("_", "-"), "")


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_pin_is_within_its_range(extra: str) -> None:
    wanted = [Requirement(r) for r in (EXTRAS[extra] if extra else PROJECT["dependencies"])]
    wrong = [str(r) for r in wanted if not r.specifier.contains(pinned(r), prereleases=True)]
    assert not wrong, "constraints.txt has another version"


def disagreeing(wanted: list[Requirement]) -> list[str]:
    """What an installed package asks for, all the way down, and constraints.txt has in another version."""
    return [
        f"{name}[{','.join(extras)}] wants {one}, constraints.txt has {pinned(one)}"
        for name, extras, asks in licences.walk(wanted)
        for one in asks
        if pinned(one) and not one.specifier.contains(pinned(one), prereleases=True)
    ]


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_pins_of_an_extra_agree_with_one_another(extra: str) -> None:
    wanted = [Requirement(r) for r in (*PROJECT["dependencies"], *(EXTRAS[extra] if extra else ()))]
    assert not disagreeing(wanted)


def test_a_conflict_within_the_extra_of_a_requirement_is_seen() -> None:
    """Why gem-llm comes without its requirements: older versions of pip did not see it."""
    (found,) = disagreeing([Requirement("math-verify[antlr4_13_2]")])
    assert "wants antlr4-python3-runtime==4.13.2" in found


def test_all_extras_are_explained() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert not [extra for extra in EXTRAS if extra not in page]


def test_no_package_has_a_licence_that_is_not_on_the_list() -> None:
    found = licences.needed(licences.requirements())
    assert {"torch", "transformers", "numpy"} <= found.keys()
    wrong = [f"{one.package}: {one.said}" for one in found.values() if not one.allowed]
    assert not wrong, "see tests/packaging/licences.py"


def test_every_requirement_is_in_the_notices() -> None:
    page = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8").lower().replace("_", "-")
    missing = []
    for one in licences.requirements():
        try:
            distribution(one.name)
        except PackageNotFoundError:
            continue
        missing += [one.name] if f"| {one.name.lower().replace('_', '-')} " not in page else []
    assert not missing, "make notices"


@pytest.mark.parametrize(
    ("said", "terms"),
    [
        ("MIT", ("MIT",)),
        ("Apache-2.0 OR BSD-3-Clause", ("Apache-2.0", "BSD-3-Clause")),
        ("(MIT AND BSD-2-Clause)", ("MIT", "BSD-2-Clause")),
        ("GPL-3.0-or-later", ("GPL-3.0",)),
        ("Do what you like", ()),
    ],
)
def test_licences_are_read(said: str, terms: tuple[str, ...]) -> None:
    assert licences.spdx(said) == terms


@pytest.mark.parametrize(
    ("terms", "choice", "allowed"),
    [
        (("MIT",), False, True),
        (("GPL-3.0",), False, False),
        (("GPL-3.0", "MIT"), True, True),
        (("GPL-3.0", "MIT"), False, False),
        ((), False, False),
    ],
)
def test_a_choice_needs_one_that_is_allowed(terms: tuple[str, ...], choice: bool, allowed: bool) -> None:
    one = licences.Licence(package="p", version="1", said="", terms=terms, choice=choice)
    assert one.allowed == allowed


def test_the_pythons_that_are_checked_are_those_that_are_promised() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
