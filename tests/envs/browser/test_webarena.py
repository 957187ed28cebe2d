"""WebArena's own tasks and evaluators on a stand-in of its shop. This tests the plumbing; it is no result."""

import asyncio
import json
import re
from typing import Any

import pytest

from birl.envs.open import World
from birl.errors import BirlError
from tests.envs.browser.browsers import made, needs_browser, said, with_world
from tests.envs.browser.sites import CASE, GUARD, serving

SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE")
OPTIONS = {"workers": "1", "pre_observation_delay": "0.1"}
pytestmark = needs_browser


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving() as (shop, neighbour):
        for site in SITES:
            monkeypatch.setenv(f"WA_{site}", f"http://127.0.0.1:{shop.server_port}")
        yield shop, neighbour


def played(use: Any, **options: Any) -> Any:
    return asyncio.run(asyncio.wait_for(with_world("webarena", {**OPTIONS, **options}, use), 110))


def link(content: str, name: str) -> str:
    return re.search(rf"\[(\w+)\] link '{name}'", content)[1]  # pyright: ignore[reportOptionalSubscript]


def test_webarenas_evaluators_reward(shop: Any) -> None:
    async def use(world: World) -> None:
        env = made(world, "158")  # url_match
        (first,) = await env.start()
        assert "fit all 11 cards" in first.content and "goto('http://www.example.com')" in first.content
        away = await said(env, f"click('{link(first.content, 'Night guard')}')")
        assert GUARD in away.messages[0].content and not away.done
        back = await said(env, "go_back()")
        there = await said(env, f"click('{link(back.messages[0].content, 'Game card case')}')")
        assert (there.reward, there.done) == (1.0, True)
        await env.close()

        for answer, reward in (
            ("Joseph Brzezinski, Catso, Dibbins, Anglebert Dinkherhump, Michelle Davis", 1.0),
            ("Anna", 0.0),
        ):
            env = made(world, "21")  # string_match
            await env.start()
            told = await said(env, f"send_msg_to_user('{answer}')")
            assert (told.reward, told.done) == (reward, True)
            await env.close()

    played(use, tasks="[158,21]")
    assert any(a.startswith("POST /customer/account/loginPost/ e=emma.lopez") for a in shop[0].asked)


def test_nothing_but_the_sites_can_be_reached(shop: Any) -> None:
    site, neighbour = shop

    async def use(world: World) -> None:
        env = made(world, "158")
        await env.start()
        for place in (
            "file:///etc/hostname",
            f"http://127.0.0.1:{neighbour.server_port}/",
            f"http://127.0.0.1:{site.server_port}@127.0.0.1:{neighbour.server_port}/",
            "view-source:file:///etc/hostname",
            "chrome://version",
            "javascript:alert(1)",
            "data:text/html,<iframe src='file:///etc/hostname'>",
            "http://[",
        ):
            found = await said(env, f'goto("{place}")')
            assert "Error: invalid action: goto:" in found.messages[0].content, place
        assert not (await said(env, f"goto('http://127.0.0.1:{site.server_port}/fine')")).done
        await env.close()

    played(use, tasks="[158]")
    assert "/fine" in site.asked and not neighbour.asked


ANSWER = {"task_type": "NAVIGATE", "status": "SUCCESS", "retrieved_data": None}
NAMES = ["Catso", "Dibbins", "Anglebert", "Michelle Davis"]


def test_webarena_verified_judges_requests_and_answers(shop: Any) -> None:
    async def one(world: World, task: str, actions: list[str]) -> float:
        env = made(world, task)
        (first,) = await env.start()
        assert '"task_type"' in first.content
        content = first.content
        for action in actions:
            name = re.search(r"<(.*)>", action)
            found = await said(env, action.replace(f"<{name[1]}>", link(content, name[1])) if name else action)
            content = found.messages[0].content
        assert found.done
        await env.close()
        return found.reward

    def send(answer: Any) -> str:
        return f"send_msg_to_user({json.dumps(json.dumps(answer))})"

    async def use(world: World) -> None:
        assert await one(world, "118", ["click('<Night guard>')", send(ANSWER)]) == 1.0
        assert await one(world, "118", ["click('<Game card case>')", send(ANSWER)]) == 0.0
        assert await one(world, "118", ["click('<Night guard>')", "send_msg_to_user('done')"]) == 0.0
        assert await one(world, "21", [send({**ANSWER, "task_type": "RETRIEVE", "retrieved_data": NAMES})]) == 1.0
        assert await one(world, "21", [send({**ANSWER, "task_type": "RETRIEVE", "retrieved_data": ["Anna"]})]) == 0.0
        assert await one(world, "21", ["report_infeasible('I cannot.')"]) == 0.0

    played(use, tasks="[118,21]", verified="true")
    assert CASE in shop[0].asked


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tasks": "[16]"}, r"a language model judges WebArena's task 16"),
        ({"tasks": "[812]"}, r"WebArena's tasks are 0 to 811, not '812'"),
    ],
)
def test_tasks_that_cannot_be_played_are_told(shop: Any, options: dict[str, str], told: str) -> None:
    async def use(world: World) -> None:
        raise AssertionError("it opened")

    with pytest.raises(BirlError, match=told):
        played(use, **options)


def test_sites_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for site in SITES:
        monkeypatch.delenv(f"WA_{site}", raising=False)
    monkeypatch.setenv("WA_MAP", "http://127.0.0.1:1")

    async def use(world: World) -> None:
        raise AssertionError("it opened")

    with pytest.raises(BirlError, match=r"WA_SHOPPING, WA_SHOPPING_ADMIN, .*WA_HOMEPAGE must hold the addresses"):
        played(use)
