"""Every key, preset, file, test and function that a page names exists, and every link leads somewhere."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from birl.config.keys import SHORTHANDS, documentation, presets
from birl.config.schema import DPO, RL, RM, SFT, Eval, Serve, Tinker
from birl.envs.open import BUILT_IN
from birl.plan import scenario
from tests.docs.pages import CODE, FENCE, OTHERS, PAGES, PEERS, ROOT, preset_rows, spans

SCHEMAS = (RL, Eval, SFT, RM, DPO, Serve, Tinker)
KEYS = {key for kind in SCHEMAS for key in documentation(kind)}
for module, name in (where.split(":") for where in BUILT_IN.values()):  # the keys of tasks that come along
    KEYS |= {f"env.{key}" for key in documentation(getattr(import_module(module), name).Config)}
SCENARIO = {f"{name}.{key}" for name in scenario.SECTIONS for key in vars(getattr(scenario.Scenario(), name))}
SECTIONS = tuple(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
FOLDERS = ("birl", "tests", "docs", "recipes", "examples", "benchmarks")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_what_is_named_exists(page: Path) -> None:
    rows = {CODE.findall(" ".join(row))[0]: row for row in preset_rows(page)}
    own = {span for row in rows.values() for span in CODE.findall(row[2])}  # keys without their section
    own |= SCENARIO if page.name == "simulate.md" else set()
    own |= peer_keys(page) if page.name in PEERS else set()
    missing = [span for span in spans(page) if span not in own and problem(span)]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def peer_keys(page: Path) -> set[str]:
    """What the first columns of the tables of a page for migration name."""
    rows = re.findall(r"^\| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {key for row in rows for key in CODE.findall(row)}


def problem(span: str) -> bool:
    """Whether this is a key, preset, file, test or function that does not exist."""
    key, equals, value = span.partition("=")
    section, dot, rest = key.partition(".")
    keys = KEYS | {"reward", "model", "algorithm"} | set(SHORTHANDS)
    if equals and key in presets(RL) and re.fullmatch(r"[a-z_0-9]+", value) and not Path(value).exists():
        return value not in presets(RL)[key]
    if (
        dot
        and section in SECTIONS
        and re.fullmatch(r"[a-z_0-9]+", rest)
        and rest not in ("py", "json", "jsonl", "yaml")
    ):
        return key not in keys
    if equals and re.fullmatch(r"[a-z_]+", key):
        return key not in keys
    path, colons, name = span.partition("::")
    if path.split("/")[0] in FOLDERS and re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", path):
        return not (ROOT / path).exists() or (bool(colons) and f"def {name}(" not in (ROOT / path).read_text())
    if re.fullmatch(r"[A-Za-z_]\w*\(\)|[A-Z]\w+\.[a-z_]\w*", span):
        return span.removesuffix("()").rpartition(".")[2] not in defined()
    return False


@cache
def defined() -> set[str]:
    """Names of all functions and classes of the package."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "birl").rglob("*.py"))
    return set(re.findall(r"^\s*(?:async def|def|class) (\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith(("http://", "https://")) or (page.parent / target).exists(), target
