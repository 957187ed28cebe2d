"""Write `arithmetic/` and `arithmetic_stories/`: train.jsonl and validation.jsonl each, and solutions.jsonl for SFT.

    python recipes/data/make_arithmetic.py            # the committed files, byte for byte
    python recipes/data/make_arithmetic.py --out my_data --suffix " Answer with a number."

No problem (operation and operands, their order aside) is in two files of a set, and no prompt occurs twice. All words
are ours; no data set was copied.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of problem of `arithmetic/`: two numbers whose order does not matter."""

    name: str
    answer: Callable[[int, int], int]
    wordings: tuple[str, ...]


OPERATIONS = (
    Operation(
        name="sum",
        answer=lambda a, b: a + b,
        wordings=(
            "What is {a} + {b}?",
            "{a} + {b} = ?",
            "Add {a} and {b}.",
            "What is {a} plus {b}?",
            "How much is {a} plus {b}?",
            "What do you get if you add {b} to {a}?",
            "What is the sum of {a} and {b}?",
            "Calculate {a} + {b}.",
            "Which number is {b} more than {a}?",
        ),
    ),
    Operation(
        name="product",
        answer=lambda a, b: a * b,
        wordings=(
            "What is {a} * {b}?",
            "{a} * {b} = ?",
            "Multiply {a} by {b}.",
            "What is {a} times {b}?",
            "How much is {a} times {b}?",
            "What do you get if you multiply {a} by {b}?",
            "What is the product of {a} and {b}?",
            "Calculate {a} * {b}.",
            "What is {a} multiplied by {b}?",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Story:
    """One kind of problem of `arithmetic_stories/`: two or three numbers from 2 to a bound each, no answer below 0.

    `swaps` says which of the operands may change places without changing the problem.
    """

    name: str
    bounds: tuple[int, ...]
    answer: Callable[..., int]
    swaps: tuple[int, ...]
    wordings: tuple[str, ...]


STORIES = (
    Story(
        name="a+b",
        bounds=(50, 50),
        answer=lambda a, b: a + b,
        swaps=(0, 1),
        wordings=(
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "What is the sum of {a} and {b}?",
            "How much is {a} plus {b}?",
            "A baker sells {a} rolls in the morning and {b} in the afternoon. How many rolls does he sell?",
            "There are {a} boys and {b} girls at a school party. How many children are there?",
        ),
    ),
    Story(
        name="a+b+c",
        bounds=(50, 50, 50),
        answer=lambda a, b, c: a + b + c,
        swaps=(0, 1, 2),
        wordings=(
            "What is {a} + {b} + {c}?",
            "Add {a}, {b} and {c}.",
            "What is the sum of {a}, {b} and {c}?",
            "Lena picks {a} plums, Max {b} and Eva {c}. How many plums do they have together?",
            "A train has three cars with {a}, {b} and {c} people. How many people are on the train?",
        ),
    ),
    Story(
        name="a+b-c",
        bounds=(50, 50, 40),
        answer=lambda a, b, c: a + b - c,
        swaps=(0, 1),
        wordings=(
            "What is {a} + {b} - {c}?",
            "Tom has {a} stickers. He buys {b} more and gives {c} away. How many stickers does he have now?",
            "A bus carries {a} people. At the next stop {b} get on and {c} get off. How many people are on the bus?",
            "Anna saves {a} dollars in May and {b} in June. Then she spends {c}. How many dollars are left?",
            "There are {a} red and {b} yellow tulips in a garden. {c} of them are cut. How many tulips are left?",
        ),
    ),
    Story(
        name="a-b-c",
        bounds=(50, 25, 25),
        answer=lambda a, b, c: a - b - c,
        swaps=(1, 2),
        wordings=(
            "What is {a} - {b} - {c}?",
            "A shop has {a} lamps. It sells {b} on Monday and {c} on Tuesday. How many lamps are left?",
            "Mia has {a} cookies. She eats {b} and gives {c} to her brother. How many cookies does she have now?",
            "A book has {a} pages. Ben reads {b} pages, and {c} more the next day. How many pages are left?",
        ),
    ),
    Story(
        name="a*b+c",
        bounds=(9, 9, 50),
        answer=lambda a, b, c: a * b + c,
        swaps=(0, 1),
        wordings=(
            "What is {a} * {b} + {c}?",
            "Sara has {a} boxes with {b} pens each, and {c} more pens. How many pens does she have?",
            "Paul buys {a} tickets for {b} dollars each and a meal for {c} dollars. How many dollars does he pay?",
            "A farmer has {a} fields with {b} sheep each, and {c} sheep in the barn. How many sheep does he have?",
        ),
    ),
    Story(
        name="a*b-c",
        bounds=(9, 9, 30),
        answer=lambda a, b, c: a * b - c,
        swaps=(0, 1),
        wordings=(
            "What is {a} * {b} - {c}?",
            "Anna buys {a} cartons of {b} eggs each and breaks {c} eggs. How many whole eggs does she have?",
            "There are {a} rows of {b} chairs. {c} chairs are taken. How many chairs are free?",
            "A box holds {b} chocolates. Leo opens {a} boxes and eats {c} chocolates. How many are left?",
        ),
    ),
)

Problem = tuple[str, tuple[int, ...]]  # its kind, and its operands in an order that is the same for all equal ones
Row = dict[str, str]


def arithmetic(
    train: int, validation: int, seed: int, largest: int = 9, suffix: str = ""
) -> tuple[list[Row], list[Row]]:
    """Sums and products of two numbers from 1 to `largest`; a fifth of the pairs is held out entirely."""
    rng = random.Random(seed)
    sides: tuple[list[list[Row]], list[list[Row]]] = ([], [])
    for operation in OPERATIONS:
        pairs = list(itertools.combinations_with_replacement(range(1, largest + 1), 2))
        rng.shuffle(pairs)
        held = max(1, len(pairs) // 5)
        for side, chosen in zip(sides, (pairs[held:], pairs[:held]), strict=True):
            rows = [row for pair in chosen for row in worded(operation, pair, suffix)]
            rng.shuffle(rows)
            side.append(rows)
    first, second = (take_in_turn(side, n) for side, n in zip(sides, (train, validation), strict=True))
    rng.shuffle(first)
    rng.shuffle(second)
    return first, second


def worded(operation: Operation, pair: tuple[int, int], suffix: str) -> Iterator[Row]:
    for (a, b), wording in itertools.product(sorted({pair, pair[::-1]}), operation.wordings):
        yield {"prompt": wording.format(a=a, b=b) + suffix, "answer": str(operation.answer(a, b))}


def take_in_turn(kinds: Sequence[list[Row]], n: int) -> list[Row]:
    """n rows, as many of each kind as there are."""
    taken = [row for turn in itertools.zip_longest(*kinds) for row in turn if row is not None]
    if len(taken) < n:
        raise SystemExit(f"only {len(taken)} different prompts, {n} wanted: raise --largest or lower the numbers")
    return taken[:n]


def stories(
    train: int, validation: int, seed: int, suffix: str = "", solutions: int = 0
) -> tuple[list[Row], list[Row], list[Row]]:
    """Two- and three-term sums and short stories in two steps. Each problem occurs once, in one of the files; those of
    the third come with a worked answer, for `birl sft`."""
    rng = random.Random(seed)
    seen: set[Problem] = set()
    rows: list[Row] = []
    for story in itertools.islice(itertools.cycle(STORIES), train + validation):
        numbers = draw(story, rng, seen)
        rows.append({"prompt": asked(story, numbers, rng) + suffix, "answer": str(story.answer(*numbers))})
    rng.shuffle(rows)
    solved: list[Row] = []
    for story in itertools.islice(itertools.cycle(STORIES), solutions):
        numbers = draw(story, rng, seen)
        solved.append({"prompt": asked(story, numbers, rng) + suffix, "response": worked(story, numbers)})
    return rows[validation:], rows[:validation], solved


def asked(story: Story, numbers: tuple[int, ...], rng: random.Random) -> str:
    return rng.choice(story.wordings).format(**dict(zip("abc", numbers, strict=False)))


def worked(story: Story, numbers: tuple[int, ...]) -> str:
    """a*b+c of 8, 3 and 25: "8 * 3 = 24, 24 + 25 = 49. The answer is 49." """
    value, steps = numbers[0], list[str]()
    for sign, number in zip(story.name[1::2], numbers[1:], strict=True):
        result = {"+": value + number, "-": value - number, "*": value * number}[sign]
        steps.append(f"{value} {sign} {number} = {result}")
        value = result
    return f"{', '.join(steps)}. The answer is {value}."


def draw(story: Story, rng: random.Random, seen: set[Problem]) -> tuple[int, ...]:
    """Operands of a problem that was not drawn before."""
    while True:
        numbers = tuple(rng.randint(2, bound) for bound in story.bounds)
        swapped = sorted(numbers[i] for i in story.swaps)
        problem = story.name, (*swapped, *(n for i, n in enumerate(numbers) if i not in story.swaps))
        if story.answer(*numbers) >= 0 and problem not in seen:
            seen.add(problem)
            return numbers


def write(folder: Path, **files: list[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write the two sets into")
    parser.add_argument("--train", type=int, default=1000, help="training rows of each set")
    parser.add_argument("--validation", type=int, default=200, help="validation rows of each set")
    parser.add_argument("--solutions", type=int, default=192, help="worked answers of arithmetic_stories/, for SFT")
    parser.add_argument("--largest", type=int, default=9, help="largest operand of arithmetic/")
    parser.add_argument("--suffix", default="", help="text behind each prompt")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    train, validation = arithmetic(given.train, given.validation, given.seed, given.largest, given.suffix)
    write(given.out / "arithmetic", train=train, validation=validation)
    train, validation, solved = stories(given.train, given.validation, given.seed, given.suffix, given.solutions)
    write(given.out / "arithmetic_stories", train=train, validation=validation, solutions=solved)


if __name__ == "__main__":
    main()
