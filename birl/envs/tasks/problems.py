"""Small programming problems with a right solution and unit tests: families with numbers and letters filled in."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from birl.envs.tasks.dictionary import WORDS

LETTERS = "aeilnorst"


@dataclass(frozen=True, kw_only=True)
class Family:
    """`text` and `solution` have the placeholders {k} and {c}; `answer(x, k, c)` is the expected result."""

    name: str
    takes: str
    text: str
    solution: str
    answer: Callable[[Any, int, str], Any]
    numbers: tuple[int, ...] = (0,)
    letters: str = " "


FAMILIES = (
    Family(
        name="total",
        takes="numbers",
        text="the sum of the numbers that are divisible by {k}",
        solution="return sum(n for n in numbers if n % {k} == 0)",
        answer=lambda x, k, c: sum(n for n in x if n % k == 0),
        numbers=tuple(range(2, 12)),
    ),
    Family(
        name="count_above",
        takes="numbers",
        text="how many of the numbers are greater than {k}",
        solution="return len([n for n in numbers if n > {k}])",
        answer=lambda x, k, c: sum(n > k for n in x),
        numbers=tuple(range(-5, 15)),
    ),
    Family(
        name="scaled",
        takes="numbers",
        text="a list of the numbers, each multiplied by {k}",
        solution="return [n * {k} for n in numbers]",
        answer=lambda x, k, c: [k * n for n in x],
        numbers=tuple(range(2, 22)),
    ),
    Family(
        name="largest",
        takes="numbers",
        text="a list of the {k} largest numbers, the largest first",
        solution="return sorted(numbers, reverse=True)[:{k}]",
        answer=lambda x, k, c: sorted(x)[::-1][:k],
        numbers=(2, 3, 4, 5),
    ),
    Family(
        name="rotated",
        takes="numbers",
        text="a list in which the first {k} numbers have moved to the end, in their order",
        solution="return numbers[{k}:] + numbers[:{k}]",
        answer=lambda x, k, c: [*x[k:], *x[:k]],
        numbers=(1, 2, 3, 4),
    ),
    Family(
        name="steps",
        takes="numbers",
        text="a list of the differences between each number and the one {k} places before it",
        solution="return [b - a for a, b in zip(numbers, numbers[{k}:])]",
        answer=lambda x, k, c: [x[i] - x[i - k] for i in range(k, len(x))],
        numbers=(1, 2, 3),
    ),
    Family(
        name="every",
        takes="text",
        text="every {k}th character of the text as a text, beginning with the first",
        solution="return text[::{k}]",
        answer=lambda x, k, c: "".join(letter for i, letter in enumerate(x) if i % k == 0),
        numbers=(2, 3, 4, 5, 6),
    ),
    Family(
        name="long_words",
        takes="text",
        text="how many words of the text have more than {k} letters",
        solution="return sum(len(word) > {k} for word in text.split())",
        answer=lambda x, k, c: len([w for w in x.split() if len(w) > k]),
        numbers=(4, 5, 6, 7, 8),
    ),
    Family(
        name="without",
        takes="text",
        text="the text without the letter {c}",
        solution='return text.replace("{c}", "")',
        answer=lambda x, k, c: "".join(letter for letter in x if letter != c),
        letters=LETTERS,
    ),
    Family(
        name="containing",
        takes="text",
        text="a list of the words of the text that contain the letter {c}, in alphabetical order",
        solution='return sorted(word for word in text.split() if "{c}" in word)',
        answer=lambda x, k, c: sorted(w for w in x.split() if c in w),
        letters=LETTERS,
    ),
    Family(
        name="places",
        takes="text",
        text="a list of the positions, counted from 0, at which the letter {c} stands in the text",
        solution='return [i for i, letter in enumerate(text) if letter == "{c}"]',
        answer=lambda x, k, c: [i for i in range(len(x)) if x[i] == c],
        letters=LETTERS,
    ),
    Family(
        name="repeated",
        takes="text",
        text="a text in which each letter {c} stands {k} times, and all else stays as it is",
        solution='return text.replace("{c}", "{c}" * {k})',
        answer=lambda x, k, c: "".join(letter * (k if letter == c else 1) for letter in x),
        numbers=(2, 3, 4),
        letters=LETTERS,
    ),
)


def problems() -> list[tuple[Family, int, str]]:
    return [(f, k, c) for f in FAMILIES for k, c in product(f.numbers, f.letters)]


def row(family: Family, k: int, c: str, tests: int) -> dict[str, Any]:
    """The problem as data: `tests` in the form {"fn_name", "inputs", "outputs"}; the prompt shows the first."""
    rng = random.Random(f"{family.name} {k} {c}")
    given = [telling(rng, family, k, c) for _ in range(tests)]
    wanted = [family.answer(x, k, c) for x in given]
    what = family.text.format(k=k, c=c)
    prompt = (
        f"Write a Python function {family.name}({family.takes}) that returns {what}. For example, "
        f"{family.name}({given[0]!r}) returns {wanted[0]!r}. Answer with the function in a ```python block."
    )
    solution = f"def {family.name}({family.takes}):\n    {family.solution.format(k=k, c=c)}"
    inputs = [[x] for x in given]
    return {
        "prompt": prompt,
        "answer": solution,
        "tests": {"fn_name": family.name, "inputs": inputs, "outputs": wanted},
        "data_source": "code",
    }


def telling(rng: random.Random, family: Family, k: int, c: str) -> Any:
    """An input that exposes trivial solutions: the answer is neither empty, nor 0, nor the input itself."""
    while True:
        x = numbers(rng) if family.takes == "numbers" else text(rng)
        if (answer := family.answer(x, k, c)) and answer != x:
            return x


def numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(5, 9))]


def text(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(3, 6)))
