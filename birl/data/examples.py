"""Rows -> `Example`s: the sequences that SFT, reward models and preference losses learn from.

    SFT     messages | prompt + response | text                     one sequence
    pairs   prompt | messages, + chosen + rejected                  two that share a prompt
            chosen + rejected, each a whole conversation or text    two that share their beginning
    labels  prompt + completion + label                             one, and whether it is good

These are the formats of TRL's page on dataset formats: prompts and answers are text, or lists of messages.

All rows are tokenized once, before the first step, so that a broken one is reported with its file and row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from birl.config import schema
from birl.data.forms import PairForm, TextForm, is_text, pair_form, text_form
from birl.data.messages import Shown
from birl.data.sequences import Encoded, Encoder, Tokens, Unfit, only_what_differs
from birl.data.tasks import read_sources, squeezed
from birl.errors import BirlError, placed
from birl.text.parts import Finder
from birl.types import Conversation, Message

if TYPE_CHECKING:
    from birl.text.chat import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A tokenized row. `id`: unique among training and validation rows of the run. `sequences`: one, or the chosen and
    the rejected one. `margin`: by how much the chosen one is better; `good`: label of a single answer. `key`: equal for
    rows with the same prompt."""

    id: str
    key: str
    sequences: tuple[Tokens, ...]
    margin: float = 0.0
    good: bool = True

    @property
    def room(self) -> int:
        """Largest number of its tokens in a micro-batch: its prompt once, both answers, a token for the score of
        each."""
        sides = self.sequences
        together = sum(map(len, sides)) + len(sides)
        if len(sides) == 1:
            return together
        start = min(s.mask.index(1) for s in sides)
        shared = next((i for i, (a, b) in enumerate(zip(*(s.ids for s in sides), strict=False)) if a != b), start)
        return together - min(shared, start)


