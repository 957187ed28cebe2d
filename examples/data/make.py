"""Write sft.jsonl, pairs.jsonl and held_out_pairs.jsonl from the prompts of recipes/data/arithmetic, and the rows of
reward_function.py (lengths.jsonl) and step_function.py (numbers.jsonl).

    python examples/data/make.py       # the committed files, byte for byte

SFT teaches two forms of an answer, half and half: "The answer is 12." and "3 * 4 = 12." The pairs prefer the second, if
it is right: to the first form, and to a wrong equation.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARITHMETIC = HERE.parents[1] / "recipes" / "data" / "arithmetic"
Row = dict[str, str]
TOPICS = ("the sea", "a cat", "winter", "bread", "the moon", "a train", "music", "rain", "a garden", "coffee", "sleep")
GUESS = "Guess a number between 1 and 8. Say only the number."


def equation(row: Row, answer: int) -> str:
    a, b = (int(number) for number in re.findall(r"\d+", row["prompt"]))
    return f"{a} {'+' if a + b == int(row['answer']) else '*'} {b} = {answer}."


def wrong(answer: int, rng: random.Random) -> int:
    """A near miss."""
    return rng.choice([n for n in (*range(max(answer - 3, 0), answer + 4), answer + 10) if n != answer])


def responses(rows: list[Row]) -> list[Row]:
    forms = (lambda row: f"The answer is {row['answer']}.", lambda row: equation(row, int(row["answer"])))
    return [{"prompt": row["prompt"], "response": forms[i % 2](row)} for i, row in enumerate(rows)]


def pairs(rows: list[Row], rng: random.Random) -> list[Row]:
    found = []
    for row in rows:
        answer = int(row["answer"])
        worse = equation(row, wrong(answer, rng)) if rng.random() < 0.4 else f"The answer is {answer}."
        found.append({"prompt": row["prompt"], "chosen": equation(row, answer), "rejected": worse})
    return found


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    rng = random.Random(0)
    train, held_out = (
        [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation")
    )
    write("sft.jsonl", responses(train[:120]))
    write("pairs.jsonl", pairs(train[:640], rng))
    write("held_out_pairs.jsonl", pairs(held_out[:100], rng))
    write("lengths.jsonl", [{"prompt": f"Write {n} words about {t}.", "words": n} for t in TOPICS for n in (3, 6, 10)])
    write("numbers.jsonl", [{"prompt": GUESS, "extra_info": {"number": rng.randint(1, 8)}} for _ in range(64)])


if __name__ == "__main__":
    main()
