"""Right answers of a task for `birl sft`, worked out as a model shall learn to:

python recipes/data/make_solutions.py countdown 128 > recipes/data/countdown/solutions.jsonl
python recipes/data/make_solutions.py code 24 > recipes/data/code/solutions.jsonl
python recipes/data/make_solutions.py letter_counting 160 > recipes/data/letter_counting/solutions.jsonl
"""

import json
import sys

from birl.envs.tasks.code import Code
from birl.envs.tasks.countdown import Countdown
from birl.envs.tasks.letter_counting import LetterCounting
from birl.envs.tasks.rows import Row, evaluate
from birl.types import Task

SEED = 1000  # training has seed 0: other tasks, but for a few; those of validation are recognised by their text


def solved(row: Row) -> str:
    """4, 5, 1: "4 + 5 = 9, 4 - 5 = -1, 5 - 4 = 1. <answer>5 - 4</answer>" """
    (a, b), tried = row["numbers"], list[str]()
    for text in (f"{a} + {b}", f"{a} - {b}", f"{b} - {a}", f"{a} * {b}", f"{a} / {b}", f"{b} / {a}"):
        value = evaluate(text)[0]
        if value.denominator == 1:
            tried.append(f"{text} = {value}")
        if value == row["target"]:
            return f"{', '.join(tried)}. <answer>{text}</answer>"
    raise ValueError(row)


def programmed(row: Row) -> str:
    return Code.gold(Task(id="", prompt=row["prompt"], answer=row["answer"]))[0]


def counted(row: Row) -> str:
    """banana, a: "b 0, a 1, n 1, a 2, n 2, a 3. The answer is 3." """
    word, letter = row["word"], row["letter"]
    so_far = (f"{c} {word[: i + 1].count(letter)}" for i, c in enumerate(word))
    return f"{', '.join(so_far)}. The answer is {row['answer']}."


TASKS = {
    "countdown": (Countdown, Countdown.Config(count=2, largest=20, target=100, seed=SEED), solved),
    "code": (Code, Code.Config(seed=SEED), programmed),
    "letter_counting": (LetterCounting, LetterCounting.Config(spelled=True, seed=SEED), counted),
}


def main(name: str, number: int) -> None:
    task, config, answer = TASKS[name]
    config.rows = number
    for row in task.tasks(config, "train"):
        print(json.dumps({"prompt": row["prompt"], "response": answer(row)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