class Examples(Sequence[Example]):
    """All examples of one source.

    Example: load_examples(schema.Texts(train=["train.jsonl"]), "train", chat, 2048)[0][0].sequences[0].ids
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


def load_examples(config: Any, which: Which, chat: "Chat", limit: int, given: Any = None) -> list[Examples]:
    """Load the sources of data.train or data.validation, for SFT (`schema.Texts`), or for reward models and preference
    losses; sequences have at most `limit` tokens. Raises `BirlError`."""
    encoder = Encoder(chat, config, limit)
    result, side = [], "validation/" if which == "validation" else ""
    for rows, prefix in read_sources(config, which, given, partial(is_text, config)):
        texts = isinstance(config, schema.Texts)
        build = Texts(encoder, text_form(rows, config)) if texts else Pairs(encoder, pair_form(rows, config))
        kept, long = [], 0
        for i in range(len(rows)):
            try:
                with placed(rows.where(i)):
                    example = build.example(side + prefix + rows.id(i), rows[i], rows.where(i), rows.folder(i))
                long += max(map(len, example.sequences)) > limit
                kept.append(_cut(example, limit))
            except Unfit:
                long += 1
        if long:
            gone = len(rows) - len(kept)
            done = f"dropped {gone}" if gone == long else f"cut {long - gone}" + f" and dropped {gone}" * (gone > 0)
            print(f"{rows.name}: {done} of {len(rows)} rows, those of more than {limit} tokens.")
        if not kept:
            way = "" if config.too_long == "truncate" else ", or set data.too_long=truncate"
            raise BirlError(
                f"{rows.name}: every row has more than {limit} tokens, and none to train among the first. Raise "
                f"model.max_length as far as the model allows{way}."
            )
        result.append(Examples(rows.name, kept))
    return result


def _cut(example: Example, limit: int) -> Example:
    """Truncate the sequences to `limit` tokens. Raises `Unfit` if both sides become equal."""
    sides = tuple(Tokens(ids=s.ids[:limit], mask=s.mask[:limit]) for s in example.sequences)
    if len(sides) == 2 and sides[0].ids == sides[1].ids:
        raise Unfit
    return replace(example, sequences=sides)


@dataclass(frozen=True, slots=True)
class Texts:
    """Builds an Example from a row of SFT."""

    encoder: Encoder
    form: TextForm

    def example(self, name: str, row: dict[str, Any], where: str, folder: Path) -> Example:
        prompt, answer = self.form.read(row, where, shown(self.encoder, folder, row, where))
        roles = self.form.roles
        if isinstance(answer, str):
            key = _key(answer if prompt is None else prompt)
            result = self.encoder.text(answer) if prompt is None else self.encoder.answered(prompt, answer, roles)
        elif prompt is None:
            key, result = _key(answer[:-1]), self.encoder.spoken(self.encoder.led(answer), roles, where)
        else:
            key, result = _key(prompt), self._continued(prompt, answer, where)
        return Example(id=name, key=key, sequences=(self.encoder.tokens(result, where, roles),))

    def _continued(self, prompt: Conversation, talk: tuple[Message, ...], where: str) -> Encoded:
        """Encode a prompt and the messages that answer it; of those, the roles of data.train_on are trained."""
        roles = self.form.roles
        asked = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        asked = self.encoder.led(asked)
        ids, mask = self.encoder.spoken((*asked, *talk), roles, where)
        if "all" in roles:
            return ids, mask
        own = any(m.role in roles for m in asked)  # of its tokens, as neighbours of such roles are one stretch
        before = sum(self.encoder.spoken(asked, roles, where)[1]) if own else 0
        return ids, tuple(m and n > before for m, n in zip(mask, accumulate(mask), strict=True))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Builds an Example from a row with a chosen and a rejected answer (or one answer and a label)."""

    encoder: Encoder
    form: PairForm

    def example(self, name: str, row: dict[str, Any], where: str, folder: Path) -> Example:
        columns = self.form.columns
        pair = self.form.read(row, where, shown(self.encoder, folder, row, where))
        sides = [self._side(pair.prompt, answer, where) for answer in pair.answers]
        if len(sides) == 2:
            if sides[0][0] == sides[1][0]:
                if len(sides[0][0]) > self.encoder.limit:
                    raise Unfit
                raise BirlError(f"{where}: `{columns[0]}` and `{columns[1]}` are the same. Remove the row.")
            sides = only_what_differs(sides)
        sequences = tuple(self.encoder.tokens(side, where, ["assistant"]) for side in sides)
        prompt = pair.prompt
        return Example(
            id=name,
            key=_key(prompt) if prompt else self.encoder.chat.decode(sides[0][0][: sides[0][1].index(True)]),
            sequences=sequences,
            margin=pair.margin,
            good=pair.good,
        )

    def _side(self, prompt: Conversation | None, answer: Conversation, where: str) -> Encoded:
        if isinstance(answer, str):
            assert prompt is not None  # the form has refused it
            return self.encoder.answered(prompt, answer, ["assistant"])
        if prompt is not None:
            answer = _behind((Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt, answer)
        return self.encoder.spoken(self.encoder.led(answer), ["assistant"], where)


def shown(encoder: Encoder, folder: Path, row: dict[str, Any], where: str) -> Shown:
    """The row's pictures."""
    pictures = encoder.chat.pictures
    return Shown.of(row, Finder(folder=folder, hosts=pictures.bounds.hosts if pictures else ()), where)


def _behind(prompt: tuple[Message, ...], talk: tuple[Message, ...]) -> tuple[Message, ...]:
    """Append the messages of an answer to their prompt; if they repeat its question, the longer history is kept."""
    asked = [i for i, m in enumerate(talk) if _key((m,)) == _key(prompt[-1:])]
    if talk[0].role == "assistant" or not asked:
        return (*prompt, *talk)
    return talk if asked[-1] >= len(prompt) - 1 else (*prompt, *talk[asked[-1] + 1 :])


def _key(prompt: Conversation) -> str:
    if isinstance(prompt, str):
        return squeezed(prompt)
    return "\n".join(squeezed(m.content) + m.digests for m in prompt)
