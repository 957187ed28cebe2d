"""Renders conversations with the model's chat template, and detects what a template leaves out."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from birl.errors import BirlError
from birl.foreign import Overdue, deadline
from birl.text.formats import FORMATS, MARK, Dict, Format, parts
from birl.text.thinking import tags_of
from birl.types import PLACE, Message, Picture, ToolCall

if TYPE_CHECKING:
    from birl.text.chat import Chat

Tools = Sequence[Mapping[str, Any]]
TEMPLATE = "Take a model that was trained with tools, or another template (model.chat_template=hermes, or FILE.jinja)."
SECONDS = 10.0  # timeout of one rendering
#: time that templates get, by default the current one; a run's stands still, also at midnight and when it resumes
now: datetime | None = None
LAST = re.compile(r"\s*<[^<>\s]+>\s*\Z")
NAME = "birl_probe"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"birl": {"type": "string", "description": "A text."}},
            "required": ["birl"],
        },
    },
}

BEFORE = "You may call these functions. Their signatures are within <tools></tools>:\n<tools>\n"
BEHIND = (
    "</tools>\nTo call one, write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": "the_function", "arguments": {"the_argument": 1}}\n</tool_call>\n'
    "What it gives comes within <tool_response></tool_response>."
)
NOTE = (
    "birl: the model's chat template leaves out tools, so they are written into the {} message in the hermes format "
    "(model.chat_template=hermes, or FILE.jinja, is a template with tools)."
)


def call(mark: str, name: str = NAME) -> Dict:
    return {"type": "function", "function": {"name": name, "arguments": {"birl": mark}}}


def as_dict(message: Message) -> Dict:
    """Convert a message to a dict for chat templates."""
    result: Dict = {"role": message.role, "content": message.content}
    if message.pictures:
        result["pictures"] = len(message.pictures)  # becomes parts before the template gets it
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_calls:
        result["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": _object(c)}} | ({"id": c.id} if c.id else {})
            for c in message.tool_calls
        ]
    return result | {key: v for key in ("name", "tool_call_id") if (v := getattr(message, key))}


def with_parts(message: Mapping[str, Any], always: bool = False) -> Dict:
    """Convert the content of a message with pictures, or `always`, to a list of parts, for templates."""
    result = dict(message)
    if result.pop("pictures", 0) or (always and isinstance(result.get("content"), str)):
        first, *others = result["content"].split(PLACE)
        parts = [{"type": "text", "text": first}]
        for text in others:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        result["content"] = [part for part in parts if part.get("text", part["type"])]
    return result


def as_openai(message: Message) -> Dict:
    """Convert a message to OpenAI's format: arguments of calls are text, and pictures are data URLs."""
    result, shown = with_parts(as_dict(message)), iter(message.pictures)
    for part in result["content"] if message.pictures else ():
        if part["type"] == "image":
            one = next(shown)
            url = f"data:{one.media_type};base64,{b64encode(one.data).decode()}"
            part |= {"type": "image_url", "image_url": {"url": url}}
    for made, call in zip(result.get("tool_calls", ()), message.tool_calls, strict=True):
        made["function"]["arguments"] = call.arguments
    return result


def _object(call: ToolCall) -> Dict:
    try:
        result = json.loads(call.arguments)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        raise BirlError(
            f"A call of {call.name} has arguments that are no JSON text of an object: {call.arguments[:80]}"
        )
    return result


def render(
    chat: "Chat", messages: Sequence[Mapping[str, Any]], tools: Tools = (), pictures: Sequence[Picture] = ()
) -> tuple[int, ...]:
    """Ids of a prompt, up to the start of the assistant's answer. `messages`: dicts for chat templates: `tool_calls`
    have their arguments as a mapping; `pictures`: all of the messages. Raises `BirlError` if the template would leave
    out the tools, a call, a picture, or a message of a user, a tool or the system."""
    check_pictures(chat, pictures)
    made = text(chat, messages, tools)
    check(chat, messages, tools)
    return chat.encode_with(made, pictures)


def check_pictures(chat: "Chat", pictures: Sequence[Picture]) -> None:
    """Raises `BirlError` if the model takes no pictures, or not so many."""
    if not pictures:
        return
    if chat.pictures is None:
        raise BirlError(
            "A message has a picture, and this model reads text alone. Take a vision-language model whose folder has "
            "its processor (model.pictures=true for one that can do without, as Qwen3.5)."
        )
    if len(pictures) > chat.pictures.bounds.count:
        raise BirlError(
            f"A conversation has {len(pictures)} pictures, at most {chat.pictures.bounds.count} are read "
            "(model.max_pictures)."
        )


def text(chat: "Chat", messages: Sequence[Mapping[str, Any]], tools: Tools = (), answer: bool = True) -> str:
    """Render messages with the template, up to the start of an `answer`."""
    if not chat.has_template:
        raise BirlError(
            "The tokenizer has no chat template, so messages cannot be made into a prompt. Name one with "
            "model.chat_template=FILE.jinja, or use text prompts (of a server: /v1/completions)."
        )
    called = any(m.get("tool_calls") or m["role"] == "tool" for m in messages)
    try:
        return apply(chat, messages, tools, answer, chat.format if called else None)
    except BirlError:
        raise
    except Exception as error:  # Jinja raises whatever the template wants
        roles = ", ".join(str(m["role"]) for m in messages)
        raise BirlError(
            f"The chat template refuses a conversation of {roles}: {str(error) or type(error).__name__}"
            + (f" {TEMPLATE}" if tools or called else "")
        ) from error


