"""Right answers of the calculator task as texts for `birl sft`: python recipes/data/make_calculator.py 40 > calls.jsonl

Each task gives two rows: the prompt, tools included, with the call; and all that with the tool's answer, with the
result. The prompts are whole texts, as `birl rl env=calculator model.chat_template=hermes` shows them, for
data.apply_chat_template=false.
"""

import json
import sys

from birl.config.schema import Model
from birl.envs.tasks.calculator import CALCULATOR, Calculator, written
from birl.envs.tasks.rows import evaluate
from birl.models.load import load_tokenizer, resolve
from birl.text.chat import Chat
from birl.types import Message

SEED = 1000  # training has seed 0: other tasks, but for a few; those of validation are recognised by their text


def rows(chat: Chat, task: dict[str, str]) -> list[dict[str, str]]:
    tools = (CALCULATOR,)
    question = (Message(role="user", content=task["prompt"]),)
    call = json.dumps({"name": "calculator", "arguments": {"expression": task["expression"]}})
    reply = f"<tool_call>\n{call}\n</tool_call>"
    ids = chat.render(question, tools)
    told = Message(role="tool", name="calculator", content=written(evaluate(task["expression"])[0]))
    after = chat.extend(ids, (*chat.encode(reply), chat.end), (told,), tools, question)
    answers = (reply, f"The result is {task['answer']}.")
    return [{"prompt": chat.decode(seen), "response": said} for seen, said in zip((ids, after), answers, strict=True)]


def main(number: int) -> None:
    chat = Chat(load_tokenizer(resolve(Model().path, say=lambda text: None), "hermes"))
    for task in Calculator.tasks(Calculator.Config(digits=2, rows=number, seed=SEED), "train"):
        for row in rows(chat, task):
            print(json.dumps(row))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
