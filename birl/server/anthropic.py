"""Anthropic's API: POST /messages, in one piece or as events, and /messages/count_tokens, for agents of an episode and
on a server, where the same code answers with the server's own engine."""

import json
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birl.rollout.session import Known, following, owner_of, plain
from birl.server import ask
from birl.server.agent_session import Answering, Answers, Kept, Reply
from birl.server.gateway import answered as replied
from birl.server.limits import OVERLOADED, Refused
from birl.server.messages import invalid, message_content, text, typed
from birl.server.openai_format import call_id
from birl.server.openai_format import typed_event as event
from birl.server.request_policy import SAMPLING, Terms, speaker
from birl.server.service import Service
from birl.text.grammar import whole
from birl.text.visible import Visible
from birl.types import PLACE, Message, SamplingParams, Stop, ToolCall, Turn

KNOWN = (
    *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice"),
    *("stop_token_ids", "thread", *SAMPLING),
)
KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 503: "api_error"}

Block = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class AnthropicReply(Reply):
    """A request of Anthropic's API. `kept`: stores the answer of a thread, to be continued by its id; else None."""

    model: str
    own_stop: tuple[str, ...] = ()
    kept: Kept | None = None
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def keep(self, reply: Message, turn: Turn) -> None:
        if self.kept is not None:
            talk = following(self.conversation, reply)
            known = Known(key=plain(talk), talk=talk, owner=owner_of(self.tools), turn=turn)
            self.kept.keep(self.id, known, told=json.dumps(list(self.tools)).encode())

    def head(self, turn: Turn) -> Block:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": usage(turn, 0),
        }  # fmt: skip

    def whole(self, answers: Answers) -> Block:
        ((reply, turn),) = answers
        self.keep(reply, turn)
        told = {"content": blocks(reply), "usage": usage(turn, len(turn.completion.tokens))}
        return self.head(turn) | told | self.end(reply, turn)

    def end(self, reply: Message, turn: Turn) -> Block:
        reason, stop = "end_turn", None
        if turn.completion.stop is Stop.LENGTH:
            reason = "max_tokens"
        elif reply.tool_calls:
            reason = "tool_use"
        elif stop := self.stopped(turn):
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def stopped(self, turn: Turn) -> str | None:
        """The client's stop string that ended the answer, or None."""
        if not self.own_stop:
            return None
        text = self.chat.reply_text(turn.completion.ids)
        result = [(at, s) for s in self.own_stop if (at := text.find(s)) >= 0]
        return min(result)[1] if result else None

    def chunks(self, answers: Answers) -> Iterator[bytes]:
        ((reply, turn),) = answers
        self.keep(reply, turn)
        yield event("message_start", message=self.head(turn))
        for i, block in enumerate(blocks(reply)):
            empty, *deltas = opened(block)
            yield event("content_block_start", index=i, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=i, delta=delta)
            yield event("content_block_stop", index=i)
        yield event("message_delta", delta=self.end(reply, turn), usage=usage(turn, len(turn.completion.tokens)))
        yield event("message_stop")

    def failed(self, refused: Refused) -> bytes:
        return event("error", error=error(refused)["error"])


