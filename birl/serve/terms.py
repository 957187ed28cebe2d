"""What of a request counts where the run decides: training needs answers that were drawn from the policy itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from birl.serve.limits import problem
from birl.serve.messages import check_tool, invalid, typed
from birl.text.chat import Chat
from birl.types import SamplingParams

#: of `SamplingParams`; a client may ask for another value
SAMPLING: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
#: would bend the distribution, or force the answer
WISHES = (
    *("seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "response_format"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity", "thinking", "output_config"),
)
VAIN: tuple[Any, ...] = (None, {}, 0, {"type": "text"}, {"type": "disabled"})  # wishes for nothing


@dataclass(slots=True, kw_only=True)
class Terms:
    """`sampling` "run": the run's values alone; "agent": a client's own temperature, top_p, top_k and min_p count.
    What is not done as it was asked is said once in a run."""

    chat: Chat
    sampling: str = "run"
    said: set[str] = field(default_factory=set)

    def note(self, key: str, what: str) -> None:
        if key not in self.said:
            self.said.add(key)
            print(f"An agent asks for {key}={what}", flush=True)

    def params(self, data: Mapping[str, Any], own: SamplingParams, stop: Sequence[str], limit: str) -> SamplingParams:
        """The run's, with the client's stop strings, and its limit if that is lower. Raises `Refused`."""
        most = typed(data, limit, int, None)
        found = replace(
            own,
            stop=tuple(dict.fromkeys((*own.stop, *stop))),
            max_tokens=own.max_tokens if most is None else min(most, own.max_tokens),
        )
        for key, kind in SAMPLING.items():
            value = typed(data, key, kind, None)
            value = 0 if key == "top_k" and value == -1 else value  # vLLM's: off
            if value is None or value == getattr(own, key):
                continue
            if self.sampling == "agent":
                found = replace(found, **{key: value})
            else:
                self.note(key, f"{value:g}; the run's {key} is {getattr(own, key):g} and counts (env.sampling=run).")
        for key in WISHES:
            if data.get(key) not in VAIN:
                self.note(key, f"{json.dumps(data[key])[:60]}; that has no effect: the model's own tokens are trained.")
        if wrong := problem(found, len(self.chat.tokenizer)):
            raise invalid(limit if wrong[0] == "max_tokens" else wrong[0], wrong[1])
        return found

    def tools(self, given: Sequence[Any], choice: Any) -> list[Any]:
        """Those that the model sees. `choice`: a client's tool_choice in OpenAI's words."""
        found = []
        for place, tool in enumerate(given):
            function = tool.get("function") if isinstance(tool, dict) else None
            if isinstance(function, dict) and "strict" in function:
                if function["strict"]:
                    self.note("strict", "true; arguments are not forced into a schema.")
                tool = {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}
            check_tool(tool, place)
            found.append(tool)
        if choice not in (None, "auto", "none"):
            self.note("tool_choice", f"{json.dumps(choice)[:60]}; the model decides.")
        return [] if choice == "none" else found


def speaker(model: Any) -> str:
    """`birl/critic` is the agent critic; any other name of a model means the agent without a name."""
    return model.removeprefix("birl/") if isinstance(model, str) and model.startswith("birl/") else ""
