"""Which parameters of a request are used: all supported ones on a server; in training the run's own sampling. Other
parameters are in one table for both, so that an agent of a training run also works with a server.

    SILENT      has no effect on the answer
    NOTED       would have one, but is ignored: logged once
    REFUSED     would change the answer altogether: 400, unless the value disables it
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from birl.server.limits import problem, too_large
from birl.server.messages import check_tool, invalid, typed
from birl.text import grammar
from birl.text.bounds import cannot_fit, characters
from birl.text.chat import Chat
from birl.types import Conversation, SamplingParams

#: sampling parameters that a client may set
SAMPLING: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
SILENT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "priority", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "cache_control", "betas", "vllm_xargs"),
        *("guided_decoding_backend", "mm_processor_kwargs", "detokenize", "add_generation_prompt", "usage"),
        *("prompt_cache_options", "access_programs", "background_options", "provider", "models", "route", "transforms"),
        *("session_id", "inference_geo", "speed", "obfuscation", "trace", "debug", "extra_body"),
        *("kv_transfer_params", "ec_transfer_params", "rid", "keep_alive", "ttl", "cache_prompt", "timings_per_token"),
    )
)
NOTED: dict[str, tuple[Any, ...]] = {  # values that request nothing
    **{"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (0, 1), "length_penalty": (0, 1)},
    **{"logit_bias": ({},), "logit_bias_exp": ({},), "bad_words": ([],), "allowed_token_ids": ([],)},
    **{"top_a": (0,), "typical_p": (1,), "min_tokens": (0,), "seed": (), "prompt_logprobs": (0,)},
    **{"reasoning_effort": (), "reasoning": ({},), "include_reasoning": (True,), "thinking": ({"type": "disabled"},)},
    **{"enable_thinking": (), "thinking_budget": (), "chat_template_kwargs": ({},), "verbosity": ()},
    **{"output_config": ({},), "effort": (), "context_management": ({}, []), "container": ()},
    **{"parallel_tool_calls": (True,), "skip_special_tokens": (False,), "spaces_between_special_tokens": (True,)},
    **{"include_stop_str_in_output": (False,), "ignore_eos": (False,), "stop_token_ids": ([],), "documents": ([],)},
    **{"chat_template": (), "prediction": ({},), "add_special_tokens": (True,), "return_tokens_as_token_ids": (False,)},
    **{"output_format": ({}, {"type": "text"}), "truncate_prompt_tokens": (), "min_p": (0,), "best_of": (1,)},
    **{"repeat_penalty": (0, 1), "min_new_tokens": (0,), "no_stop_trim": (False,), "thinking_token_budget": ()},
    **{"separate_reasoning": (True,), "stream_reasoning": (True,), "reasoning_format": (), "safe_prompt": (False,)},
    **{"truncation": ("disabled",), "max_tool_calls": (), "moderation": (), "image": ({},)},
}
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # accepted values, and why others are not
    "suffix": (("",), "infilling is not supported"),
    "echo": ((False,), "repeating the prompt is not supported"),
    "top_logprobs": ((0,), "a run's engines report log-probs of sampled tokens only (logprobs=true)"),
    "use_beam_search": ((False,), "answers are sampled"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "functions": (([],), "is an older form: use tools"),
    "function_call": (("none", "auto"), "is an older form: use tool_choice"),
    "continue_final_message": ((False,), "prefilled answers are not supported"),
    "web_search_options": (({},), "the server has no built-in tools"),
    "background": ((False,), "background answers are not supported: wait, or ask with stream=true"),
    "conversation": ((), "conversations are not stored: send previous_response_id, or all of it as input"),
    "prompt": ((), "there are no stored prompts: send the text itself (input, messages)"),
    "plugins": (([],), "the server has no built-in tools"),
    "mcp_servers": (([],), "the server has no built-in tools"),
}
#: parameters that force the form of an answer, of OpenAI and vLLM
FORMS = ("response_format", "guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs")


@dataclass(slots=True, kw_only=True)
class Terms:
    """Which parameters are used. `sampling` "run": only the run's values; "agent": a client's temperature, top_p, top_k
    and min_p; "client", on a server: everything supported. A warning is printed once for each ignored parameter."""

    chat: Chat
    sampling: str = "run"
    vocabulary: int = 0  # valid token ids; 0: the tokenizer's
    context: int = 1 << 30  # maximum tokens of a prompt
    seen: dict[str, str] = field(default_factory=dict)  # bodies of grammars, and the problem of each
    noted: set[str] = field(default_factory=set)

    @property
    def served(self) -> bool:
        return self.sampling == "client"

    def check_size(self, conversation: Conversation, key: str) -> None:
        """Raise `Refused` for a conversation that cannot fit."""
        if cannot_fit(conversation, self.context):
            raise too_large(key, f"{characters(conversation)} characters", self.context)

    def render(self, conversation: Conversation, tools: Sequence[Any] = (), key: str = "messages") -> tuple[int, ...]:
        """Ids of a prompt. Raises `Refused` for one that cannot fit, before it is rendered."""
        self.check_size(conversation, key)
        return self.chat.render(conversation, tools)

    def note(self, key: str, what: str) -> None:
        """Print once for each key."""
        if key not in self.noted:
            self.noted.add(key)
            print(f"{'A client' if self.served else 'An agent'} requested {key}={what}", flush=True)

    def vain(self, key: str, value: Any) -> None:
        why = "" if self.served else ": the model's own tokens are trained"
        self.note(key, f"{json.dumps(value)[:60]}; that has no effect{why}.")

    def vain_beside(self, key: str, given: Mapping[str, Any], honoured: Collection[str]) -> None:
        """Print once that the object `given` has further names, which have no effect."""
        if more := {name: value for name, value in given.items() if name not in honoured and value is not None}:
            self.vain(key, more)

    def check(self, data: Mapping[str, Any], honoured: Collection[str]) -> None:
        """Raise `Refused` for parameters that would change the answer altogether."""
        typed(data, "model", str, None)
        for key, value in data.items():
            if key in honoured or key in SILENT or value is None:
                continue
            if key in FORMS:
                if value not in ({}, {"type": "text"}, "", []):
                    self.vain(key, value)
            elif key in NOTED:
                if value not in NOTED[key]:
                    self.vain(key, value)
            elif key in REFUSED:
                allowed, why = REFUSED[key]
                if value not in allowed:
                    only = " | ".join(json.dumps(v) for v in allowed)
                    raise invalid(key, f"is not supported{f', except as {only}' if only else ''}: {why}")
            else:
                every = (*SILENT, *NOTED, *REFUSED, *FORMS)
                near = get_close_matches(key, honoured, 1) or get_close_matches(key, every, 1)
                raise invalid(key[:100], f"there is no such parameter{f'; did you mean {near[0]}?' if near else ''}")

    def params(self, data: Mapping[str, Any], own: SamplingParams, stop: Sequence[str], limit: str) -> SamplingParams:
        """Sampling parameters: the client's; in training the run's with the client's stop conditions, and its limit if
        that is lower. `limit`: name of the answer's token limit. Raises `Refused` for invalid values."""
        seed = typed(data, "seed", int, None)
        values = {key: typed(data, key, kind, getattr(own, key)) for key, kind in SAMPLING.items()}
        values["top_k"] = 0 if values["top_k"] == -1 else values["top_k"]  # vLLM's -1: off
        asked = replace(
            own,
            **values,
            stop=(*own.stop, *stop),
            stop_ids=(*own.stop_ids, *stop_ids(data)),
            max_tokens=typed(data, limit, int, own.max_tokens),
            ignore_eos=typed(data, "ignore_eos", bool, own.ignore_eos),
            seed=own.seed if seed is None else seed % 2**64,  # OpenAI's may be negative
        )
        if wrong := problem(asked, self.vocabulary or len(self.chat.tokenizer)):
            names = {"max_tokens": limit, "stop_ids": "stop_token_ids"}
            raise invalid(names.get(wrong[0], wrong[0]), wrong[1])
        if self.served:
            return asked
        result = replace(
            own, stop=asked.stop, stop_ids=asked.stop_ids, max_tokens=min(asked.max_tokens, own.max_tokens)
        )
        if self.sampling == "agent":
            return replace(result, **values)
        for key, value in values.items():
            if value != getattr(own, key):
                self.note(key, f"{value:g}; the run's {key} is {getattr(own, key):g} and is used (env.sampling=run).")
        return result

    def tools(self, data: Mapping[str, Any], given: Sequence[Any], choice: Any) -> tuple[list[Any], str]:
        """The tools that the model sees, and the body of its answer's grammar (`birl.text.grammar`), empty if the
        answer is free, as in training. `given` and `choice`: a client's tools and tool_choice, as in OpenAI's API.
        Raises `Refused`, also in training, for what a server could not do."""
        for place, tool in enumerate(given):
            check_tool(tool, place)
        result = list(given)
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            listed = typed(choice, "allowed_tools", dict, choice)
            names = [chosen(one) for one in typed(listed, "tools", list, [])]
            result = [tool for tool in result if tool["function"]["name"] in names]
            choice = listed.get("mode")
        if choice not in (None, "auto", "none", "required") and chosen(choice) not in known(result):
            raise invalid("tool_choice", f"{json.dumps(choice)[:80]} is none of auto, none, required and the tools")
        if choice == "required" and not result:
            raise invalid("tool_choice", "is required, and there are no tools")
        if choice not in (None, "auto", "none") and not self.served:
            self.note("tool_choice", f"{json.dumps(choice)[:60]}; the model decides.")
        if strict(result) and not self.served:
            self.note("strict", "true; arguments are not constrained to a schema.")
        result = [] if choice == "none" else result
        form = self.form(data, result, choice)
        return [plain(tool) for tool in result], form if self.served else ""

    def form(self, data: Mapping[str, Any], tools: Sequence[Any], choice: Any) -> str:
        key, body = answer_form(data)
        if tools and (body or choice not in (None, "auto") or strict(tools)):
            forced = choice not in (None, "auto")
            own = [t for t in tools if chosen(choice) in ("", t["function"]["name"])]
            many = typed(data, "parallel_tool_calls", bool, True) and not chosen(choice)
            calls = grammar.calls_of(self.chat, own, many=many, text="" if forced else body or "any")
            if calls is None:
                if self.served:
                    what = f"{json.dumps(choice)[:60]}; calls in this model's format cannot be forced."
                    self.note("tool_choice", what)
                return ""
            key, body = "tool_choice" if forced else key or "tools", calls
        elif tools and not typed(data, "parallel_tool_calls", bool, True):
            self.vain("parallel_tool_calls", False)
        if body and (wrong := self.wrong(body)):
            raise invalid(key, f"cannot be made into a grammar: {wrong[:300]}")
        return body

    def wrong(self, body: str) -> str:
        """The problem of a grammar's body, or "". Cached: it takes milliseconds, and agents repeat requests."""
        if (result := self.seen.get(body)) is None:
            if len(self.seen) >= 64:
                self.seen.clear()
            self.seen[body] = result = grammar.problem(self.chat, f"start: body\nbody: {body}\n")
        return result


