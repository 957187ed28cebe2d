"""The HTTP side of an episode: requests of agents and their answers, stored ones included, which clients may refer to
by id instead of sending them again."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from sys import getsizeof
from threading import Lock
from typing import Any

from birl.errors import Aborted, EngineFailed
from birl.rollout.session import Known, Session
from birl.server.limits import Refused
from birl.text.chat import Chat
from birl.types import Conversation, Message, SamplingParams, Turn

Tools = Sequence[Mapping[str, Any]]
Answers = list[tuple[Message, Turn]]
Entry = tuple[Known, int, int, bytes]

TOKEN, SAMPLED = 36, 76  # bytes of a prompt token, and of a sampled one with its log-prob and version


@dataclass(slots=True, kw_only=True)
class Kept:
    """Stores at most `most` answers of `most_bytes` together, evicted in LRU order. Without bounds for an episode,
    whose turns are bounded, and which cannot be read again. `size`: current bytes."""

    most: float = inf
    most_bytes: float = inf
    size: int = 0
    _all: "OrderedDict[str, Entry]" = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)  # requests are parsed outside of the event loop

    @property
    def bounds(self) -> str:
        if self.most == inf:
            return "an episode keeps all of its own"
        return f"the last {self.most:,} are kept, at most {self.most_bytes / 2**20:g} MiB"

    @property
    def readable(self) -> bool:
        return self.most < inf

    def keep(self, id: str, known: Known, own: int = 0, told: bytes = b"") -> None:
        """Store an answer. `own`: messages at its start that are not continued; `told`: body returned for its id."""
        size = bytes_of(known) + len(told)
        with self._lock:
            self._all[id] = known, own, size, told
            self.size += size
            while len(self._all) > self.most or self.size > self.most_bytes:
                self.size -= self._all.popitem(last=False)[1][2]

    def known(self, id: str) -> tuple[Known, ...]:
        """The stored conversation with its tokens; empty if there is none."""
        with self._lock:
            if id not in self._all:
                return ()
            self._all.move_to_end(id)
            return self._all[id][:1]

    def told(self, id: str) -> bytes:
        """The body returned for its id; empty if it is not stored."""
        with self._lock:
            return self._all[id][3] if id in self._all else b""

    def drop(self, id: str) -> bool:
        """Remove an answer; returns whether it was stored."""
        with self._lock:
            entry = self._all.pop(id, None)
            self.size -= entry[2] if entry else 0
            return entry is not None

    def cited(self, id: str) -> tuple[Message, ...] | None:
        """The conversation with its answer; None if it is not stored."""
        with self._lock:
            known, own, *_ = self._all.get(id, (None, 0))
            return known.talk[own:] if known else None  # pyright: ignore[reportReturnType]  of messages


def bytes_of(known: Known) -> int:
    """Approximate size [bytes], as if nothing were shared with other answers."""
    texts = [s for m in known.talk if isinstance(m, Message) for s in (m.content, m.thinking, m.tool_call_id)]
    texts += [s for m in known.talk if isinstance(m, Message) for c in m.tool_calls for s in (c.name, c.arguments)]
    own = 2 * sum(map(getsizeof, texts))  # also in the key
    return own + TOKEN * len(known.turn.prompt) + SAMPLED * len(known.turn.completion.tokens)


@dataclass(slots=True, kw_only=True)
class Reply:
    """One request, and how its API formats the answers: as one body, or as events of a stream. `ping`: an event without
    content, which keeps a connection alive."""

    chat: Chat
    conversation: Conversation
    params: SamplingParams
    tools: Tools = ()
    agent: str = ""
    policy: str = ""
    n: int = 1
    stream: bool = False
    form: str = ""  # forced form of the answer: body of a grammar (`birl.text.grammar`)
    ping: bytes = b": ping\n\n"

    def whole(self, answers: Answers) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, answers: Answers) -> Iterable[bytes]:
        raise NotImplementedError

    def failed(self, refused: Refused) -> bytes:
        """Event that ends a stream which has begun."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class Answering:
    """Answers requests. `params`: defaults of a request; `kept`: answers that it may refer to."""

    params: SamplingParams
    kept: Kept = field(default_factory=Kept)
    open: "set[asyncio.Task[Answers]]" = field(default_factory=set)

    async def one(self, reply: Reply) -> tuple[Message, Turn]:
        raise NotImplementedError

    def forget(self, turn: Turn) -> None:
        """Discard an answer that no client received."""

    def ask(self, reply: Reply) -> "asyncio.Task[Answers]":
        """Start the n answers of a request."""
        task = asyncio.ensure_future(self._answers(reply))
        self.open.add(task)
        task.add_done_callback(self.open.discard)
        return task

    async def drop(self, asking: "asyncio.Task[Answers]") -> None:
        """Abort answers whose client has disconnected."""
        asking.cancel()
        (result,) = await asyncio.gather(asking, return_exceptions=True)
        for _, turn in result if isinstance(result, list) else ():
            self.forget(turn)

    async def _answers(self, reply: Reply) -> Answers:
        asked = [asyncio.ensure_future(self.one(reply)) for _ in range(reply.n)]
        try:
            return list(await asyncio.gather(*asked))
        except BaseException:
            for task in asked:
                task.cancel()
            for result in await asyncio.gather(*asked, return_exceptions=True):
                if not isinstance(result, BaseException):
                    self.forget(result[1])
            raise


@dataclass(slots=True, kw_only=True)
class Visit(Answering):
    """Answers requests of one episode."""

    session: Session

    def forget(self, turn: Turn) -> None:
        self.session.forget(turn)

    def ask(self, reply: Reply) -> "asyncio.Task[Answers]":
        """Start the answers. Raises `EngineFailed` and `Aborted` if the episode has failed already, as further samples
        would be useless."""
        if isinstance(self.session.failure, EngineFailed | Aborted):
            raise self.session.failure
        return Answering.ask(self, reply)

    def close(self) -> None:
        for task in self.open:
            task.cancel()

    async def one(self, reply: Reply) -> tuple[Message, Turn]:
        return await self.session.answer(
            reply.conversation, reply.params, tools=reply.tools, agent=reply.agent, policy=reply.policy
        )
