"""Rows -> `Task`s: selects the columns of prompt and answer; all others go to the reward functions.

messages | prompt | question                                          text, or a list of {role, content}
ground_truth | answer | solution | extra_info.answer | reward_model.ground_truth
data_source | extra_info.data_source                                  groups validation results
"""

import difflib
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, overload

from birl.config.schema import Data, Files
from birl.data.files import no_column
from birl.data.messages import Shown, check_input, messages_of, plain_text
from birl.data.rows import Rows, pick
from birl.data.rows import given as handed_over
from birl.data.sources import read
from birl.errors import BirlError, placed
from birl.text.parts import Finder
from birl.types import Message, Task

PROMPTS = ("messages", "prompt", "question")
ANSWERS = ("ground_truth", "answer", "solution", "extra_info.answer", "reward_model.ground_truth")
RESPONSES = ("response", "completion", "answer", "output", *ANSWERS)
SOURCES = ("data_source", "extra_info.data_source")
Which = Literal["train", "validation"]
VALIDATION_SPLITS = ("validation", "test", "train")

FINAL = re.compile(r"####[ \t]*([^\n#]*\S)\s*$")  # GSM8K: "6 * 12 = 72\n#### 72"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Converts the rows of one source to Tasks. `answer` None: there is no answer column. `raw`: text stays text.
    `alone`: no environment reads the rows. `sources`: columns of `Task.source`. `hosts`, `offline`: of `Finder`."""

    prompt: str
    answer: str | None
    raw: bool
    chat: bool
    system: str
    alone: bool = False
    sources: Sequence[str] = SOURCES
    hosts: tuple[str, ...] = ()
    offline: bool = False

    def task(self, rows: Rows, index: int, prefix: str = "") -> Task:
        row, where = rows[index], rows.where(index)
        finder = Finder(folder=rows.folder(index), hosts=self.hosts, offline=self.offline)
        check_input(row, self.prompt, where, self.alone)
        return Task(
            id=prefix + rows.id(index),
            prompt=self._prompt(pick(row, self.prompt), where, Shown.of(row, finder, where)),
            answer=self._answer(pick(row, self.answer), where) if self.answer else None,
            columns={name: value for name, value in row.items() if name != self.prompt},
            source=next((str(s) for path in self.sources if (s := pick(row, path))), rows.stem(index)),
            messages=self.prompt != "messages" and isinstance(pick(row, self.prompt), list),
        )

    def _prompt(self, value: Any, where: str, shown: Shown) -> tuple[Message, ...] | str:
        if isinstance(value, str):
            text = plain_text(value, where, self.prompt)
            if self.raw and shown.beside:
                raise BirlError(f"{where}: has pictures, which need messages instead of a raw text prompt.")
            if self.raw and self.system:
                why = "data.apply_chat_template=false" if self.chat else "the tokenizer has no chat template"
                raise BirlError(f"{where}: data.system_prompt is set, but {why}, and raw text has no system message.")
            if self.raw:
                return text
            messages = shown.placed((Message(role="user", content=text),), 0)
        elif value is None or value == [] or value != value:  # NaN: pandas' missing value
            raise BirlError(f"{where}: `{self.prompt}` is empty. Remove the row.")
        else:
            messages = messages_of(value, where, self.prompt, shown=shown)
            if not self.chat:
                raise BirlError(
                    f"{where}: `{self.prompt}` is a list of messages, but the tokenizer has no chat template for them. "
                    "Set model.chat_template=FILE, or give the prompts as text."
                )
        if self.system and messages[0].role != "system":
            messages = (Message(role="system", content=self.system), *messages)
        return messages

    def _answer(self, value: Any, where: str) -> str:
        text = answer_text(value)
        if not text:
            raise BirlError(
                f"{where}: `{self.answer}` is empty, but other rows are checked against it. "
                "Correct or remove the row, or set data.answer_column to another column."
            )
        if isinstance(value, float) and math.isinf(value):  # 1e400, too
            raise BirlError(f"{where}: `{self.answer}` is an infinite number. Write it as text, in quotes.")
        return text


class Tasks(Sequence[Task]):
    """The tasks of one source, created on access. `rows[i]` for i in `indices`.

    Example: load_tasks(Data(train=["train.jsonl"]), "train", chat=True)[0][0].answer == "7"
    """

    def __init__(self, rows: Rows, reader: Reader, indices: Sequence[int] | None = None, prefix: str = "") -> None:
        self.rows = rows
        self.reader = reader
        self.indices = range(len(rows)) if indices is None else indices
        self.prefix = prefix

    @property
    def name(self) -> str:
        return self.rows.name

    @property
    def ids(self) -> list[str]:
        return [self.prefix + self.rows.id(i) for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "Tasks": ...
    def __getitem__(self, index: int | slice) -> "Task | Tasks":
        if isinstance(index, slice):
            return Tasks(self.rows, self.reader, self.indices[index], self.prefix)
        return self.reader.task(self.rows, self.indices[index], self.prefix)

    def select(self, positions: Iterable[int]) -> "Tasks":
        return Tasks(self.rows, self.reader, [self.indices[p] for p in positions], self.prefix)


def load_tasks(
    config: Data, which: Which, *, chat: bool, given: Any = None, hosts: Sequence[str] = (), **of: Any
) -> list[Tasks]:
    """Return one `Tasks` for each source of data.train or data.validation; `given` rows, or rows by name, replace
    these. `chat`: the tokenizer has a chat template. `hosts`: of `Finder`; `of`: fields of `Reader`. Errors of a
    whole source raise `BirlError` at once, errors of a row when that row is accessed."""
    sources = read_sources(config, which, given, partial(_is_text, config))
    return [Tasks(s, reader_of(s, config, chat, tuple(hosts), **of), prefix=p) for s, p in sources]


def _is_text(config: Any, name: str, value: str) -> bool:
    """Whether a column of CSV stays text: prompts, and answers such as TRUE, which would be parsed as a boolean."""
    answer = name == config.answer_column or name in ANSWERS
    return value.lower() in ("true", "false") if answer else name == config.prompt_column or name in PROMPTS


def read_sources(
    config: Files, which: Which, given: Any = None, text: Callable[[str, str], bool] = no_column
) -> list[tuple[Rows, str]]:
    """Return the rows of each source of data.train or data.validation, and a prefix that makes their ids unique.
    `text`: see `read`."""
    if given is not None:
        limit = config.max_samples if which == "train" else config.max_validation_samples
        several = isinstance(given, dict) and not hasattr(given, "column_names")  # a DatasetDict has the test split
        named = given if several else {which: given}
        sources = [handed_over(rows, name, limit) for name, rows in named.items()]
    elif which == "train":
        sources = [
            read(p, subset=config.subset, splits=(config.split,), limit=config.max_samples, text=text)
            for p in config.train
        ]
    else:
        splits = (config.validation_data_split,) if config.validation_data_split else VALIDATION_SPLITS
        limit = config.max_validation_samples
        sources = [read(p, subset=config.subset, splits=splits, limit=limit, text=text) for p in config.validation]
    return list(zip(sources, _prefixes(sources), strict=True))


def split_validation(
    train: Sequence[Any], share: float, seed: int, key: Callable[[Any], str] | None = None
) -> tuple[list[Any], list[Any]]:
    """Hold out `share` of each source's rows. Rows with the same prompt (`key`) stay together, also across sources."""
    held: dict[str, bool] = {}
    kept, out = [], []
    for number, tasks in enumerate(train):
        rows: defaultdict[str, list[int]] = defaultdict(list)
        for i, task in enumerate(tasks):
            rows[(key or prompt_text)(task)].append(i)
        missing = round(share * len(tasks)) - sum(len(rows[p]) for p in rows if held.get(p))
        undecided = [p for p in rows if p not in held]
        random.Random(f"{seed}/{number}").shuffle(undecided)
        for prompt in undecided:
            held[prompt] = 0 < len(rows[prompt]) <= missing
            missing -= len(rows[prompt]) if held[prompt] else 0
        sides: dict[bool, list[int]] = {True: [], False: []}
        for prompt, where in rows.items():
            sides[held[prompt]] += where
        if not sides[False]:
            raise BirlError(
                f"data.validation_split={share:g} leaves no training row of the {len(tasks)} in {tasks.name}."
            )
        kept.append(tasks.select(sorted(sides[False])))
        if sides[True]:
            out.append(tasks.select(sorted(sides[True])))
    if not out:
        total = sum(map(len, train))
        raise BirlError(
            f"data.validation_split={share:g} of {total} rows is less than one row. Raise it, or name data.validation."
        )
    return kept, out