def answer_form(data: Mapping[str, Any]) -> tuple[str, str]:
    """The parameter that forces a form of the answer, and the body of its grammar. Raises `Refused`."""
    form = typed(data, "response_format", dict, {})
    outputs = typed(data, "structured_outputs", dict, {})
    wanted = {f"guided_{k}": outputs.get(k) for k in ("json", "choice", "regex", "grammar")}
    wanted |= {key: data[key] for key in wanted if data.get(key) not in (None, "", {}, [])}
    match form.get("type", "text"):
        case "text":
            pass
        case "json_object":
            return "response_format", grammar.json_of({"type": "object"})
        case "json_schema":
            inner = form.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(inner, dict) or not isinstance(schema, dict):
                raise invalid("response_format.json_schema", "must be an object with a name and a schema")
            return "response_format", grammar.json_of(schema, strict=bool(inner.get("strict")))
        case kind:
            raise invalid("response_format.type", f"is {str(kind)[:40]!r}; text | json_object | json_schema")
    match wanted:
        case {"guided_json": str() | dict() as schema}:
            try:
                result = json.loads(schema) if isinstance(schema, str) else schema
            except (ValueError, RecursionError):
                result = None
            if not isinstance(result, dict):
                raise invalid("guided_json", "must be a JSON schema: an object, or its JSON text")
            return "guided_json", grammar.json_of(result, strict=False)
        case {"guided_choice": [*texts]} if texts and all(isinstance(t, str) and t for t in texts):
            return "guided_choice", " | ".join(map(json.dumps, texts))
        case {"guided_regex": str(pattern)}:
            return "guided_regex", f"/{pattern.replace('/', chr(92) + '/')}/"
        case _:
            wrong = next((key for key, value in wanted.items() if value is not None), "")
            if wrong:
                raise invalid(wrong, "cannot be kept; there are guided_json, guided_choice (texts) and guided_regex")
            return "", ""


def stop_ids(data: Mapping[str, Any]) -> tuple[int, ...]:
    result = typed(data, "stop_token_ids", list, [])
    if not all(type(i) is int for i in result):
        raise invalid("stop_token_ids", "must be a list of token ids")
    return tuple(result)


def strict(tools: Sequence[Any]) -> bool:
    return any(tool["function"].get("strict") for tool in tools)


def chosen(choice: Any) -> str:
    """Name of the tool that a client forces; empty if it forces none."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else ""
    return name if isinstance(name, str) else ""


def known(tools: Sequence[Any]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def plain(tool: Any) -> Any:
    """A tool without `strict`, which the model does not need to see."""
    return {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}


def speaker(model: Any) -> str:
    """Agent of a model name: critic for `birl/critic`; empty for any other name."""
    return model.removeprefix("birl/") if isinstance(model, str) and model.startswith("birl/") else ""
