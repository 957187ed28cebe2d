"""Functions with the real clients are agents: in threads or in the event loop, with their reward returned or sent."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birl.config.schema import Env as Keys
from birl.envs.functions import row
from birl.envs.open import open_world
from birl.errors import BirlError
from birl.parameters import env_of
from birl.rollout.assemble import samples
from birl.rollout.episode import run_episode
from birl.rollout.session import Limits, Session
from birl.server.gateway import Gateway
from birl.server.messages import message
from birl.text.chat import Chat
from birl.types import PLACE, Message, Outcome, Picture, SamplingParams, Task, ToolCall, Trajectory
from tests.rollout.scripted import CHAT, Scripted, session
from tests.scenario import scenario
from tests.text.test_tools import QWEN
from tests.tiny import tiny_tokenizer

AGENTS = """
import sys
import httpx, openai

SAID = [{"role": "user", "content": "Hi"}]

def ask(base_url, messages=SAID, model="any", **keys):
    with openai.OpenAI(base_url=base_url, api_key="x", **keys) as client:
        return client.chat.completions.create(model=model, messages=messages).choices[0].message.content

def returns(base_url, task, *, bonus=0.5):
    return bonus + float(ask(base_url, task["messages"]) == task["answer"]) + (task["prompt"] == "One\\n\\nTwo")

async def waits(base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="any", messages=SAID)
    return 1

def sends(base_url):
    ask(base_url)
    httpx.post(base_url + "/reward", json={"reward": 3})

def both(base_url):
    ask(base_url, model="birl/a"), ask(base_url, model="birl/b")
    return {"a": 1.0, "b": -1.0}

def forgets_one(base_url):
    ask(base_url, model="birl/a"), ask(base_url, model="birl/b")
    httpx.post(base_url + "/reward", json={"reward": 3, "agent": "a"})

def nothing(base_url):
    ask(base_url)

def leaves(base_url):
    ask(base_url)
    sys.exit(0)

def light(base_url):
    import json, urllib.request
    data = json.dumps({"messages": SAID}).encode()
    urllib.request.urlopen(base_url + "/chat/completions", data, timeout=30).read()
    return 3

def swallows(base_url):
    try:
        ask(base_url)
    except Exception:
        return 1.0

def impatient(base_url):
    for seconds in (0.1, 10):
        try:
            ask(base_url, timeout=seconds, max_retries=0)
        except openai.APITimeoutError:
            pass
    return 1.0