def apply(chat: "Chat", messages: Sequence[Mapping[str, Any]], tools: Tools, answer: bool, form: Format | None) -> str:
    if chat.without_tools and (tools or any(m.get("tool_calls") for m in messages)):
        if not chat.noted:
            chat.noted = True
            print(NOTE.format(chat.without_tools), flush=True)
        messages, tools = written(messages, tools, chat.without_tools == "system"), ()
    return _apply(chat, form.fit(messages) if form else messages, tools, answer)


def _apply(chat: "Chat", messages: Sequence[Mapping[str, Any]], tools: Tools, answer: bool) -> str:
    return _made(chat, [with_parts(m, chat.in_parts) | _thoughts(m) for m in messages], tools, answer)


def in_parts(chat: "Chat") -> bool:
    """Whether the template leaves out a text that is not in a list of parts."""
    asked = {"role": "user", "content": MARK}
    try:
        told = [MARK in _made(chat, [m], (), True).lower() for m in (asked, with_parts(asked, always=True))]
    except BirlError:
        raise
    except Exception:  # Jinja raises whatever the template wants
        return False
    return told == [False, True]


def _made(chat: "Chat", messages: list[Dict], tools: Tools, answer: bool) -> str:
    from birl.text.jinja import LARGEST, TooLarge, bounded  # jinja2 is installed with the tokenizer

    bounded()
    try:
        with deadline(SECONDS):
            made = chat.tokenizer.apply_chat_template(
                messages, tools=[dict(tool) for tool in tools] or None, add_generation_prompt=answer, tokenize=False
            )
    except Overdue as error:
        raise BirlError(
            f"The chat template took longer than {SECONDS:g} s for {len(messages)} messages. Use another template "
            "(model.chat_template=FILE.jinja)."
        ) from error
    except TooLarge as error:
        raise BirlError(
            f"The chat template makes a value of more than {LARGEST:,} characters, or too many of them, for "
            f"{len(messages)} messages. Use another template (model.chat_template=FILE.jinja)."
        ) from error
    str(made).encode()  # raises for half a surrogate pair, which is no text
    return str(made)


def _thoughts(message: Mapping[str, Any]) -> Dict:
    """The other name of a message's thinking in templates: GPT-OSS, LFM 2.5."""
    return {"thinking": message["reasoning_content"]} if message.get("reasoning_content") else {}


def written(messages: Sequence[Mapping[str, Any]], tools: Tools, system: bool) -> list[Dict]:
    """Convert a conversation to text messages in the Hermes format, for a template without tools: the system message
    ends with the tools and how to call them, a call is part of the assistant's text, and results are user messages.
    `system`: the template takes a system message; else the first user message has this text."""
    result: list[Dict] = []
    answers = False  # the last message consists of tool results
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if answers and role in ("tool", "user"):  # some templates require alternating user and assistant
            result[-1]["content"] += f"\n{content}"
            result[-1]["pictures"] = result[-1].get("pictures", 0) + message.get("pictures", 0)
        else:
            own = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
            calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
            own["content"] = "\n".join([*([content] if content else []), *calls])
            result.append({**own, "role": "user"} if role == "tool" else own)
        answers = role == "tool"
    return _told(result, tools, system) if tools else result


def _told(messages: list[Dict], tools: Tools, system: bool) -> list[Dict]:
    signatures = "".join(f"{_json(tool.get('function', tool))}\n" for tool in tools)
    first = messages[0] if messages else {}
    if first.get("role") == ("system" if system else "user"):
        text = f"{first['content']}\n\n{BEFORE}{signatures}{BEHIND}"
        return [{**first, "content": text}, *messages[1:]]
    return [{"role": "system" if system else "user", "content": BEFORE + signatures + BEHIND}, *messages]


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = _json(function["name"]), _json(function["arguments"])
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def check_kept(messages: Iterable[tuple[int, Message]], made: str, tags: tuple[str, str] | None) -> None:
    """Raises `BirlError` if the template wrote less than the whole content of the assistant's messages, each with
    its place, as `made`. Blanks, case, and tags of thinking, which it may write itself, are not compared."""

    def bare(text: str) -> str:
        for tag in tags or ():
            text = text.replace(tag, "").replace(tag.strip(), "")
        return "".join(text.lower().split())

    made = bare(made)
    for place, message in messages:
        if message.role == "assistant" and not all(bare(part) in made for part in message.content.split(PLACE)):
            raise BirlError(
                f"The chat template leaves out a part of the assistant's content (messages.{place}), such as thinking "
                "or text beside a call, so the model would not learn it. Remove that part, or use another template "
                "(model.chat_template=hermes, or FILE.jinja)."
            )


