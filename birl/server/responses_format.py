"""The JSON of OpenAI's Responses API: items (reasoning, a message, function calls), in one piece or as numbered
events."""

import json
import secrets
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from birl.engine.request import Place
from birl.rollout.session import Known, following, owner_of, plain
from birl.server.agent_session import Answers, Kept, Reply
from birl.server.limits import Refused
from birl.server.openai_format import call_id, token_rows
from birl.server.openai_format import typed_event as event
from birl.types import Conversation, Message, Stop, Turn

Item = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ResponsesReply(Reply):
    """A request of the Responses API. `model`: name; `told`: request parameters that the response repeats; `own`:
    number of messages at the start that the next response does not inherit (instructions); `talk`: the conversation
    with known thinking, if different; `given`: the input items."""

    model: str
    kept: Kept
    told: Item
    own: int = 0
    logprobs: bool = False
    top: int = 0  # number of top log-probs of each token,
    places: Sequence[Place] = ()  # the top log-probs
    token_ids: bool = False
    talk: Conversation = ()
    given: Sequence[Item] = ()
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, status: str) -> Item:
        result: Item = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        result |= {"background": False, "error": None, "incomplete_details": None, "model": self.model, "output": []}
        sampling = {"temperature": self.params.temperature, "top_p": self.params.top_p}
        return result | self.told | sampling | {"truncation": "disabled", "usage": None}

    def whole(self, answers: Answers) -> Item:
        ((reply, turn),) = answers
        return self.finished(named(reply), turn)

    def finished(self, reply: Message, turn: Turn) -> Item:
        """The finished response; stored if it may be continued."""
        stop, asked, drawn = turn.completion.stop, len(turn.prompt), len(turn.completion.tokens)
        result = self.head({Stop.STOP: "completed", Stop.LENGTH: "incomplete"}.get(stop, "cancelled"))
        result["output"] = self.items(reply, turn, ended(result))
        if stop is Stop.LENGTH:
            result["incomplete_details"] = {"reason": "max_output_tokens"}
        result["usage"] = {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": turn.completion.cached, "cache_write_tokens": 0},
            "output_tokens": drawn, "output_tokens_details": {"reasoning_tokens": self.thought(reply, turn)},
            "total_tokens": asked + drawn,
        }  # fmt: skip
        if self.token_ids:
            result |= {"prompt_token_ids": turn.prompt.tolist(), "token_ids": turn.completion.ids}
            result["weight_versions"] = turn.completion.versions.tolist()
        if self.told["store"]:
            key, talk = (following(t, reply) for t in (self.conversation, self.talk or self.conversation))
            known = Known(key=plain(key), talk=talk, owner=owner_of(self.tools), turn=turn)
            told = json.dumps([result, self.inputs()]).encode() if self.kept.readable else b""
            self.kept.keep(self.id, known, self.own, told)
        return result

    def inputs(self) -> list[Item]:
        """The input items of the request, each with an id."""
        return [{"type": "message", "id": self.id_of("in", i), **one} for i, one in enumerate(self.given)]

    def items(self, reply: Message, turn: Turn, status: str) -> list[Item]:
        result = [self.reasoning(reply.thinking)] if reply.thinking else []
        if reply.content.strip() or not reply.tool_calls:
            rows = self.rows(turn.completion.ids, turn.completion.logprobs.tolist(), self.places)
            result.append(self.message(reply.content, rows, status))
        for i, one in enumerate(reply.tool_calls):
            about = {"call_id": one.id, "name": one.name, "arguments": one.arguments, "status": "completed"}
            result.append({"id": self.id_of("fc", i), "type": "function_call", **about})
        return result

    def reasoning(self, thinking: str) -> Item:
        part = {"type": "reasoning_text", "text": thinking}
        return {"id": self.id_of("rs"), "type": "reasoning", "summary": [], "content": [part]}

    def message(self, text: str, rows: list[Item], status: str) -> Item:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": rows}
        return {"id": self.id_of("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}

    def id_of(self, kind: str, number: int | None = None) -> str:
        return f"{kind}_{self.id.removeprefix('resp_')}" + ("" if number is None else f"_{number}")

    def rows(self, tokens: Sequence[int], logprobs: Sequence[float], places: Sequence[Place] = ()) -> list[Item]:
        """Log-probs of all sampled tokens, including those not visible in the text; empty if not requested."""
        if not self.logprobs:
            return []
        rows = token_rows(self.chat, tokens, logprobs, places)
        for one in [*rows, *(top for row in rows for top in row["top_logprobs"])]:
            one["bytes"] = one["bytes"] or []
        return rows

    def thought(self, reply: Message, turn: Turn) -> int:
        """Number of tokens up to the end of the thinking."""
        tokens, end = turn.completion.ids, reply.thinking.strip()
        if not end:
            return 0
        place = bisect_left(range(len(tokens)), True, key=lambda n: end in self.chat.decode(tokens[: n + 1]))
        return min(place + 1, len(tokens))

    def chunks(self, answers: Answers) -> Iterator[bytes]:
        ((reply, turn),) = answers
        events, reply = Events(self), named(reply)
        yield from events.begin()
        rows = self.rows(turn.completion.ids, turn.completion.logprobs.tolist())
        yield from events.more(reply.thinking, reply.content if reply.content.strip() else "", rows)
        yield from events.end(reply, turn)

    def failed(self, refused: Refused) -> bytes:
        """An event with `error`, which OpenAI's client raises."""
        told = refused.body()["error"]
        return event("error", sequence_number=0, error=told, **{k: told[k] for k in ("code", "message", "param")})


class Events:
    """A growing response as numbered events: `begin`, then `more`, then `end`."""

    def __init__(self, reply: ResponsesReply) -> None:
        self.reply, self.number = reply, 0
        self.told = {"reasoning": "", "message": ""}
        self.kind, self.place = "", -1  # of the current item, and its index
        self.rows: list[Item] = []
        self.sent = 0  # number of rows sent so far

    def event(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return event(kind, sequence_number=self.number - 1, **data)

    def begin(self) -> Iterator[bytes]:
        head = self.reply.head("in_progress")
        yield self.event("response.created", response=head)
        yield self.event("response.in_progress", response=head)

    def more(self, thinking: str, content: str, rows: Sequence[Item] = ()) -> Iterator[bytes]:
        self.rows += rows
        for kind, new in (("reasoning", thinking), ("message", content)):
            if new:
                yield from self.turn_to(kind)
                yield self.delta(new)

    def end(self, reply: Message, turn: Turn) -> Iterator[bytes]:
        whole = self.reply.finished(reply, turn)
        left = [s[len(t) :] for s, t in zip((reply.thinking, reply.content), self.told.values(), strict=True)]
        spoken = any(item["type"] == "message" for item in whole["output"])
        yield from self.more(left[0], left[1] if spoken else "")
        if spoken:
            yield from self.turn_to("message")
        if self.kind == "message" and self.sent < len(self.rows):
            yield self.delta("")  # log-probs of tokens that are not visible
        yield from self.turn_to("", ended(whole))
        for item in whole["output"]:
            if item["type"] == "function_call":
                self.place += 1
                where = {"output_index": self.place, "item_id": item["id"]}
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self.event("response.output_item.added", output_index=self.place, item=begun)
                yield self.event("response.function_call_arguments.delta", **where, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self.event("response.function_call_arguments.done", **where, **done)
                yield self.event("response.output_item.done", output_index=self.place, item=item)
        yield self.event(f"response.{ended(whole)}", response=whole)

    def turn_to(self, kind: str, status: str = "completed") -> Iterator[bytes]:
        """End the current item and begin one of `kind`."""
        if self.kind == kind:
            return
        if self.kind:
            item = self.item(self.told[self.kind], status)
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if self.kind == "message" else {}
            yield self.event(f"response.{part['type']}.done", **self.where(item), text=part["text"], **more)
            yield self.event("response.content_part.done", **self.where(item), part=part)
            yield self.event("response.output_item.done", output_index=self.place, item=item)
        self.kind = kind
        if kind:
            self.place += 1
            item = self.item("", "in_progress")
            begun = {**item, "content": []}
            yield self.event("response.output_item.added", output_index=self.place, item=begun)
            yield self.event("response.content_part.added", **self.where(item), part=item["content"][0])

    def item(self, text: str, status: str) -> Item:
        if self.kind == "reasoning":
            return self.reply.reasoning(text)
        return self.reply.message(text, [] if status == "in_progress" else self.rows, status)

    def where(self, item: Item) -> Item:
        return {"output_index": self.place, "item_id": item["id"], "content_index": 0}

    def delta(self, new: str) -> bytes:
        self.told[self.kind] += new
        item = self.item("", "in_progress")
        more = {}
        if self.kind == "message":
            more, self.sent = {"logprobs": self.rows[self.sent :]}, len(self.rows)
        return self.event(f"response.{item['content'][0]['type']}.delta", **self.where(item), delta=new, **more)


def ended(response: Item) -> str:
    """Status of items and stream at the end: they have no `cancelled`."""
    return "completed" if response["status"] == "completed" else "incomplete"


def named(reply: Message) -> Message:
    """Add ids to calls that have none; results refer to them."""
    return replace(reply, tool_calls=tuple(replace(c, id=c.id or call_id()) for c in reply.tool_calls))