"""


@pytest.fixture(autouse=True)
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(AGENTS)


def play(name: str, engine: Any = None, n: int = 1, timeout: float = 20.0, **options: Any) -> list[Trajectory]:
    task = Task(id="t", prompt=(Message(role="system", content="One"), Message(role="user", content="Two")), answer="x")

    async def main() -> list[Trajectory]:
        world = await open_world(Keys(kind=f"own.py:{name}", options=options), CHAT.text)
        assert world.agent
        gateway = Gateway(CHAT)
        await gateway.start()

        def session() -> Session:
            asked = engine or Scripted(lambda _: "x")
            params, limits = SamplingParams(max_tokens=9), Limits(timeout=timeout)
            return Session(asked, CHAT, params, limits, lambda turn: turn, gateway=gateway)

        found = await asyncio.gather(*(run_episode(world.open(task), session()) for _ in range(n)))
        assert not gateway.visits
        await gateway.close()
        return found

    return scenario(main)


ENDS = {
    "returns": (Outcome.OK, 2.5, ""),
    "waits": (Outcome.OK, 1.0, ""),
    "sends": (Outcome.OK, 3.0, ""),
    "both": (Outcome.OK, 0.0, ""),
    "forgets_one": (Outcome.ENV_ERROR, None, "no reward for b"),
    "nothing": (Outcome.ENV_ERROR, None, "the agent gave no reward"),
    "leaves": (Outcome.ENV_ERROR, None, "SystemExit"),
}


@pytest.mark.parametrize(("name", "end"), ENDS.items(), ids=ENDS)
def test_how_it_ends(name: str, end: tuple[Outcome, float | None, str]) -> None:
    (found,) = play(name)
    assert (found.outcome, None if end[1] is None else found.reward) == end[:2], found.detail
    assert end[2] in found.detail
    assert dict(found.rewards) == ({"a": 1.0, "b": -1.0} if name == "both" else {})


def test_calls_in_a_prompt_reach_an_agent_as_openai_has_them() -> None:
    called = Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments='{"a": 1}', id="c"),))
    told = Message(role="tool", content="2", tool_call_id="c")
    asked = row(Task(id="t", prompt=(Message(role="user", content="Hi"), called, told)))["messages"]
    assert asked[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c"}
    ]
    assert asked[2] == {"role": "tool", "content": "2", "tool_call_id": "c"}


def test_pictures_of_a_prompt_reach_an_agent_as_openai_has_them() -> None:
    """They were a number beside the text, which no server reads: the picture was lost."""
    task = Task(id="t", prompt=(Message(role="user", content=f"Which {PLACE}?", pictures=(Picture.of(b"\x89PNG"),)),))
    (asked,) = row(task)["messages"]
    assert asked["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    assert message(asked, 0) == task.prompt[0] and json.loads(json.dumps(row(task)))["messages"] == [asked]


TASKS = """
def function(task):
    import json
    plain = isinstance(task, dict) and json.loads(json.dumps(task))
    own = plain["level"] == 3 and plain["prompt"] == "Hi" and plain["messages"] == [{"role": "user", "content": "Hi"}]
    return own * score(task)

class Agent:
    def __init__(self, task):
        self.task = task

    async def run(self, model):
        await model.ask(self.task.prompt)
        return score(self.task)

    async def close(self):
        pass

def score(task):
    return task.columns["level"] + float(task.answer == "x" and task.prompt[0].content == "Hi" and task.id == "t")
"""


@pytest.mark.parametrize("name", ["function", "Agent"])
def test_what_reads_a_class_s_task_reads_a_function_s(name: str) -> None:
    """A function's was a dict without attributes."""
    Path("own.py").write_text(TASKS)
    task = Task(id="t", prompt=(Message(role="user", content="Hi"),), answer="x", columns={"level": 3})

    async def main() -> float:
        world = await open_world(Keys(kind=f"own.py:{name}"), CHAT.text)
        session = Session(Scripted(lambda _: "x"), CHAT, SamplingParams(max_tokens=9), Limits(), lambda turn: turn)
        return await world.open(task).run(session)  # pyright: ignore

    assert scenario(main) == 4.0


def test_its_own_keys() -> None:
    assert play("returns", bonus="0.25")[0].reward == 2.25


def test_an_agent_that_swallows_a_failed_engine_earns_nothing() -> None:
    class Down(Scripted):
        async def generate(self, *args: Any, **keys: Any) -> Any:
            raise RuntimeError("boom")

    (found,) = play("swallows", Down([]))
    assert found.outcome is Outcome.ENGINE_ERROR and "boom" in found.detail and found.reward != 1.0


def test_what_a_client_did_not_wait_for_is_no_turn() -> None:
    class Slow(Scripted):
        async def generate(self, *args: Any, **keys: Any) -> Any:
            self.delay = 0.0 if self.prompts else 5.0
            return await super().generate(*args, **keys)

    engine = Slow(lambda _: "x")
    (found,) = play("impatient", engine)
    assert found.outcome is Outcome.OK and len(found.turns) == 1 and len(engine.prompts) == 2


@pytest.mark.parametrize("name", ["waits", "sends"])
def test_the_deadline_ends_it(name: str) -> None:
    (found,) = play(name, Scripted(lambda _: "x", delay=30.0), timeout=0.5)
    assert found.outcome is Outcome.TIMEOUT and not found.turns


