"""An agent that is a plain function with the OpenAI client and a tool, independent of training.

birl rl env=examples/agent_openai.py:adds env.calls=2 data.train=recipes/data/arithmetic/train.jsonl

The same function works with any other address and model.
"""

import json

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def adds(task: dict, base_url: str, api_key: str, *, calls: int = 3) -> float:
    """The reward: 1 for the right answer. `calls` is a key (env.calls=5): the number of tool calls."""
    messages = [{"role": "user", "content": f"{task['prompt']} End with the number."}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(calls + 1):
            reply = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result(call.function)})
    words = (reply.content or "").split()
    return float(bool(words) and words[-1].strip(".") == task["answer"])


def result(function) -> str:
    try:
        given = json.loads(function.arguments)
        return str(given["a"] + given["b"])
    except (KeyError, TypeError):
        return f"There is no {function.name} of {function.arguments}."