def check(chat: "Chat", messages: Sequence[Mapping[str, Any]], tools: Tools) -> None:
    """Raises `BirlError` if the template leaves out tools, calls or messages. This depends on roles, not on text, so
    each shape of a conversation is checked once, with probe texts."""
    shape = tuple(
        (
            m["role"],
            bool(m.get("content")),
            "name" in m,
            tuple(c["function"]["name"] for c in m.get("tool_calls") or ()),
        )
        for m in messages
    )
    written = repr(shape) + (json.dumps(list(tools), sort_keys=True, default=str) if tools else "")
    key = hashlib.sha256(written.encode(errors="surrogatepass")).digest()
    if key in chat.checked:
        return
    probe = [_probe(m, place) for place, m in enumerate(messages)]
    made = text(chat, probe, tools)
    if tools and made == text(chat, probe, ()):
        raise BirlError(f"The model's chat template leaves out tools, so the model would not see them. {TEMPLATE}")
    if (tools or any(m.get("tool_calls") for m in messages)) and chat.format is None:
        raise BirlError(
            next(_left_out(probe, made), "")
            or "It is not known how this model's chat template writes tool calls, so they could not be read. Name the "
            f"format, model.tool_format={' | '.join(sorted(FORMATS))}, or another template "
            "(model.chat_template=hermes, or FILE.jinja)."
        )
    for result in _left_out(probe, made):
        raise BirlError(result)
    if len(chat.checked) > 4096:
        chat.checked.clear()
    chat.checked.add(key)


def _probe(message: Mapping[str, Any], place: int) -> Dict:
    result = {k: v for k, v in message.items() if k not in ("reasoning_content", "pictures")}
    result["content"] = f"birl-probe-{place}." if message.get("content") or message["role"] == "tool" else ""
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {**one, **call(f"birl-probe-{place}-{i}.", one["function"]["name"])}
            for i, one in enumerate(message["tool_calls"])
        ]
    return result


def _left_out(probe: Sequence[Mapping[str, Any]], made: str) -> Iterator[str]:
    """Messages about the parts of a probe that the template left out."""
    made = made.lower()  # a template may change case
    for place, message in enumerate(probe):
        role = message["role"]
        if any(one["function"]["arguments"]["birl"] not in made for one in message.get("tool_calls") or ()):
            yield (
                f"The model's chat template leaves out tool_calls (messages.{place}), so the model would not see them. "
                f"{TEMPLATE}"
            )
        if role != "assistant" and message["content"] not in made:
            yield (
                f"The model's chat template leaves out messages of role {role} (messages.{place}), so the model would "
                f"not see what they say. {TEMPLATE if role == 'tool' else 'Use another template or other roles.'}"
            )


def without_tools(chat: "Chat") -> str:
    """The message, system or user, into which the tools are written, if the template has neither tools nor tool
    results; empty if it has them, or if that is unknown."""
    asked, system = {"role": "user", "content": "birl-probe-question"}, {"role": "system", "content": MARK}
    place = ""
    for name, talk in (("user", [asked]), ("system", [system, asked])):
        try:
            plain = _apply(chat, talk, (), True)
            if plain != _apply(chat, talk, [TOOL], True):
                return ""
        except BirlError:
            raise
        except Exception:  # Jinja raises whatever the template wants
            continue
        place = name if all(m["content"] in plain for m in talk) else place
    return place


def detect(chat: "Chat") -> Format | None:
    """The tool-call format of the chat template: the one that parses a rendered call. None if there is none."""
    template = template_of(chat)
    for form in FORMATS.values():
        if all(mark in template for mark in form.marks) and _reads_back(chat, form):
            return form
    return None


def template_of(chat: "Chat") -> str:
    """The source of the chat template; if there are several, of all."""
    result = chat.tokenizer.chat_template
    return "\n".join(result.values()) if isinstance(result, dict) else str(result or "")


def _reads_back(chat: "Chat", form: Format) -> bool:
    asked = [{"role": "user", "content": "birl-probe-question"}]
    reply = {"role": "assistant", "content": "", "tool_calls": [call(MARK)]}
    try:
        before, made = (
            apply(chat, asked, [TOOL], True, form), apply(chat, [*asked, reply], [TOOL], False, form)
        )  # fmt: skip
    except BirlError:
        raise
    except Exception:  # Jinja raises whatever the template wants
        return False
    starts = {sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, made, strict=False)))}
    begin = made.find("birl-probe-question") + len("birl-probe-question")
    starts |= {at for opening in form.openings if (at := made.find(opening, begin)) >= 0}
    for reply in (ended for start in starts for ended in _endings(made[start:])):
        result = parts(reply, form, tags_of(template_of(chat)), [TOOL]).calls
        if [(c.name, json.loads(c.arguments)) for c in result] == [(NAME, {"birl": MARK})]:
            return True
    return False


def _endings(text: str) -> Iterator[str]:
    """The text, then repeatedly without the last item in angle brackets, which may be an end token."""
    yield text
    while last := LAST.search(text):
        text = text[: last.start()]
        yield text
