"""OpenAI's API for agents: as that of `birl serve`, for an episode."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from birl.server.agent_session import Answering, Answers, Reply
from birl.server.ask import Ask, choices, limit_of, sampled_logprobs, stops, streaming
from birl.server.limits import Refused
from birl.server.messages import invalid, message, typed
from birl.server.openai_format import Pieces, event
from birl.server.request_policy import SAMPLING, Terms, speaker
from birl.text.chat import Chat

KNOWN = (
    *("model", "n", "stream", "stream_options", "stop", "stop_token_ids", "max_tokens", "logprobs"),
    *("return_token_ids", *SAMPLING),
)


@dataclass(frozen=True, slots=True)
class Voice:
    """The model under the name that a client uses."""

    name: str
    version: int
    chat: Chat

    @property
    def end_ids(self) -> frozenset[int]:
        return self.chat.end_ids


@dataclass(slots=True, kw_only=True)
class OpenAIReply(Reply):
    model: str
    talk: bool  # a chat, not a text completion
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    def pieces(self, answers: Answers) -> Pieces:
        turn = answers[0][1]
        asked = Ask(
            chat=self.talk, prompts=(tuple(turn.prompt.tolist()),), params=self.params, n=self.n, stream=self.stream,
            usage=self.usage, logprobs=self.logprobs, token_ids=self.token_ids, tools=tuple(self.tools),
        )  # fmt: skip
        return Pieces(Voice(self.model, int(turn.completion.versions.max(initial=0)), self.chat), asked)

    def whole(self, answers: Answers) -> dict[str, Any]:
        pieces = self.pieces(answers)
        choices = [
            pieces.spoken(i, turn.completion, reply.content, reply.tool_calls, reply.thinking)
            for i, (reply, turn) in enumerate(answers)
        ]
        usage = pieces.usage([turn.completion for _, turn in answers])
        return pieces.head(chunk=False) | {"choices": choices, "usage": usage}

    def chunks(self, answers: Answers) -> Iterator[bytes]:
        pieces = self.pieces(answers)
        for i, (reply, turn) in enumerate(answers):
            done = turn.completion
            yield event(pieces.delta(i, "", first=True, thinking=reply.thinking))
            tokens, logprobs, versions = (x.tolist() for x in (done.tokens, done.logprobs, done.versions))
            yield event(pieces.delta(i, reply.content, tokens=tokens, logprobs=logprobs, versions=versions))
            if reply.tool_calls:
                yield event(pieces.delta(i, "", calls=reply.tool_calls))
            yield event(pieces.delta(i, "", reason=pieces.reason(done.stop, reply.tool_calls)))
        if self.usage:
            usage = pieces.usage([turn.completion for _, turn in answers])
            yield event(pieces.head(chunk=True) | {"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def failed(self, refused: Refused) -> bytes:
        return event(refused.body())


def chat(data: Mapping[str, Any], terms: Terms, visit: Answering) -> OpenAIReply:
    """Parse POST /chat/completions. Raises `Refused`."""
    terms.check(data, (*KNOWN, "messages", "tools", "tool_choice", "max_completion_tokens"))
    messages = tuple(message(m, i) for i, m in enumerate(typed(data, "messages", list, None)))
    if not messages:
        raise invalid("messages", "is empty")
    logprobs = typed(data, "logprobs", bool, False)
    return _reply(data, terms, visit, conversation=messages, limit=limit_of(data), logprobs=logprobs, talk=True)


def completion(data: Mapping[str, Any], terms: Terms, visit: Answering) -> OpenAIReply:
    """Parse POST /completions. Raises `Refused`."""
    terms.check(data, (*KNOWN, "prompt"))
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise invalid("prompt", "must be text: an episode keeps the token ids itself")
    count = sampled_logprobs(data)
    if count:
        terms.vain("logprobs", count)
    return _reply(data, terms, visit, conversation=prompt, limit="max_tokens", logprobs=count is not None, talk=False)


def _reply(data: Mapping[str, Any], terms: Terms, visit: Answering, *, limit: str, **own: Any) -> OpenAIReply:
    stream, usage = streaming(data, terms)
    tools, form = terms.tools(data, typed(data, "tools", list, []), data.get("tool_choice"))
    return OpenAIReply(
        params=terms.params(data, visit.params, stops(data), limit),
        tools=tools,
        form=form,
        agent=speaker(data.get("model")),
        n=choices(data),
        stream=stream,
        chat=terms.chat,
        model=str(data.get("model") or "birl"),
        usage=usage,
        token_ids=typed(data, "return_token_ids", bool, False),
        **own,
    )


REPLIES = {("POST", "chat/completions"): chat, ("POST", "completions"): completion}
