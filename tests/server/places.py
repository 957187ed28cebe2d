"""An episode with an address, and clients of OpenAI and Anthropic that know it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from birl.rollout.assemble import samples
from birl.rollout.session import Limits, Session
from birl.server.gateway import Gateway
from birl.text.chat import Chat
from birl.types import Outcome, SamplingParams, Trajectory
from tests.rollout.scripted import CHAT
from tests.text.test_tools import QWEN
from tests.tiny import tiny_tokenizer

TOOLED = Chat(tiny_tokenizer(template=QWEN))
THINKING = Chat(tiny_tokenizer(template=(Path(__file__).parents[1] / "text" / "templates" / "qwen3.jinja").read_text()))
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


class Place:
    """An episode with an address, and clients that know it."""

    def __init__(self, gateway: Gateway, session: Session) -> None:
        self.gateway, self.session, self.url = gateway, session, session.base_url
        self.openai = openai.AsyncOpenAI(base_url=self.url, api_key="any", max_retries=0, timeout=20)
        self.anthropic = anthropic.AsyncAnthropic(
            base_url=self.url.removesuffix("/v1"), api_key="any", max_retries=0, timeout=20
        )
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20)

    async def chat(self, messages: Any = HI, **keys: Any) -> Any:
        return await self.openai.chat.completions.create(**{"model": "any", "messages": messages, **keys})

    async def message(self, messages: Any = HI, **keys: Any) -> Any:
        return await self.anthropic.messages.create(**{"model": "any", "messages": messages, "max_tokens": 90, **keys})

    def spoken(self) -> list[str]:
        """What is trained of each sample."""
        all_turns = Trajectory(turns=self.session.turns, reward=1.0, score=1.0, outcome=Outcome.OK)
        found = samples(all_turns, 1.0, 0, 0)
        return [CHAT.decode(s.tokens[s.mask].tolist()) for s in found]


@asynccontextmanager
async def place(engine: Any, sampling: str = "run", **limits: Any) -> AsyncIterator[Place]:
    gateway = Gateway(engine.chat, sampling)
    await gateway.start()
    params = SamplingParams(max_tokens=90, temperature=1.0)
    session = Session(engine, engine.chat, params, Limits(**limits), lambda turn: 100 + turn, gateway=gateway)
    found = Place(gateway, session)
    try:
        yield found
    finally:
        await found.openai.close()
        await found.anthropic.close()
        await found.http.aclose()
        session.close()
        await gateway.close()


def played(engine: Any, body: Callable[[Place], Coroutine[Any, Any, None]], **keys: Any) -> None:
    async def main() -> None:
        async with place(engine, **keys) as here:
            await body(here)

    asyncio.run(asyncio.wait_for(main(), 30))