def usage(turn: Turn, drawn: int) -> Block:
    """Token counts; cached tokens of the prompt are counted apart."""
    cached = turn.completion.cached
    return {
        "input_tokens": len(turn.prompt) - cached, "output_tokens": drawn,
        "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip


def message(data: Mapping[str, Any], terms: Terms, visit: Answering) -> AnthropicReply:
    """Parse POST /messages. Raises `Refused`."""
    terms.check(data, (*KNOWN, *(("seed", "output_format", "output_config") if terms.served else ())))
    thread, (messages, tools) = typed(data, "thread", dict, {}), conversation(data)
    if thread.get("type") == "continue":
        before, tools = continued(thread, visit.kept)
        messages = (*before, *messages)
    elif thread and thread.get("type") != "create":
        raise invalid("thread.type", "must be create or continue")
    stop = typed(data, "stop_sequences", list, [])
    if not all(isinstance(s, str) for s in stop):
        raise invalid("stop_sequences", "must be a list of texts")
    choice = typed(data, "tool_choice", dict, {})
    words = {None: None, "auto": "auto", "none": "none", "any": "required"}
    wanted = words.get(typed(choice, "type", str, None), choice)
    params = terms.params(data, visit.params, stop, "max_tokens")
    seen, form = terms.tools(openai_form(data, choice), tools, wanted)
    return AnthropicReply(
        conversation=messages,
        params=params,
        tools=seen,
        form=form,
        agent=speaker(data.get("model")),
        stream=typed(data, "stream", bool, False),
        ping=event("ping"),
        chat=terms.chat,
        model=str(data.get("model") or "birl"),
        kept=visit.kept if thread else None,
        own_stop=tuple(s for s in params.stop if s not in visit.params.stop),
    )


def continued(thread: Mapping[str, Any], kept: Kept) -> tuple[tuple[Message, ...], list[Block]]:
    """Conversation and tools of the answer that a thread continues. Raises `Refused`; clients then send all."""
    id = typed(thread, "previous_message_id", str, "")
    if (talk := kept.cited(id)) is None or not id.startswith("msg_"):
        raise Refused(
            404, f"thread.previous_message_id: there is no answer {id[:80]!r}: it is of another server or episode, "
            f"began no thread, or was dropped for newer ones ({kept.bounds}). Send all messages (thread.type=create).",
            code="thread_not_found",
        )  # fmt: skip
    return talk, json.loads(kept.told(id))


def openai_form(data: Mapping[str, Any], choice: Mapping[str, Any]) -> Block:
    """Parameters that force the form of an answer, as in OpenAI's API."""
    form = data.get("output_format") or typed(data, "output_config", dict, {}).get("format")
    result: Block = {"parallel_tool_calls": not typed(choice, "disable_parallel_tool_use", bool, False)}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        result["response_format"] = {**form, "json_schema": {"schema": form.get("schema"), "strict": True}}
    return result


def conversation(data: Mapping[str, Any]) -> tuple[tuple[Message, ...], list[Block]]:
    """Messages and tools of a request, in OpenAI's form. Raises `Refused`."""
    result: list[Message] = []
    if data.get("system"):
        result.append(Message(role="system", content=text(data["system"], "system")))
    for place, one in enumerate(typed(data, "messages", list, None)):
        where = f"messages.{place}"
        if not isinstance(one, dict) or one.get("role") not in ("user", "assistant", "system"):
            raise invalid(where, "must be an object with a role (user, assistant) and a content")
        result += spoken(one["role"], one.get("content"), where)
    if all(message.role == "system" for message in result):
        raise invalid("messages", "is empty")
    if result[-1].role == "assistant":
        raise invalid("messages", "ends with an assistant message: prefilled answers are not supported")
    return tuple(result), [tool(one, i) for i, one in enumerate(typed(data, "tools", list, []))]


def spoken(role: str, content: Any, where: str) -> list[Message]:
    """A message in birl's form; results of tools become separate messages, which come first."""
    if not isinstance(content, list):
        return [Message(role=role, content=text(content, f"{where}.content"))]
    results, written, thinking, calls, pictures = [], "", "", [], []
    for i, block in enumerate(content):
        place = f"{where}.content.{i}"
        match block:
            case {"type": "text", "text": str(words)}:
                written += words
            case {"type": "thinking", "thinking": str(words)}:
                thinking += words
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "name": str(name), "input": dict(given)} if role == "assistant":
                id = str(block.get("id") or "")
                calls.append(ToolCall(name=name, arguments=json.dumps(given, ensure_ascii=False), id=id))
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                answer = message_content(block.get("content") or "", f"{place}.content")
                results.append(Message(role="tool", **answer, tool_call_id=id))
            case {"type": "image", "source": dict()} if role == "user":
                shown = message_content([block], place)
                written += shown["content"]
                pictures += shown["pictures"]
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                raise invalid(
                    place, f"is of type {kind!r}; the model reads text, image, tool_use and tool_result"[:200]
                )
    if results and not written:
        return results
    if pictures and written.count(PLACE) != len(pictures):
        raise invalid(f"{where}.content", f"has the character U+{ord(PLACE):X} beside pictures, which stands for one")
    own = {"thinking": thinking, "tool_calls": tuple(calls), "pictures": tuple(pictures)}
    return [*results, Message(role=role, content=written, **own)]


