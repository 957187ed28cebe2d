"""Rows -> `Example`s: the sequences that SFT, reward models and preference losses learn from.

    SFT     messages | prompt + response | text                     one sequence
    pairs   prompt | messages, + chosen + rejected                  two that share a prompt
            chosen + rejected, each a whole conversation or text    two that share their beginning
    labels  prompt + completion + label                             one, and whether it is good

These are also the forms of TRL's page on dataset formats: prompts and answers are text, or lists of messages.

All rows are made into tokens once, before the first step, so that a broken one is told with its file and row now.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, overload

from birl.config import schema
from birl.data.rows import Rows, pick
from birl.data.sequences import Encoded, Encoder, Tokens, Unfit, only_what_differs
from birl.data.tasks import ANSWERS, PROMPTS, column_of, existing, kind, messages_of, read_sources, squeezed, text_of
from birl.errors import BirlError
from birl.text.chat import Chat
from birl.types import Message

RESPONSES = ("response", "completion", "answer", "output", *ANSWERS)
TRUE, FALSE = (True, 1, "true", "yes", "1"), (False, 0, "false", "no", "0", -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What one row becomes. `id`: of no other row of the run, neither in training nor in validation. `sequences`: one,
    or the chosen and the rejected one. `margin`: by how much the chosen one is better; `good`: whether a single answer
    is. `key`: what makes two rows ask the same."""

    id: str
    key: str
    sequences: tuple[Tokens, ...]
    margin: float = 0.0
    good: bool = True


class Examples(Sequence[Example]):
    """All examples of one source.

    Example: load_texts(schema.Texts(train=["train.jsonl"]), "train", chat, 2048)[0][0].sequences[0].ids
    """

    def __init__(self, name: str, items: Sequence[Example]) -> None:
        self.name, self.items = name, items

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> "Examples": ...
    def __getitem__(self, index: int | slice) -> "Example | Examples":
        return Examples(self.name, self.items[index]) if isinstance(index, slice) else self.items[index]

    def select(self, positions: Iterable[int]) -> "Examples":
        return Examples(self.name, [self.items[p] for p in positions])


Which = Literal["train", "validation"]

PICTURES = "pictures are not read. Remove these rows, or the column."
#: columns of TRL's formats that say what the model sees or learns, and why they are refused
UNREAD = {
    "images": PICTURES,
    "image": PICTURES,
    "tools": "no tools are written into these prompts. Write them into the system message, or remove the column.",
    "chat_template_kwargs": "templates get no options of a row. Remove the column.",
    "completions": "answers that are judged step by step are not learned. Use one answer a row, as `response`.",
}


def load_texts(config: schema.Texts, which: Which, chat: Chat, limit: int, given: Any = None) -> list[Examples]:
    """The sources of data.train or data.validation for SFT; sequences of at most `limit` tokens. Raises `BirlError`."""

    def reader(rows: Rows) -> Texts:
        prompt = column_of(rows, config.prompt_column, PROMPTS, "data.prompt_column")
        response = column_of(rows, config.answer_column, RESPONSES, "data.answer_column")
        if prompt is None and not rows.has("text"):
            raise BirlError(
                f"{rows.name} has no column {', '.join(PROMPTS)} and no `text`. {existing(rows)} Set "
                "data.prompt_column, and data.answer_column, to two of them."
            )
        return Texts(Encoder(chat, config, limit), config.train_on, prompt, response)

    return _load(config, which, limit, given, reader)


def load_pairs(config: schema.Pairs, which: Which, chat: Chat, limit: int, given: Any = None) -> list[Examples]:
    """The sources of data.train or data.validation for reward models and preference losses."""
    first = config

    def reader(rows: Rows) -> Pairs:
        config = _as_labelled(rows, first)
        label = getattr(config, "label_column", "")
        wanted = {"data.chosen_column": config.chosen_column, "data.label_column": label}
        wanted["data.rejected_column"] = "" if label else config.rejected_column
        wanted["data.margin_column"] = getattr(config, "margin_column", "")
        for key, name in wanted.items():
            column_of(rows, name, (), key)
        prompt = column_of(rows, config.prompt_column, PROMPTS, "data.prompt_column")
        return Pairs(config, Encoder(chat, config, limit), prompt)

    return _load(config, which, limit, given, reader)