def filter_by_length(tasks: Tasks, length_of: Callable[[Task], int], limit: int) -> tuple[Tasks, int]:
    """Return the tasks with `length_of(task) <= limit`, and the number of dropped ones."""
    fitting = []
    for i, task in enumerate(tasks):
        with placed(tasks.rows.where(tasks.indices[i])):
            fitting += [i] if length_of(task) <= limit else []
    return tasks.select(fitting), len(tasks) - len(fitting)


def overlap(train: Iterable[Task], validation: Iterable[Task]) -> int:
    """Number of validation tasks that are also training tasks: the same prompt with the same answer. (If an environment
    hides the right answer, many tasks share a prompt.)"""
    asked = [(prompt_text(task), task.answer) for task in validation]
    wanted = set(asked)
    shared = {both for task in train if (both := (prompt_text(task), task.answer)) in wanted}
    return sum(both in shared for both in asked)


def prompt_text(task: Task) -> str:
    """Key by which prompts are compared: their text, ignoring white space."""
    if isinstance(task.prompt, str):
        return squeezed(task.prompt)
    return "\n".join(f"{m.role}: {squeezed(m.content)}{m.digests}" for m in task.prompt)


def squeezed(text: str) -> str:
    """Normalise white space; a text of megabytes is unchanged, as its words would take gigabytes."""
    return " ".join(text.split()) if len(text) < 2**20 else text