def tool(given: Any, place: int) -> Block:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or "input_schema" not in given:
        raise invalid(f"tools.{place}", "must have a name and an input_schema; the API has no built-in tools")
    function = {"name": given["name"], "description": given.get("description") or ""}
    function |= {"parameters": given["input_schema"]} | ({"strict": True} if given.get("strict") else {})
    return {"type": "function", "function": function}


def blocks(reply: Message) -> list[Block]:
    result: list[Block] = []
    if reply.thinking:
        signature = b64encode(sha256(reply.thinking.encode()).digest()).decode()  # clients require a signature
        result.append({"type": "thinking", "thinking": reply.thinking, "signature": signature})
    if reply.content.strip() or not reply.tool_calls:
        result.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        arguments = json.loads(call.arguments)
        result.append({"type": "tool_use", "id": call.id or call_id(), "name": call.name, "input": arguments})
    return result


def opened(block: Block) -> tuple[Block, ...]:
    """The initial block of a stream, and its deltas."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            signed = {"type": "signature_delta", "signature": block["signature"]}
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": "", "signature": ""}, delta, signed
        case _:
            given = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": given}


def error(refused: Refused) -> Block:
    kind = "overloaded_error" if refused.kind == OVERLOADED else KINDS.get(refused.status, "api_error")
    details = {"details": {"error_code": code}} if (code := refused.more.get("code")) == "thread_not_found" else {}
    return {"type": "error", "error": {"type": kind, "message": str(refused), **details}}


def count_tokens(data: Mapping[str, Any], terms: Terms, visit: Answering | None = None) -> Block:
    return {"input_tokens": len(terms.render(*conversation(data)))}


REPLIES = {("POST", "messages"): message, ("POST", "messages/count_tokens"): count_tokens}


@dataclass(slots=True, kw_only=True)
class Direct(Answering):
    """Answers requests with the server's own engine."""

    service: Service
    prompt: tuple[int, ...] = ()

    async def one(self, reply: Reply) -> tuple[Message, Turn]:
        service, prompt = self.service, self.prompt
        grammar = reply.form and whole(service.chat, reply.form, service.chat.thinks(prompt))
        (params,) = service.seeded(reply.params)
        with service.gate.enter(1):
            result = await service.generate(prompt, params, grammar=grammar)
        shown = Visible(service.chat.tokenizer, service.end_ids | frozenset(params.stop_ids), params.stop)
        shown.feed(result.ids)
        answer = service.chat.parts(shown.whole(), reply.tools, service.chat.thinks(prompt)).message()
        return answer, Turn(prompt=np.array(prompt, np.int32), completion=result)


async def served(service: Service, request: Request) -> Response:
    own = SamplingParams(max_tokens=service.engine.context)
    visit = Direct(params=own, service=service, kept=service.kept)

    def read(data: Block) -> Reply:
        reply = message(data, service.terms, visit)
        visit.prompt = service.terms.render(reply.conversation, reply.tools)
        service.check_prompt(visit.prompt)
        return reply

    return await replied(visit, await ask.parsed(service, request, read), request, service.timeout)


async def counted(service: Service, request: Request) -> Response:
    return JSONResponse(await ask.parsed(service, request, lambda data: count_tokens(data, service.terms)))


ROUTES = {
    ("POST", "/v1/messages"): served,
    ("POST", "/v1/v1/messages"): served,  # its client adds a v1 to the base_url, which for OpenAI's ends with one
    ("POST", "/v1/messages/count_tokens"): counted,
    ("POST", "/v1/v1/messages/count_tokens"): counted,
}
