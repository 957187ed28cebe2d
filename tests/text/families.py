"""Chat templates as the families of models have them, written from their public formats, on the tiny tokenizer with
each family's own special tokens. How an engine's reply looks in each: `reply`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import AddedToken

from birl.named import template_file
from birl.text.chat import Chat
from birl.types import Message, ToolCall
from tests.tiny import tiny_tokenizer

FOLDER = Path(__file__).parent / "templates"
CHATML = ("<|im_start|>", "<|im_end|>")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    **{"a": {"type": "integer"}, "unit": {"type": "string"}, "more": {"type": "object"}},
                    **{"exact": {"type": "boolean"}, "last": {"type": ["null", "integer"]}},
                },
            },
        },
    },
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`ends`: what ends an answer, and an answer with a call, `calls`: how many at once, `thinks`: where thinking goes,
    `opens`: what the prompt already says of the answer."""

    specials: tuple[str, ...]
    ends: tuple[str, str]
    form: str = ""
    calls: int = 0
    beside: bool = True  # may something be said beside a call
    thinks: tuple[str, str] | None = None
    opens: str = ""
    roles: tuple[str, ...] = ("user",)  # who may speak behind an answer
    texts: Mapping[str, str] = field(default_factory=dict)


THINK = ("<think>\n", "\n</think>\n\n")
IM = ("<|im_end|>", "<|im_end|>")
DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end"),
        *("tool▁output▁begin", "tool▁output▁end"),
    )
)
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
)
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
FUNCTION_GEMMA = (
    *GEMMA,
    "<start_function_call>",
    "<end_function_call>",
    "<start_function_response>",
    "<end_function_response>",
    "<escape>",
)
QUOTE = '<|"|>'
GEMMA4 = ("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>")
GEMMA4 += ("<tool_response|>", QUOTE, "<|channel>", "<channel|>")
LLAMA4 = (
    "<|begin_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|eom|>",
    "<|python_start|>",
    "<|python_end|>",
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
ANYONE = ("user", "system")

FAMILIES = {
    "smollm2": Family(specials=CHATML, ends=IM, roles=ANYONE),
    "hermes": Family(specials=CHATML, ends=IM, form="hermes", calls=3, thinks=THINK, roles=ANYONE),
    "qwen2_5": Family(specials=CHATML, ends=IM, form="hermes", calls=3, roles=ANYONE),
    "qwen3": Family(specials=CHATML, ends=IM, form="hermes", calls=3, thinks=THINK, roles=ANYONE),
    "qwen3_coder": Family(
        specials=CHATML, ends=IM, form="qwen_coder", calls=3, thinks=THINK, opens="<think>\n", roles=ANYONE
    ),
    "qwen3_5": Family(specials=CHATML, ends=IM, form="qwen_coder", calls=3, thinks=THINK, opens="<think>\n"),
    "llama4": Family(specials=LLAMA4, ends=("<|eot|>", "<|eot|>"), form="llama", calls=3, beside=False, roles=ANYONE),
    "llama3": Family(
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ends=("<|eot_id|>", "<|eot_id|>"),
        form="llama",
        calls=1,
        beside=False,
        roles=ANYONE,
    ),
    "gemma": Family(specials=GEMMA, ends=("<end_of_turn>", "<end_of_turn>")),
    "function_gemma": Family(
        specials=FUNCTION_GEMMA, ends=("<end_of_turn>", "<start_function_response>"), form="function_gemma", calls=3
    ),
    "gemma4": Family(
        specials=GEMMA4,
        ends=("<turn|>", "<|tool_response>"),
        form="gemma4",
        calls=3,
        beside=False,
        thinks=("<|channel>thought\n", "\n<channel|>"),
    ),
    "mistral": Family(specials=MISTRAL, ends=("</s>", "</s>"), form="mistral", calls=3, beside=False),
    "mistral_args": Family(
        specials=MISTRAL, ends=("</s>", "</s>"), form="mistral", calls=3, thinks=("[THINK]", "[/THINK]")
    ),
    "deepseek_v3": Family(specials=DEEPSEEK, ends=(DEEPSEEK[1], DEEPSEEK[1]), form="deepseek", calls=3),
    "deepseek_v3_1": Family(specials=DEEPSEEK, ends=(DEEPSEEK[1], DEEPSEEK[1]), form="deepseek", calls=3),
    "deepseek_r1": Family(specials=DEEPSEEK, ends=(DEEPSEEK[1], DEEPSEEK[1]), thinks=THINK, opens="<think>\n"),
    "gpt_oss": Family(
        specials=HARMONY,
        ends=("<|return|>", "<|call|>"),
        form="harmony",
        calls=1,
        beside=False,
        thinks=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
}


@cache
def chat(name: str) -> Chat:
    family = FAMILIES[name]
    tokenizer = tiny_tokenizer(template=None)
    tokens = [AddedToken(token, special=True, normalized=False) for token in family.specials]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = family.ends[0]
    shipped = template_file(name)
    file = shipped if shipped.is_file() else FOLDER / f"{name}.jinja"
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    found = Chat(tokenizer)
    found.end_ids = frozenset(tokenizer.convert_tokens_to_ids(end) for end in family.ends)  # pyright: ignore
    return found


def reply(name: str, message: Message) -> str:
    """What a model of this family writes, behind the prompt, its end token included."""
    family, calls = FAMILIES[name], message.tool_calls
    text = ""
    if family.thinks and message.thinking:
        text = family.thinks[0] + message.thinking + family.thinks[1]
        text = text.removeprefix(family.opens)
    elif family.opens:
        text = "\n</think>\n\n"
    if name == "gpt_oss":
        text += f"<|channel|>final<|message|>{message.content}" if not calls else ""
        text += "".join(
            f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>{c.arguments}" for c in calls
        )
    else:
        text += message.content + ("\n" if message.content and calls else "") + written(name, calls)
    return text + family.ends[bool(calls)]


def written(name: str, calls: tuple[ToolCall, ...]) -> str:
    match name:
        case "qwen3_coder" | "qwen3_5":
            return "\n".join(
                f"<tool_call>\n<function={c.name}>\n"
                + "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in json.loads(c.arguments).items())
                + "</function>\n</tool_call>"
                for c in calls
            )
        case "llama3":
            return "; ".join(f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls)
        case "llama4":
            inside = "".join(f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls)
            return f"<|python_start|><|python_end|>{inside}" if calls else ""
        case "mistral":
            inside = ", ".join(f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in calls)
            return f"[TOOL_CALLS] [{inside}]" if calls else ""
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in calls)
        case "deepseek_v3":
            inside = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```<｜tool▁call▁end｜>"
                for c in calls
            )
            return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>" if calls else ""
        case "deepseek_v3_1":
            inside = "".join(
                f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{c.arguments}<｜tool▁call▁end｜>" for c in calls
            )
            return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>" if calls else ""
        case "gemma4":
            inside = (f"call:{c.name}{gemma(json.loads(c.arguments), QUOTE)}" for c in calls)
            return "".join(f"<|tool_call>{one}<tool_call|>" for one in inside)
        case "function_gemma":
            return "".join(
                f"<start_function_call>call:{c.name}{gemma(json.loads(c.arguments))}<end_function_call>" for c in calls
            )
        case _:
            return "\n".join(
                f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>' for c in calls
            )


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: object, quote: str = "<escape>") -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(v, quote) for v in value) + "]"
    return json.dumps(value)
