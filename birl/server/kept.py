"""Stored answers, which clients may refer to by id instead of sending them again."""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from sys import getsizeof
from threading import Lock

from birl.rollout.session import Known
from birl.types import Message

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