def answer_text(value: Any) -> str:
    """An answer as text: numbers without a useless .0, GSM8K's `... #### 1,234` as 1234, lists and objects as JSON. NaN
    is pandas' missing value."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False) if value else ""
    text = str(value).strip()
    final = FINAL.search(text)
    return THOUSANDS.sub("", final[1]) if final else text


def check_answers(rows: Rows, answer: str | None, compared: bool) -> None:
    """Raises `BirlError` if a reward compares with right answers, but there is no `answer` column."""
    if compared and answer is None:
        raise BirlError(
            f"{rows.name} has no column {', '.join(ANSWERS[:3])}, which reward.functions=math compares with. "
            f"{existing(rows)} Set data.answer_column to one of them, or another reward: "
            "reward.functions=my_file.py:my_function."
        )


def teacher_named(task: Task, column: str, names: Collection[str], where: str = "") -> str:
    """Return the teacher that a row's column names. Raises `BirlError`."""
    name: Any = task.columns.get(column)
    if name not in names:
        what = f"has no column {column!r} that names its teacher" if name is None else f"{column} is {name!r}"
        raise BirlError(
            f"algorithm.teachers: {where or task.place}: {what}; there are {', '.join(names)}. Name one of them, or "
            "set algorithm.teacher_column."
        )
    return name


def reader_of(rows: Rows, config: Data, chat: bool, hosts: tuple[str, ...] = (), **of: Any) -> Reader:
    raw = not (chat and config.apply_chat_template)
    prompt = column_of(rows, config.prompt_column, PROMPTS, "data.prompt_column")
    if prompt is None:
        raise BirlError(
            f"{rows.name} has no column {', '.join(PROMPTS)}. {existing(rows)}"
            + (" Set data.prompt_column to one of them." + for_another(rows, "rl")) * bool(rows.columns)
        )
    answer = column_of(rows, config.answer_column, ANSWERS, "data.answer_column")
    own = {"prompt": prompt, "answer": answer, "raw": raw, "chat": chat, "system": config.system_prompt}
    return Reader(**own, hosts=hosts, **of)


def column_of(rows: Rows, chosen: str, candidates: Sequence[str], key: str) -> str | None:
    if not chosen:
        return next((path for path in candidates if rows.has(path)), None)
    if rows.has(chosen):
        return chosen
    close = difflib.get_close_matches(chosen, rows.columns, n=1)
    hint = f" Did you mean {key}={close[0]}?" if close else ""
    raise BirlError(f"{key}={chosen}: {rows.name} has no such column. {existing(rows)}{hint}")


def for_another(rows: Rows, *commands: str) -> str:
    """Hint for an error message: the command that the rows are for; empty if it is one of `commands` or unknown."""
    names = set(rows.columns)
    answered = any(rows.has(name) for name in RESPONSES)
    if "completions" in names:
        return " Labels of single steps are not supported."
    if {"chosen", "rejected"} <= names:
        form, result = "Pairs of answers", ("dpo", "rm")
    elif "label" in names and answered:
        form, result = "Answers with a label", ("dpo preference.loss=kto",)
    elif "text" in names or answered:
        form, result = "Texts and answers to learn", ("sft",)
    elif "messages" in names:
        form, result = "Conversations", ("sft", "rl")
    elif any(rows.has(name) for name in PROMPTS):
        form, result = "Prompts alone", ("rl",)
    else:
        return ""
    if set(commands) & set(result):
        return ""
    return f" {form} are for {' and '.join(f'`birl {command}`' for command in result)}."


def existing(rows: Rows) -> str:
    return f"It has the columns {', '.join(rows.columns)}." if rows.columns else "Its rows have no columns at all."


def _prefixes(sources: Sequence[Rows]) -> list[str]:
    """Prefixes of row ids: the folder of sources with files of the same name, or else the number of each source."""
    labels = [[part.label for part in source.parts] for source in sources]
    often = Counter(label for own in labels for label in own)
    folders = [PurePath(source.name).parent.name for source in sources]
    prefixes = [
        f"{f}/" if f and any(often[label] > 1 for label in own) else "" for own, f in zip(labels, folders, strict=True)
    ]
    made = {prefix + label for own, prefix in zip(labels, prefixes, strict=True) for label in own}
    return prefixes if len(made) == often.total() else [f"{i}:" for i in range(len(sources))]
