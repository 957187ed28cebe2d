"""What a request may say beside what is honoured. One table for `birl serve` and for the gateway of training, so that
an agent that trains also runs on a server.

    honoured    named by the caller of `check`
    SILENT      has no effect on the answer
    NOTED       would have one, and has none: that is logged once
    REFUSED     the answer would be another thing altogether: 400, unless the value says that it is not wanted
"""

import json
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from birl.server.messages import invalid

SILENT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "priority", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "cache_control", "betas", "vllm_xargs"),
        *("guided_decoding_backend", "mm_processor_kwargs", "detokenize", "add_generation_prompt", "usage"),
        *(
            "prompt_cache_options",
            "access_programs",
            "background_options",
            "provider",
            "models",
            "route",
            "transforms",
            "session_id",
            "inference_geo",
            "speed",
            "obfuscation",
        ),
    )
)
NOTED: dict[str, tuple[Any, ...]] = {  # values that ask for nothing
    **{"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (0, 1), "length_penalty": (0, 1)},
    **{"logit_bias": ({},), "logit_bias_exp": ({},), "bad_words": ([],), "allowed_token_ids": ([],)},
    **{"top_a": (0,), "typical_p": (1,), "min_tokens": (0,), "seed": (), "top_logprobs": (0,), "prompt_logprobs": (0,)},
    **{"reasoning_effort": (), "reasoning": ({},), "include_reasoning": (True,), "thinking": ({"type": "disabled"},)},
    **{"enable_thinking": (), "thinking_budget": (), "chat_template_kwargs": ({},), "verbosity": ()},
    **{"output_config": ({},), "effort": (), "context_management": ({}, []), "container": ()},
    **{"parallel_tool_calls": (True,), "skip_special_tokens": (False,), "spaces_between_special_tokens": (True,)},
    **{"include_stop_str_in_output": (False,), "ignore_eos": (False,), "stop_token_ids": ([],), "documents": ([],)},
    **{"chat_template": (), "prediction": ({},), "add_special_tokens": (True,), "return_tokens_as_token_ids": (False,)},
    **{"output_format": ({}, {"type": "text"}), "truncate_prompt_tokens": (), "min_p": (0,), "best_of": (1,)},
    **{"truncation": ("disabled",), "max_tool_calls": (), "moderation": (), "image": ({},)},
}
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # values that are taken, and why others are not
    "suffix": (("",), "the model cannot fill in"),
    "echo": ((False,), "the prompt is not repeated here"),
    "use_beam_search": ((False,), "answers are sampled"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "functions": (([],), "is an older form: use tools"),
    "function_call": (("none", "auto"), "is an older form: use tool_choice"),
    "continue_final_message": ((False,), "an answer cannot be begun for the model"),
    "web_search_options": (({},), "the server has no tools of its own"),
    "background": ((False,), "answers are not kept for later: wait, or ask with stream=true"),
    "conversation": ((), "conversations are not stored: send previous_response_id, or all of it as input"),
    "prompt": ((), "there are no stored prompts: send the text itself (input, messages)"),
    "plugins": (([],), "the server has no tools of its own"),
    "mcp_servers": (([],), "the server has no tools of its own"),
}
#: an answer that is forced into a form, in the words of OpenAI and of vLLM
FORMS = ("response_format", "guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs")
Note = Callable[[str, Any], None]


def check(data: Mapping[str, Any], honoured: Collection[str], note: Note) -> None:
    """Raises `Refused`."""
    for key, value in data.items():
        if key in honoured or key in SILENT or value is None:
            continue
        if key in FORMS:
            if value not in ({}, {"type": "text"}, "", []):
                note(key, value)
        elif key in NOTED:
            if value not in NOTED[key]:
                note(key, value)
        elif key in REFUSED:
            allowed, why = REFUSED[key]
            if value not in allowed:
                only = " | ".join(json.dumps(v) for v in allowed)
                raise invalid(key, f"is not supported{f', except as {only}' if only else ''}: {why}")
        else:
            every = (*SILENT, *NOTED, *REFUSED, *FORMS)
            near = get_close_matches(key, honoured, 1) or get_close_matches(key, every, 1)
            raise invalid(key[:100], f"there is no such parameter{f'; did you mean {near[0]}?' if near else ''}")
