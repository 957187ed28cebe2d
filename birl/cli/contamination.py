"""`birl rl --contamination`: questions of data.validation that are in data.train as well, as a whole or in parts.

Parts are runs of eight words, as in the checks of GPT-3 (arXiv:2005.14165, appendix C) and of Tulu 3 (arXiv:2411.15124,
section 3.2). A run in many training prompts is boilerplate, such as a system prompt or "How many ... are there?", and
does not count.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unicodedata import normalize

from birl.config import schema
from birl.data.tasks import Tasks, load_tasks, prompt_text
from birl.errors import BirlError
from birl.types import Task

SHOWN = 20  # rows that are printed
RUN = 8  # words (an n-gram of this length)
SHARE = 0.5  # share of a question's own words from which on it counts as copied
COMMON = 10  # training prompts, or one in a hundred, beyond which a run is boilerplate

#: scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana and ideographs; each letter is a word
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[-+*/=<>^%]")
#: signs with two forms, and invisible characters
SAME = str.maketrans("\u2212\u00d7\u00f7", "-*/", "\u00ad\u200b\u200c\u200d\u2060\ufeff")

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A validation row, the training row that has most of it, and the share of it: 1 if both are the same."""

    where: str
    source: str
    share: float

    def __str__(self) -> str:
        return f"{self.where}: {'the same as' if self.share == 1 else f'{self.share:.0%} of it in'} {self.source}"


@dataclass(slots=True)
class Seen:
    """Number of training prompts that have a run of words, and the first of them."""

    prompts: int = 0
    rows: list[str] = field(default_factory=list)


def run(config: schema.RL) -> int:
    """Print the result. Returns 0 if no validation row is in the training data, else 1. Raises `BirlError`."""
    for key in ("train", "validation"):
        if not getattr(config.data, key):
            raise BirlError(f"--contamination compares two sets of rows: name the other, as in data.{key}=my.jsonl.")
    train, validation = (load_tasks(config.data, which, chat=True) for which in ("train", "validation"))
    result = copies(train, validation)
    same = sum(copy.share == 1 for copy in result)
    print(
        f"{len(result)} of {sum(map(len, validation))} validation rows are in the training data: {same} as they are, "
        f"{len(result) - same} in part (at least half of their own words, in runs of {RUN})."
    )
    for copy in result[:SHOWN]:
        print(f"  {copy}")
    if len(result) > SHOWN:
        print(f"  and {len(result) - SHOWN} more")
    return 1 if result else 0


def copies(train: Sequence[Tasks], validation: Sequence[Tasks]) -> list[Copy]:
    """Copies in the order of the validation rows. Time and memory grow with the words of both, not their product."""
    asked = [(where, words(task), str(task.answer)) for where, task in _rows(validation)]
    seen = {run: Seen() for _, text, _ in asked for run in runs(text)}
    wanted = {(text, answer) for _, text, answer in asked}
    same: dict[tuple[Words, str], str] = {}
    total = 0
    for where, task in _rows(train):
        text, total = words(task), total + 1
        if (text, str(task.answer)) in wanted:
            same.setdefault((text, str(task.answer)), where)
        for run in set(runs(text)):
            if run in seen:
                seen[run].prompts += 1
                if len(seen[run].rows) < COMMON:
                    seen[run].rows.append(where)
    most = max(COMMON, total // 100)
    result = []
    for where, text, answer in asked:
        if (text, answer) in same:
            result.append(Copy(where=where, source=same[text, answer], share=1.0))
        elif (part := _part(text, seen, most)) is not None:
            result.append(Copy(where=where, source=part[0], share=part[1]))
    return result


def _part(text: Words, seen: dict[Words, Seen], most: int) -> tuple[str, float] | None:
    """The training row that has most runs of a text, and the share of its own words in runs that training has."""
    own, copied, rows = set(range(len(text))), set[int](), list[str]()
    for i, run in enumerate(runs(text)):
        if seen[run].prompts > most:
            own.difference_update(range(i, i + RUN))
        elif seen[run].prompts:
            copied.update(range(i, i + RUN))
            rows += seen[run].rows
    share = len(copied & own) / len(own) if own else 0.0
    return (max(dict.fromkeys(rows), key=rows.count), min(share, 0.999)) if share >= SHARE else None


def words(task: Task) -> Words:
    """Words of a task, independent of case and Unicode form (NFKC); digits and signs that change a question count."""
    return tuple(WORD.findall(normalize("NFKC", prompt_text(task).translate(SAME)).casefold()))


def runs(text: Words) -> Iterator[Words]:
    return (text[i : i + RUN] for i in range(len(text) - RUN + 1))


def _rows(several: Sequence[Tasks]) -> Iterator[tuple[str, Task]]:
    return ((tasks.rows.where(tasks.indices[i]), tasks[i]) for tasks in several for i in range(len(tasks)))
