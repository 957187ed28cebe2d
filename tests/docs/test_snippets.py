"""The Python of the pages runs as it stands there, with what the page supposes: files, a small model, servers."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import birl
from birl.types import Task
from tests.docs.commands import ROWS, SMALL
from tests.docs.pages import PAGES, blocks, jsonl

ELSEWHERE = {"serve.md": "tests/server/test_page.py has a server for it"}
TASK = Task(id="given:1", prompt="What is 3 + 4?", answer="7")


def snippets() -> list:
    found = []
    for page in PAGES:
        python = [text for language, text in blocks(page) if language == "python"]
        found += [pytest.param(page.name, text, id=f"{page.name}-{n}") for n, text in enumerate(python, 1)]
    return [one for one in found if one.values[0] not in ELSEWHERE]


@pytest.mark.parametrize(("page", "text"), snippets())
def test_snippets_run(page: str, text: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(birl, "Trainer", small_trainer(tiny), raising=False)
    for name in set(re.findall(r'"([\w-]+\.jsonl)"', text)):
        Path(name).write_text(jsonl(ROWS))
    for module in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
        pytest.importorskip(module)
    names = {**supposed(page), "__name__": "__main__" if "Trainer(" in text else "snippet"}
    exec(compile(text, page, "exec"), names)
    for name, check in CHECKS.items():
        if name in names and f"def {name}(" in text:
            check(names[name])


def small_trainer(tiny: Path) -> Callable[..., Any]:
    """`Trainer` with a tiny model, one step and two prompts. What it would start elsewhere is not started."""
    from birl.trainer import Trainer

    short: dict[str, Any] = {word.partition("=")[0]: word.partition("=")[2] for word in SMALL}
    short |= {"track.report": False, "track.tensorboard": False}
    same = {"model": str(tiny), "max_steps": 1, "max_tokens": 6}

    class Small(Trainer):
        def train(self) -> dict[str, Any]:
            return {} if self._launcher else super().train()

    def make(*arguments: Any, overrides: dict[str, Any] | None = None, **given: Any) -> Trainer:
        return Small(*arguments, overrides={**short, **(overrides or {})}, **{**given, **same})

    return make


def supposed(page: str) -> dict[str, Any]:
    """Names that the text of a page introduces before its snippet."""
    if page != "router.md":
        return {}
    from birl.engines.client import Client
    from birl.engines.router import Router

    return {"Router": Router, "Client": Client, "clients": [Client("http://127.0.0.1:9")], "children": {}, "token": ""}


def reward_is_a_number_for_each(function: Callable[..., Any]) -> None:
    found = function(["It is 7.", "8"], ["What is 3 + 4?"] * 2, answer=["7", "7"], level=[1, 2])
    assert len(found) == 2 and found[0] > found[1]


def gold_is_a_list_of_replies(function: Callable[..., Any]) -> None:
    assert function(None, TASK)[-1] == "<answer>7</answer>"


def judged_awaits(function: Callable[..., Any]) -> None:
    assert asyncio.run(function(["It is 7.", "8"], gold=["7", "7"])) == [1.0, 0.0]


CHECKS = {"short_and_right": reward_is_a_number_for_each, "judged": judged_awaits, "gold": gold_is_a_list_of_replies}
