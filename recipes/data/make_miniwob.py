"""Scripted MiniWoB++ episodes as chats for `birl sft`: python recipes/data/make_miniwob.py 12 > episodes.jsonl

The script reads what a model would read, and answers by rules. Only what the task's evaluator rewarded is kept.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator

from birl.config.schema import Env
from birl.envs.open import World, open_world
from birl.types import Message, Task

FIRST_SEED = 500_000  # neither training nor validation of the recipe has these pages


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise LookupError(f"no {pattern} in {text}")
    return match[1]


def click(page: str, kind: str, name: str) -> str:
    number = found(rf"\[(\w+)\] {kind} '{re.escape(name)}", page)
    return f"click('{number}')"


def enter_text(goal: str, page: str) -> Iterator[str]:
    box = found(r"\[(\w+)\] textbox", page)
    text = found('"(.*)"', goal)
    yield f"fill('{box}', '{text}')"
    yield click(page, "button", "Submit")


def click_button(goal: str, page: str) -> Iterator[str]:
    yield click(page, "button", found('"(.*)"', goal))


def click_link(goal: str, page: str) -> Iterator[str]:
    yield click(page, "clickable", found('"(.*)"', goal))


def click_test_2(goal: str, page: str) -> Iterator[str]:
    yield click(page, "button", "ONE")


SCRIPTS: dict[str, Callable[[str, str], Iterator[str]]] = {
    "click-test-2": click_test_2,
    "click-button": click_button,
    "click-link": click_link,
    "enter-text": enter_text,
}


async def episode(world: World, name: str, seed: int) -> list[dict[str, str]] | None:
    """Its messages, None where the script was wrong."""
    env = world.open(Task(id=name, prompt="", columns={"task": name, "seed": seed}))
    try:
        messages = list(await env.start())  # pyright: ignore
        first = messages[0].content
        for action in SCRIPTS[name](first.split("\n")[0].removeprefix("Goal: "), first):
            reply = Message(role="assistant", content=action)
            result = await env.step(reply)  # pyright: ignore
            messages += [reply, *result.messages]
        if result.reward <= 0:
            return None
        return [{"role": m.role, "content": m.content} for m in messages[:-1]]
    except LookupError:
        return None
    finally:
        await env.close()


async def main(each: int) -> None:
    options = {"tasks": f"[{','.join(SCRIPTS)}]", "actions": "[miniwob_liu18]"}
    world = await open_world(Env(kind="miniwob", options=options), lambda prompt: "")
    try:
        asked = [(name, FIRST_SEED + i) for i in range(each) for name in SCRIPTS]
        episodes = await asyncio.gather(*(episode(world, *one) for one in asked))
    finally:
        await world.close()
    for messages in filter(None, episodes):
        print(json.dumps({"messages": messages}))
    print(f"{sum(m is not None for m in episodes)} of {len(asked)} episodes were right", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 12))
