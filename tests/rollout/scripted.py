"""An engine that says what it is told to, and a chat with a real tokenizer."""

import asyncio
from collections.abc import Callable, Sequence

from birl.rollout.session import Limits, Session
from birl.text.chat import Chat
from birl.types import Completion, SamplingParams, Stop
from tests.tiny import tiny_tokenizer

CHAT = Chat(tiny_tokenizer())
END = 2


class Scripted:
    """Answers with the texts it was given, in order, or with what a function makes of the prompt. Keeps what it was
    asked."""

    version = 3

    def __init__(self, answers: Sequence[str] | Callable[[str], str], chat: Chat = CHAT, delay: float = 0.0) -> None:
        self.answers, self.chat, self.delay = answers, chat, delay
        self.prompts: list[tuple[int, ...]] = []
        self.params: list[SamplingParams] = []

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        number = len(self.prompts)
        self.prompts.append(prompt_ids)
        self.params.append(params)
        await asyncio.sleep(self.delay)
        text = self.answers(self.chat.decode(prompt_ids)) if callable(self.answers) else self.answers[number]
        tokens = (*self.chat.encode(text), min(self.chat.end_ids))
        cut = tokens[: params.max_tokens]
        stop = Stop.STOP if len(cut) == len(tokens) else Stop.LENGTH
        return Completion(tokens=cut, logprobs=(-0.5,) * len(cut), versions=(3,) * len(cut), stop=stop)

    async def close(self) -> None:
        pass


def session(engine: Scripted, limits: Limits | None = None, tokens: int = 40) -> Session:
    return Session(engine, engine.chat, SamplingParams(max_tokens=tokens), limits or Limits(), lambda turn: 100 + turn)
