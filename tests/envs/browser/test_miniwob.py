"""MiniWoB++ with a real browser: what the model sees, what it may do, what it gets for it."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from birl.envs.browser.env import LEFT_OUT, action_of
from birl.envs.open import World
from birl.errors import BirlError
from tests.envs.browser.browsers import made, needs_browser, said, with_world

TASKS = "[click-test,click-button,click-link,enter-text]"
ONE = {"workers": "1", "tasks": TASKS, "seeds": "2", "validation_seeds": "1"}


def played(use: Any, **options: Any) -> Any:
    return asyncio.run(with_world("miniwob", {**ONE, **options}, use))


@needs_browser
def test_the_tasks_own_evaluator_rewards() -> None:
    async def use(world: World) -> None:
        env = made(world, "enter-text", 3)
        (first,) = await env.start()
        goal, box, button = re.search(
            r'Enter "(\w+)" into.*\[(\d+)\] textbox.*\[(\d+)\] button', first.content, re.DOTALL
        ).groups()  # pyright: ignore
        nothing = await said(env, "I do not know.")
        assert not nothing.done and "Error: invalid action: there is no action" in nothing.messages[0].content
        wrong = await said(env, "click('999')")
        assert not wrong.done and 'Could not find element with bid "999"' in wrong.messages[0].content
        filled = await said(env, f"Let me type.\n```\nfill('{box}', '{goal}')\n```")
        assert not filled.done and f"value='{goal}'" in filled.messages[0].content and filled.prompt is None
        done = await said(env, f"click('{button}')")
        assert (done.reward, done.done, done.info) == (1.0, True, {"invalid_actions": 1.0})
        await env.close()

        env = made(world, "enter-text", 3)
        await env.start()
        empty = await said(env, f"click('{button}')")
        assert (empty.reward, empty.done) == (0.0, True)
        await env.close()

    played(use)


@needs_browser
def test_a_seed_is_a_page_and_pages_are_the_same_for_everybody() -> None:
    async def use(world: World) -> None:
        envs = [made(world, "click-link", seed) for seed in (5, 5, 6)]
        first = await asyncio.gather(*(env.start() for env in envs))
        assert first[0] == first[1] != first[2]
        assert "clickable '" in first[0][0].content and "127.0.0.1" not in first[0][0].content
        word = re.search(r'link "([^"]+)"', first[0][0].content)[1]  # pyright: ignore
        target = re.search(rf"\[(\d+)\] clickable '{re.escape(word)}", first[0][0].content)[1]  # pyright: ignore
        assert (await said(envs[0], f"click('{target}')")).reward == 1.0
        for env in envs:
            await env.close()
        rows = world.rows("train") if world.rows else []
        held_out = world.rows("validation") if world.rows else []
        assert len(rows) == 8 and len(held_out) == 4
        assert not {(r["task"], r["seed"]) for r in rows} & {(r["task"], r["seed"]) for r in held_out}

    played(use)


@needs_browser
def test_as_a_list_the_number_is_behind_the_text() -> None:
    async def use(world: World) -> None:
        env = made(world, "enter-text", 3)
        (first,) = await env.start()
        shown = first.content.partition("Page:\n")[2]
        box, button = re.fullmatch(r"\[(\d+)\] textbox\nSubmit \[(\d+)\] button\n\nNext action:", shown).groups()  # pyright: ignore
        text = re.search(r'Enter "(\w+)"', first.content)[1]  # pyright: ignore
        filled = await said(env, f"[{box}]\nfill('{box}', '{text}')")
        assert f"[{box}] textbox value='{text}'" in filled.messages[0].content
        assert (await said(env, f"Submit [{button}]\nclick('{button}')")).reward == 1.0
        await env.close()
        env = made(world, "click-link", 5)
        (first,) = await env.start()
        word = re.search(r'link "([^"]+)"', first.content)[1]  # pyright: ignore
        target = re.search(rf"^{re.escape(word)}\S* \[(\d+)\]$", first.content, re.MULTILINE)[1]  # pyright: ignore
        assert (await said(env, f"click('{target}')")).reward == 1.0
        await env.close()

    played(use, page="list", describe="none")


NO_ACTIONS = (
    "goto('file:///etc/hostname')",
    "new_tab()",
    "upload_file('13', '/etc/hostname')",
    "__import__('os').system('true')",
    "click('13'); page.goto('file:///etc/hostname')",
    "click('13') click('13')",
    "noop(1e9)",
    "noop('x')",
    "click()",
    "click('13', '13', '13', '13')",
    "click('\\x')",
    "[" * 3000,
)


@needs_browser
def test_only_the_actions_of_the_set_are_done() -> None:
    async def use(world: World) -> None:
        env = made(world, "click-test")
        await env.start()
        for text in NO_ACTIONS:
            found = await said(env, text)
            assert "Error:" in found.messages[0].content and not found.done, text
            assert "click-test" not in found.messages[0].content
        assert (await said(env, "click('13')")).reward == 1.0
        await env.close()

    played(use)


@needs_browser
def test_pictures_are_saved_where_they_are_asked_for(tmp_path: Path) -> None:
    async def use(world: World) -> None:
        env = made(world, "click-test", 4)
        await env.start()
        await said(env, "noop()")
        await said(env, "click('13')")
        await env.close()

    played(use, screenshots="true", screenshot_folder=str(tmp_path / "seen"))
    files = sorted((tmp_path / "seen" / "000000-click-test-4").iterdir())
    assert [file.name for file in files] == ["000.png", "001.png", "002.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)


@needs_browser
def test_long_pages_are_cut_and_old_ones_left_out() -> None:
    async def use(world: World) -> None:
        env = made(world, "click-link", 1)
        (first,) = await env.start()
        assert re.search(r"\.\.\. \(\d+ more lines\)", first.content)
        one = await said(env, "noop()")
        two = await said(env, "noop(10)")
        assert one.prompt is not None and two.prompt is not None
        goal = first.content.split("\n")[0]
        for found, asked in ((one, 3), (two, 5)):
            prompt: Any = found.prompt
            assert len(prompt) == asked and prompt[-1] == found.messages[0] and prompt[0].content.startswith(goal)
            assert [LEFT_OUT in m.content for m in prompt if m.role == "user"] == [True] * (asked // 2) + [False]
        await env.close()

    played(use, max_observation="60", history="1")


@needs_browser
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tasks": "[click-tset]"}, r"no task 'click-tset'\. Did you mean click-test\?"),
        ({"actions": "[bidd]"}, r"env\.actions: there is no action set 'bidd'"),
        ({"actions": "[nav]"}, "no action of these sets is allowed here"),
    ],
)
def test_what_is_not_there_is_told(options: dict[str, str], told: str) -> None:
    async def use(world: World) -> None:
        raise AssertionError("it opened")

    with pytest.raises(BirlError, match=told):
        played(use, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"python": "/bin/false"}, "make setup-browser"),
        ({"python": "/nowhere/python"}, r"env\.python=/nowhere/python: there is no such program"),
        ({"browser": "/nowhere/chromium"}, r"env\.browser=/nowhere/chromium: there is no such program"),
        ({"page": "html"}, r"env\.page=html: must be tree \| list"),
        ({"describe": "all"}, r"env\.describe=all: must be examples"),
        ({"workers": "0"}, r"env\.workers=0: must be at least 1"),
        ({"call_timeout": "0"}, r"env\.call_timeout=0: must be more than 0"),
        ({"wokers": "1"}, r"env\.wokers=1: there is no such key\. Did you mean env\.workers"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(options: dict[str, str], told: str) -> None:
    async def use(world: World) -> None:
        raise AssertionError("it opened")

    browser = {} if "browser" in options else {"browser": "/bin/true"}
    with pytest.raises(BirlError, match=told):
        played(use, **browser, **options)


def test_where_the_action_is() -> None:
    assert action_of("I think.\n\nclick('1')\n") == "click('1')"
    assert action_of("`click('1')`") == "click('1')"
    assert action_of("```\nclick('1')\n```\nbecause\n```python\nclick('2')\n```\nyes") == "click('2')"
    assert action_of("So ```click('13')``` it is") == "click('13')"
    assert action_of("```python click('13')```") == action_of("```python\r\nclick('13')\r\n```") == "click('13')"
    assert action_of("```click [13]```") == "click [13]" and action_of("```noop()```") == "noop()"
    assert action_of("``` fill('1', 'a b') ```") == "fill('1', 'a b')"
    assert action_of("~~~python\nclick('13')\n~~~") == action_of("````\nclick('13')\n````") == "click('13')"
    for before, after in (("<action>\n", "\n</action>"), ("```\n", ""), ("Thus:\n", "\nas I think (so far).")):
        assert action_of(f"{before}click('13'){after}") == "click('13')"
    assert action_of("") == "" and action_of("stop") == "stop"
