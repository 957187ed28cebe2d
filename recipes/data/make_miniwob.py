"""Scripted MiniWoB++ episodes as chats: python recipes/data/make_miniwob.py 6 [TASK ...] > episodes.jsonl

The script reads what a model would read (`env.page=list`), and answers by rules: the element as the page names it, then
the action. Only what the task's evaluator rewarded is kept. The pages are of neither training nor validation.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from birl.config.schema import Env
from birl.envs.open import World, open_world
from birl.types import Message, Task

FIRST_SEED = 500_000
OPTIONS = {"actions": "[miniwob_liu18]", "describe": "none", "page": "list"}
LINE = re.compile(r"^(?P<text>.*?) ?\[(?P<number>\w+)\](?: (?P<kind>[a-z]+)(?: |$))?.*$", re.MULTILINE)
Script = Callable[[str, "Page"], Iterator[str]]


@dataclass(frozen=True)
class Element:
    text: str
    number: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.text} [{self.number}]".strip()

    def click(self) -> str:
        return f"{self.name}\nclick('{self.number}')"

    def fill(self, text: str) -> str:
        return f"{self.name}\nfill('{self.number}', '{text}')"


class Page:
    """The elements that can be acted on, in their order."""

    def __init__(self, text: str) -> None:
        found = (match.groupdict("") for match in LINE.finditer(text))
        self.elements = [Element(**groups) for groups in found]

    def of(self, *kinds: str) -> list[Element]:
        return [e for e in self.elements if e.kind in kinds]

    def named(self, text: str, *kinds: str) -> Element:
        """Exactly so, else but for capitals and what surrounds it."""
        among = self.of(*kinds) if kinds else self.elements
        plain = text.strip(" .,").lower()
        for same in (lambda e: e.text == text, lambda e: e.text.strip(" .,").lower() == plain):
            if found := next(filter(same, among), None):
                return found
        raise LookupError(f"no {text!r} in {[e.name for e in among]}")


def quoted(goal: str) -> str:
    return found(r'"(.*?)"', goal)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise LookupError(f"no {pattern} in {text}")
    return match[1]


def only_button(goal: str, page: Page) -> Iterator[str]:
    yield page.of("button")[0].click()


def named(goal: str, page: Page) -> Iterator[str]:
    yield page.named(quoted(goal)).click()


def click_test_2(goal: str, page: Page) -> Iterator[str]:
    yield page.named("ONE").click()


def first_box(goal: str, page: Page) -> Iterator[str]:
    yield page.of("textbox")[0].click()


def nth_box(goal: str, page: Page) -> Iterator[str]:
    yield page.of("textbox")[int(found(r"(\d)", goal)) - 1].click()


def enter(goal: str, page: Page) -> Iterator[str]:
    yield page.of("textbox")[0].fill(quoted(goal))
    yield page.named("Submit").click()


def enter_password(goal: str, page: Page) -> Iterator[str]:
    for box in page.of("textbox"):
        yield box.fill(quoted(goal))
    yield page.named("Submit").click()


def login_user(goal: str, page: Page) -> Iterator[str]:
    for box, text in zip(page.of("textbox"), re.findall(r'"(.*?)"', goal), strict=True):
        yield box.fill(text)
    yield page.named("Login").click()


def dialog_2(goal: str, page: Page) -> Iterator[str]:
    label = quoted(goal)
    yield page.named("Close" if label == "x" else label, "button").click()


def tab(goal: str, page: Page) -> Iterator[str]:
    yield page.named(found(r"(Tab #\d)", goal)).click()


def choices(goal: str, page: Page) -> Iterator[str]:
    listed = found(r"Select (.*) and click Submit", goal)
    for text in [] if listed == "nothing" else listed.split(", "):
        yield page.named(text, "checkbox", "radio").click()
    yield page.named("Submit", "button").click()


WIDGETS = {"text": "textbox", "textarea": "textbox"}


def widget(goal: str, page: Page) -> Iterator[str]:
    kind = quoted(goal)
    yield page.of(WIDGETS.get(kind, kind))[-1 if kind == "textarea" else 0].click()


SCRIPTS: dict[str, Script] = {
    "click-test": only_button,
    "click-test-2": click_test_2,
    "click-button": named,
    "click-link": named,
    "click-dialog": only_button,
    "click-dialog-2": dialog_2,
    "click-tab": tab,
    "click-option": choices,
    "click-checkboxes": choices,
    "click-widget": widget,
    "focus-text": first_box,
    "focus-text-2": nth_box,
    "enter-text": enter,
    "enter-text-dynamic": enter,
    "enter-password": enter_password,
    "login-user": login_user,
}


async def episode(world: World, name: str, seed: int) -> list[dict[str, str]] | None:
    """Its messages, None where the script was wrong."""
    env = world.open(Task(id=name, prompt="", columns={"task": name, "seed": seed}))
    try:
        messages: list[Any] = list(await env.start())  # pyright: ignore
        goal, _, page = messages[0].content.partition("\n\nPage:\n")
        for action in SCRIPTS[name](goal.removeprefix("Goal: "), Page(page)):
            reply = Message(role="assistant", content=action)
            result = await env.step(reply)  # pyright: ignore
            messages += [reply, *result.messages]
        if result.reward <= 0:
            return None
        return [{"role": m.role, "content": m.content} for m in messages[:-1]]
    except LookupError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None
    finally:
        await env.close()


async def main(each: int, names: list[str]) -> None:
    options = {**OPTIONS, "tasks": f"[{','.join(names)}]"}
    world = await open_world(Env(kind="miniwob", options=options), lambda prompt: "")
    try:
        asked = [(name, FIRST_SEED + i) for i in range(each) for name in names]
        episodes = await asyncio.gather(*(episode(world, *one) for one in asked))
    finally:
        await world.close()
    for messages in filter(None, episodes):
        print(json.dumps({"messages": messages}))
    for name in names:
        right = [m is not None for m, (which, _) in zip(episodes, asked, strict=True) if which == name]
        print(f"{name}: {sum(right)} of {len(right)} episodes were right", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 6, sys.argv[2:] or list(SCRIPTS)))