class Together(Scripted):
    """Answers when so many have asked."""

    def __init__(self, count: int) -> None:
        super().__init__(lambda _: "x")
        self.count, self.all = count, asyncio.Event()

    async def generate(self, *args: Any, **keys: Any) -> Any:
        found = await super().generate(*args, **keys)
        if len(self.prompts) == self.count:
            self.all.set()
        await self.all.wait()
        return found


def test_more_than_there_are_threads_for_steps() -> None:
    """A hundred plain agents wait for the model at once."""
    engine = Together(100)
    found = play("light", engine, n=100, timeout=30.0)
    assert {(t.outcome, t.reward) for t in found} == {(Outcome.OK, 3.0)}


class Safe:
    """An environment of TRL."""

    def reset(self, code: str, **row: Any) -> str:
        self.code, self.tries, self.row = code, 0, row
        return f" It has {len(code)} digits."

    def dial(self, code: str) -> str:
        """Dials a code.

        Args:
            code: The digits.
        """
        self.tries += 1
        if not code.isdigit():
            raise ValueError("digits alone")
        return "open" if code == self.code else "shut"

    async def get_reward(self) -> float:
        return 1.0 / self.tries

    def _hidden(self) -> None: ...


async def look(place: str) -> list[dict[str, Any]]:
    """Looks.

    Args:
        place: Where.
    """
    await asyncio.sleep(0)
    return [{"type": "text", "text": f"A note in {place}: "}, {"type": "text", "text": "42"}]


def acts(agent: Any, *answers: str, **limits: Any) -> tuple[Trajectory, str]:
    """An episode, and its last prompt with the last answer."""
    chat = Chat(tiny_tokenizer(template=QWEN))
    found = asyncio.run(run_episode(agent, session(Scripted(answers, chat), Limits(**limits), 200)))
    ids = (*found.turns[-1].prompt, *found.turns[-1].completion.ids) if found.turns else ()
    return found, chat.decode(ids)


def called_with(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_and_environments_of_trl() -> None:
    """A tool's error is told to the model; the environment's reward counts where the episode is cut, too."""
    task = Task(id="0", prompt=(Message(role="user", content="Open it."),), columns={"code": "42", "environment": "a"})
    agent = env_of("single_turn", {"tools": [look], "environment_factory": {"a": Safe, "b": Safe}}, None)
    both = called_with("look", place="the desk") + called_with("look", place="the bed")
    wrong = called_with("dial", code="x") + called_with("no")
    found, text = acts(agent(task), both, wrong, called_with("dial", code="42"), "Done.")
    assert (found.outcome, found.reward, len(samples(found, 1.0, 0, 0))) == (Outcome.OK, 0.5, 1)
    assert found.parts == {"tools/calls": 5, "tools/failed": 2}
    assert "Open it. It has 2 digits." in text and text.index("desk: 42") < text.index("bed: 42")
    assert "Error: digits alone" in text and "there is no tool no; there are look, dial." in text
    assert "_hidden" not in text and "get_reward" not in text and text.count("Dials a code") == 1
    cut, _ = acts(agent(task), called_with("dial", code="1"), called_with("dial", code="2"), turns=2)
    assert (cut.outcome, cut.reward, len(cut.turns)) == (Outcome.TRUNCATED, 0.5, 2)
    other, _ = acts(agent(replace(task, columns={"code": "42"})))
    assert other.detail == "its row has environment=None; there are a, b."


@pytest.mark.parametrize(
    ("tools", "factory", "rewards", "told"),
    [
        ([3], None, [len], "give functions"),
        ([print], None, [len], "The tool print"),
        ([], {"a": Safe, "b": print}, [len], "NoneType has no method reset"),
        ([look], None, [], "without a reward"),
        ([], Safe, [lambda environments: 0], "get no `environments`"),
    ],
)
def test_what_trl_could_not_use_either_is_refused(tools: Any, factory: Any, rewards: Any, told: str) -> None:
    with pytest.raises(BirlError, match=told):
        env_of("single_turn", {"tools": tools, "environment_factory": factory}, rewards)