def _as_labelled(rows: Rows, config: schema.Pairs) -> schema.Pairs:
    """Rows with one answer and a `label`, as TRL has them for KTO, need no key."""
    unset = schema.LabelledPairs()
    if not isinstance(config, schema.LabelledPairs) or config.label_column or not rows.has("label"):
        return config
    if rows.has(config.chosen_column) or config.chosen_column != unset.chosen_column:
        return config
    answer = next((name for name in RESPONSES if rows.has(name)), None)
    return replace(config, label_column="label", chosen_column=answer) if answer else config


def _load(config: Any, which: Which, limit: int, given: Any, reader: Callable[[Rows], Any]) -> list[Examples]:
    found, side = [], "validation/" if which == "validation" else ""
    for rows, prefix in read_sources(config, which, given, partial(_is_text, config)):
        build, kept, long = reader(rows), [], 0
        for i in range(len(rows)):
            row, where = rows[i], rows.where(i)
            for name, why in UNREAD.items():
                if row.get(name):
                    raise BirlError(f"{where}: `{name}` would be left out: {why}")
            try:
                example = build.example(side + prefix + rows.id(i), row, where)
                long += max(map(len, example.sequences)) > limit
                kept.append(_cut(example, limit))
            except Unfit:
                long += 1
        if long:
            done = "cut" if config.too_long == "truncate" else "dropped"
            print(f"{rows.name}: {done} {long} of {len(rows)} rows, they have more than {limit} tokens.")
        if not kept:
            way = "" if config.too_long == "truncate" else ", or set data.too_long=truncate"
            raise BirlError(
                f"{rows.name}: every row has more than {limit} tokens, and nothing to learn within them. Raise "
                f"model.max_length as far as the model allows{way}."
            )
        found.append(Examples(rows.name, kept))
    return found


def _is_text(config: Any, name: str) -> bool:
    """All columns but those of labels and margins."""
    own = (getattr(config, "label_column", ""), getattr(config, "margin_column", ""))
    return name not in (*own, "label", "margin")


def _cut(example: Example, limit: int) -> Example:
    """Raises `Unfit` where both sides become the same."""
    sides = tuple(Tokens(ids=s.ids[:limit], mask=s.mask[:limit]) for s in example.sequences)
    if len(sides) == 2 and sides[0].ids == sides[1].ids:
        raise Unfit
    return replace(example, sequences=sides)


@dataclass(frozen=True, slots=True)
class Texts:
    """One row of SFT -> Example."""

    encoder: Encoder
    roles: Sequence[str]
    prompt: str | None
    response: str | None

    def example(self, name: str, row: dict[str, Any], where: str) -> Example:
        value = pick(row, self.prompt) if self.prompt else None
        answer = pick(row, self.response) if self.response else None
        if value is None and self.prompt and row.get("text") is None:
            raise BirlError(f"{where}: has no `{self.prompt}`, which other rows have. One form of rows a file.")
        if value is None:
            text = text_of(row.get("text"), where, "text")
            found, key = self.encoder.text(text), squeezed(text)
        elif isinstance(value, str) or self._is_prompt(value, answer):
            read = text_of if isinstance(value, str) else messages_of
            prompt = read(value, where, str(self.prompt))
            if self.response is None:
                raise BirlError(
                    f"{where}: `{self.prompt}` is there, but nothing to answer it. Set data.answer_column, or put the "
                    "answer into `messages`."
                )
            if isinstance(answer, list):
                found = self._continued(prompt, messages_of(answer, where, self.response, whole=True), where)
            else:
                found = self.encoder.answered(prompt, text_of(answer, where, self.response), self.roles)
            key = _key(prompt)
        else:
            talk = self.encoder.led(messages_of(value, where, str(self.prompt), whole=True))
            found, key = self.encoder.spoken(talk, self.roles, where), _key(talk[:-1])
        return Example(id=name, key=key, sequences=(self.encoder.tokens(found, where, self.roles),))

    def _continued(self, prompt: str | tuple[Message, ...], talk: tuple[Message, ...], where: str) -> Encoded:
        """A prompt, and the messages that answer it: of those, what data.train_on names is learned."""
        asked = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        asked = self.encoder.led(asked)
        ids, mask = self.encoder.spoken((*asked, *talk), self.roles, where)
        if "all" in self.roles:
            return ids, mask
        before = sum(m.role in self.roles for m in asked)  # stretches that are the prompt's own
        starts = [i for i, m in enumerate(mask) if m and (i == 0 or not mask[i - 1])]
        first = starts[before] if before < len(starts) else len(mask)
        return ids, tuple(m and i >= first for i, m in enumerate(mask))

    def _is_prompt(self, value: Any, answer: Any) -> bool:
        """Messages that end with something to answer, and an answer in a column of its own."""
        last = value[-1] if isinstance(value, list) and value else None
        return answer is not None and not (isinstance(last, dict) and last.get("role") == "assistant")


