"""Write sft.jsonl, pairs.jsonl and held_out_pairs.jsonl from the prompts of recipes/data/arithmetic.

    python examples/data/make.py       # the committed files, byte for byte

A pair is a right and a wrong answer to one prompt; wrong ones are near misses (off by a little, the other operation, two
digits exchanged), so that a reward model has something to learn.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
ARITHMETIC = HERE.parents[1] / "recipes" / "data" / "arithmetic"
FORMS = ("{}", "The answer is {}.", "It is {}.", "{}.")


def wrong(answer: int, rng: random.Random) -> int:
    near = [answer + d for d in (-10, -3, -2, -1, 1, 2, 3, 10) if answer + d >= 0]
    swapped = int(str(answer)[::-1])
    return rng.choice([n for n in (*near, swapped, answer * 2) if n != answer])


def write(name: str, rows: list[dict[str, str]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def pairs(rows: list[dict[str, str]], rng: random.Random) -> list[dict[str, str]]:
    found = []
    for row in rows:
        form = rng.choice(FORMS)
        bad = wrong(int(row["answer"]), rng)
        found.append({"prompt": row["prompt"], "chosen": form.format(row["answer"]), "rejected": form.format(bad)})
    return found


def main() -> None:
    rng = random.Random(0)
    train, held_out = (
        [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation")
    )
    write("sft.jsonl", [{"prompt": r["prompt"], "response": f"The answer is {r['answer']}."} for r in train[:160]])
    write("pairs.jsonl", pairs(train, rng))
    write("held_out_pairs.jsonl", pairs(held_out, rng))


if __name__ == "__main__":
    main()
