"""The JSON of an answer in OpenAI's API, in one piece or in chunks."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

from birl.engine.request import Place
from birl.server.ask import Ask
from birl.server.service import Scored, Service
from birl.text.chat import Chat
from birl.text.thinking import Growing, ParsedReply
from birl.text.visible import INCOMPLETE, Visible
from birl.track.log import LINE_ENDS
from birl.types import Completion, Stop, ToolCall

ESCAPED = str.maketrans(dict(LINE_ENDS))


@dataclass(frozen=True, slots=True)
class Voice:
    """The model of a run under the name that a client uses. `end_ids`: tokens that end an answer, and are no text."""

    name: str
    version: int
    chat: Chat

    @property
    def end_ids(self) -> frozenset[int]:
        return self.chat.end_ids


class Pieces:
    """Formats the answers of one request."""

    def __init__(self, speaker: Service | Voice, asked: Ask) -> None:
        self.speaker, self.asked = speaker, asked
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def visible(self) -> Visible:
        asked, speaker = self.asked, self.speaker
        hidden = speaker.end_ids | frozenset(asked.params.stop_ids)
        fences = speaker.chat.fences(bool(asked.tools)) if asked.chat else ()
        return Visible(speaker.chat.tokenizer, hidden, asked.params.stop, fences)

    def thoughts(self, index: int) -> Growing:
        """Separates thinking from content while an answer grows."""
        return Growing(self.speaker.chat.tags if self.asked.chat else None, self.opened(index))

    def opened(self, index: int) -> bool:
        return self.asked.chat and self.speaker.chat.thinks(self.prompt(index))

    def head(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.asked.chat else "text_completion"
        result: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.speaker.name}
        result["system_fingerprint"] = f"birl-version-{self.speaker.version}"
        if self.asked.chat and self.asked.token_ids and not chunk:
            result["prompt_token_ids"] = self.asked.prompts[0]
        return result

    def choice(self, index: int, completion: Completion, places: Sequence[Place] = ()) -> dict[str, Any]:
        """A finished choice."""
        shown = self.visible()
        shown.feed(completion.ids)
        reply = self.parsed(index, shown.whole())
        return self.spoken(index, completion, reply.content, reply.calls, reply.thinking or "", places)

    def spoken(
        self,
        index: int,
        completion: Completion,
        content: str,
        calls: Sequence[ToolCall],
        thinking: str = "",
        places: Sequence[Place] = (),
    ) -> dict[str, Any]:
        """A finished choice with its parsed content."""
        result: dict[str, Any] = {"index": index, "finish_reason": self.reason(completion.stop, calls)}
        tokens, logprobs = completion.ids, completion.logprobs.tolist()
        result["logprobs"] = self.logprobs(tokens, logprobs, 0, places) if self.asked.logprobs else None
        if self.asked.chat:
            own: dict[str, Any] = {"role": "assistant", "content": content if content.strip() or not calls else None}
            own |= {"reasoning_content": thinking} if thinking else {}
            result["message"] = own | ({"tool_calls": self.calls(calls, False)} if calls else {})
        else:
            result["text"] = content
            result |= {"prompt_token_ids": self.prompt(index)} if self.asked.token_ids else {}
        return result | (self.ids(tokens, completion.versions.tolist()) if self.asked.token_ids else {})

    def echo(self, choice: dict[str, Any], index: int, scored: Sequence[Scored]) -> None:
        """Prepend the prompt to a finished choice, with the log-probs of its tokens: the first has none."""
        ids = self.prompt(index)
        before = self.speaker.chat.decode(ids)
        choice["text"] = before + choice["text"]
        if not self.asked.logprobs:
            return
        logprobs, best = scored[index // self.asked.n]
        own, result = self.logprobs(ids, (), 0), choice["logprobs"]
        own["token_logprobs"] = [None, *logprobs]
        count = max(self.asked.top, 1)
        own["top_logprobs"] = [None, *map(self.top, ids[1:], logprobs, (place[:count] for place, _ in best.places))]
        result["text_offset"] = [at + len(before) for at in result["text_offset"]]
        result["top_logprobs"] = result["top_logprobs"] or [
            {t: p} for t, p in zip(result["tokens"], result["token_logprobs"], strict=True)
        ]
        choice["logprobs"] = {key: own[key] + result[key] for key in own}

    def ranked(self, index: int, scored: Sequence[Scored]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` as in vLLM: for each token but the first the most likely ones, and the token itself."""
        logprobs, best = scored[index // self.asked.n]
        decode, result = self.speaker.chat.decode, []
        for token, logprob, (place, rank) in zip(self.prompt(index)[1:], logprobs, best.places, strict=True):
            each = [(t, p, n) for n, (t, p) in enumerate(place[: self.asked.prompt_logprobs], 1)]
            each += [(token, logprob, rank)] if all(t != token for t, _, _ in each) else []
            result.append({str(t): {"logprob": p, "rank": n, "decoded_token": decode([t])} for t, p, n in each})
        return [None, *result]

    def top(self, token: int, logprob: float, place: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probs of one position: the most likely tokens, and the actual one."""
        result = {self.speaker.chat.decode([token]): logprob}
        for other, p in possible(place):
            if other != token:
                text = self.speaker.chat.decode([other])
                result[text if text not in result else f"token_id:{other}"] = p
        return result

    def delta(
        self,
        index: int,
        text: str,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        versions: Sequence[int] = (),
        offset: int = 0,
        places: Sequence[Place] = (),
        calls: Sequence[ToolCall] = (),
        thinking: str = "",
        reason: str | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        """A chunk with one choice. `offset`: number of characters before these tokens."""
        result: dict[str, Any] = {"index": index, "finish_reason": reason}
        wanted = self.asked.logprobs and tokens
        result["logprobs"] = self.logprobs(tokens, logprobs, offset, places) if wanted else None
        if self.asked.chat:
            own: dict[str, Any] = {"role": "assistant"} if first else {}
            own |= {"content": text} if text or first else {}
            own |= {"reasoning_content": thinking} if thinking else {}
            result["delta"] = own | ({"tool_calls": self.calls(calls, True)} if calls else {})
        else:
            result["text"] = text
        extra: dict[str, Any] = {}
        if self.asked.token_ids:
            result |= self.ids(tokens, versions)
            if first and self.asked.chat:
                extra["prompt_token_ids"] = self.asked.prompts[0]
            elif first:
                result["prompt_token_ids"] = self.prompt(index)
        extra |= {"usage": None} if self.asked.usage else {}
        return self.head(chunk=True) | {"choices": [result]} | extra

    def parsed(self, index: int, text: str) -> ParsedReply:
        if not self.asked.chat:
            return ParsedReply(content=text)
        return self.speaker.chat.parts(text, self.asked.tools, self.opened(index))

    def prompt(self, index: int) -> tuple[int, ...]:
        return self.asked.prompts[index // self.asked.n]

    def ids(self, tokens: Sequence[int], versions: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens), "weight_versions": list(versions)}

    def reason(self, stop: Stop, calls: Sequence[ToolCall]) -> str:
        return "tool_calls" if calls and stop == Stop.STOP else str(stop)

    def calls(self, calls: Sequence[ToolCall], numbered: bool) -> list[dict[str, Any]]:
        return [
            ({"index": i} if numbered else {})
            | {"id": call.id or call_id(), "type": "function"}
            | {"function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(calls)
        ]

    def logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], offset: int, places: Sequence[Place] = ()
    ) -> dict[str, Any]:
        """Log-probs of all sampled tokens, including those that are not visible in the text."""
        if self.asked.chat:
            return {"content": token_rows(self.speaker.chat, tokens, logprobs, places), "refusal": None}
        texts = [self.speaker.chat.decode([token]) for token in tokens]
        *offsets, _ = accumulate(map(len, texts), initial=offset)
        tops = list(map(self.top, tokens, logprobs, (place for place, _ in places))) if places else None
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": tops, "text_offset": offsets}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Token counts of a request; a prompt counts once for all its answers."""
        prompt, made = sum(map(len, self.asked.prompts)), sum(len(c.tokens) for c in completions)
        cached = sum(
            min(c.cached for c in completions[i : i + self.asked.n]) for i in range(0, len(completions), self.asked.n)
        )
        counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def token_rows(
    chat: Chat, tokens: Sequence[int], logprobs: Sequence[float], places: Sequence[Place] = ()
) -> list[dict[str, Any]]:
    """Tokens with their log-probs and top log-probs, in the format of chats and Responses."""

    def row(token: int, logprob: float) -> dict[str, Any]:
        text = chat.decode([token])
        octets = None if INCOMPLETE in text else list(text.encode())  # only of complete characters
        return {"token": text, "logprob": logprob, "bytes": octets}

    tops = [[row(*one) for one in possible(place)] for place, _ in places] or [[] for _ in tokens]
    each = zip(tokens, logprobs, tops, strict=True)
    return [row(token, logprob) | {"top_logprobs": top} for token, logprob, top in each]


def possible(place: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Without tokens that could not be sampled (top_k, grammar)."""
    return [(token, logprob) for token, logprob in place if logprob > -inf]


def call_id() -> str:
    """Id of a tool call whose format has none. Mistral's template accepts exactly nine letters or digits."""
    return secrets.token_hex(5)[:9]


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {line(data)}\n\n".encode()


def typed_event(kind: str, **data: Any) -> bytes:
    """An event in the format of Anthropic's messages and OpenAI's Responses."""
    return f"event: {kind}\ndata: {line({'type': kind, **data})}\n\n".encode()


def line(data: Mapping[str, Any]) -> str:
    """JSON on one line, also for clients that cut a stream with `str.splitlines`, as httpx's `iter_lines` does."""
    return json.dumps(data, ensure_ascii=False).translate(ESCAPED)