@dataclass(frozen=True, slots=True)
class Pairs:
    """One row with a chosen and a rejected answer (or one answer and a label) -> Example."""

    config: schema.Pairs
    encoder: Encoder
    prompt: str | None

    def example(self, name: str, row: dict[str, Any], where: str) -> Example:
        config = self.config
        label = config.label_column if isinstance(config, schema.LabelledPairs) else ""
        columns = [config.chosen_column] if label else [config.chosen_column, config.rejected_column]
        prompt, answers = self._prompt(row, where), [pick(row, c) for c in columns]
        if prompt is None and len(answers) == 2 and all(isinstance(a, str) for a in answers):
            if not all(map(self.encoder.fits, answers)):
                raise Unfit
            prompt, answers = _same_beginning(*answers)
        sides = [self._side(prompt, a, where, c) for a, c in zip(answers, columns, strict=True)]
        if len(sides) == 2:
            if sides[0][0] == sides[1][0]:
                if len(sides[0][0]) > self.encoder.limit:
                    raise Unfit
                raise BirlError(f"{where}: `{columns[0]}` and `{columns[1]}` are the same. Remove the row.")
            sides = only_what_differs(sides)
        sequences = tuple(self.encoder.tokens(side, where, ["assistant"]) for side in sides)
        return Example(
            id=name,
            key=_key(prompt) if prompt else self.encoder.chat.decode(sides[0][0][: sides[0][1].index(True)]),
            sequences=sequences,
            margin=self._margin(row, where),
            good=_truth(pick(row, label), where, label) if label else True,
        )

    def _prompt(self, row: dict[str, Any], where: str) -> str | tuple[Message, ...] | None:
        value = pick(row, self.prompt) if self.prompt else None
        if value is None:
            return None
        read = text_of if isinstance(value, str) else messages_of
        return read(value, where, str(self.prompt))

    def _side(self, prompt: str | tuple[Message, ...] | None, value: Any, where: str, name: str) -> Encoded:
        if isinstance(value, str):
            if prompt is None:
                raise BirlError(
                    f"{where}: `{name}` is an answer, but there is nothing that it answers: add a column `prompt` or "
                    "`messages`, or give whole conversations."
                )
            return self.encoder.answered(prompt, text_of(value, where, name), ["assistant"])
        talk = messages_of(value, where, name, whole=True)
        if talk[-1].role != "assistant":
            raise BirlError(
                f"{where}: `{name}` ends with a message of {talk[-1].role}; the answer to judge is missing."
            )
        if prompt is not None:
            talk = _behind((Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt, talk)
        return self.encoder.spoken(self.encoder.led(talk), ["assistant"], where)

    def _margin(self, row: dict[str, Any], where: str) -> float:
        name = self.config.margin_column if isinstance(self.config, schema.RankedPairs) else ""
        if not name:
            return 0.0
        value = pick(row, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise BirlError(f"{where}: `{name}` is {kind(value)}, it needs to be a number.")
        return float(value)


def _same_beginning(chosen: str, rejected: str) -> tuple[str | None, list[Any]]:
    """Two texts without a prompt share it: their common beginning, up to a space (TRL's extract_prompt)."""
    both = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (a, b) in both if a != b), min(len(chosen), len(rejected)))
    same -= same > 0 and chosen[same - 1] == " "
    if not chosen[:same].strip() or not chosen[same:].strip() or not rejected[same:].strip():
        return None, [chosen, rejected]
    return chosen[:same], [chosen[same:], rejected[same:]]


def _behind(prompt: tuple[Message, ...], talk: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages of an answer behind their prompt; where they repeat its question, the longer beginning of the two."""
    asked = [i for i, m in enumerate(talk) if _key((m,)) == _key(prompt[-1:])]
    if talk[0].role == "assistant" or not asked:
        return (*prompt, *talk)
    return talk if asked[-1] >= len(prompt) - 1 else (*prompt, *talk[asked[-1] + 1 :])


def _key(prompt: str | Sequence[Message]) -> str:
    if isinstance(prompt, str):
        return squeezed(prompt)
    return "\n".join(squeezed(m.content) for m in prompt)


def _truth(value: Any, where: str, name: str) -> bool:
    plain = value.strip().lower() if isinstance(value, str) else value
    if plain is not None and plain in TRUE:
        return True
    if plain is not None and plain in FALSE:
        return False
    raise BirlError(f"{where}: `{name}` is {value!r}, it needs to be true or false.")
