"""An agent as a separate program, in any language; here with the Anthropic client. Only its last line is about
training.

birl rl env=program env.command="python examples/agent_program.py" data.train=recipes/data/arithmetic/train.jsonl
"""

import json
import os
import sys
from pathlib import Path

from anthropic import Anthropic

task = json.loads(Path(os.environ["BIRL_TASK"]).read_text())  # the row: its columns, prompt and answer
client = Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY


def ask(system: str, messages: list) -> str:
    reply = client.messages.create(model="any", system=system, messages=messages, max_tokens=64)
    return "".join(block.text for block in reply.content if block.type == "text")


question = {"role": "user", "content": sys.stdin.read()}
draft = ask("Solve it step by step.", [question])
answer = ask(  # continues the conversation: one sample of two turns
    "Solve it step by step.",
    [question, {"role": "assistant", "content": draft}, {"role": "user", "content": "Only the number, please."}],
)
print(json.dumps({"reward": float(answer.strip().strip(".") == task["answer"])}))
