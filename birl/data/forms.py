"""Parse rows of SFT, reward models and preference losses into prompts and answers, before tokenization.

The columns of a source decide the form of all its rows; an error in a row is reported with file and row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from birl.config import schema
from birl.data.messages import NO_TOOLS, ROLES, Shown, check_input, kind, messages_of, plain_text
from birl.data.rows import Rows, pick
from birl.data.tasks import PROMPTS, RESPONSES, column_of, existing, for_another
from birl.errors import BirlError, did_you_mean
from birl.types import Conversation, Message

TRUE, FALSE = (True, 1, "true", "yes", "1"), (False, 0, "false", "no", "0", -1)
#: columns of TRL's formats that would change model input or training, and the reason why they are refused
UNREAD = {
    "tools": NO_TOOLS,
    "chat_template_kwargs": "a row cannot set options of the chat template. Remove the column.",
    "completions": "labels of single steps are not supported. Use one answer a row, as `response`.",
}


def text_form(rows: Rows, config: schema.Texts) -> "TextForm":
    """Return the form of SFT rows. Raises `BirlError` if the columns do not fit."""
    if wrong := next((role for role in config.train_on if role not in (*ROLES, "all")), ""):
        hint = did_you_mean(wrong, ROLES)
        raise BirlError(f"data.train_on={wrong}: there is no such role; roles are {', '.join(ROLES)}, or all.{hint}")
    prompt = column_of(rows, config.prompt_column, PROMPTS, "data.prompt_column")
    response = column_of(rows, config.answer_column, RESPONSES, "data.answer_column")
    learned = config.answer_column or rows.has("text")
    other = for_another(rows, "sft", "rl")
    if other and not learned and (response is None or isinstance(pick(rows[0], "label"), bool)):
        key = response or "chosen"
        learn = f" To learn one answer of each row here: data.answer_column={key}." if rows.has(key) else ""
        raise BirlError(f"{rows.name}: {existing(rows)}{other}{learn}")
    if prompt is None and not rows.has("text"):
        raise BirlError(
            f"{rows.name} has no column {', '.join(PROMPTS)} and no `text`. {existing(rows)} Set "
            "data.prompt_column, and data.answer_column, to two of them."
        )
    return TextForm(config.train_on, prompt, response)


def pair_form(rows: Rows, config: schema.Pairs, preference: schema.Preference | None = None) -> "PairForm":
    """Return the form of preference rows. Raises `BirlError` if the columns are not those of pairs or labelled answers,
    or do not fit the `preference` loss."""
    config = _as_labelled(rows, config)
    label = getattr(config, "label_column", "")
    if label and preference and preference.loss != "kto":
        raise BirlError(
            f"{rows.name}: preference.loss={preference.loss} compares two answers, but the rows have one and a "
            f"`{label}`: set preference.loss=kto, or give rows with `chosen` and `rejected`."
        )
    wanted = {"data.chosen_column": config.chosen_column, "data.label_column": label}
    wanted["data.rejected_column"] = "" if label else config.rejected_column
    wanted["data.margin_column"] = getattr(config, "margin_column", "")
    for key, name in wanted.items():
        try:
            column_of(rows, name, (), key)
        except BirlError as error:
            raise BirlError(f"{error}{for_another(rows, 'dpo', 'rm')}") from error
    # beside a prompt, `messages` may be the whole conversation with the chosen answer, as in UltraFeedback
    return PairForm(config, column_of(rows, config.prompt_column, ("prompt", *PROMPTS), "data.prompt_column"))


def _as_labelled(rows: Rows, config: schema.Pairs) -> schema.Pairs:
    """Detect rows with one answer and a `label`, TRL's format for KTO, which need no key."""
    unset = schema.LabelledPairs()
    if not isinstance(config, schema.LabelledPairs) or config.label_column or not rows.has("label"):
        return config
    if rows.has(config.chosen_column) or config.chosen_column != unset.chosen_column:
        return config
    answer = next((name for name in RESPONSES if rows.has(name)), None)
    return replace(config, label_column="label", chosen_column=answer) if answer else config


def is_text(config: Any, name: str, value: str) -> bool:
    """Whether a column of CSV stays text: all but labels and margins."""
    own = (getattr(config, "label_column", ""), getattr(config, "margin_column", ""))
    return name not in (*own, "label", "margin")


def _check_read(row: dict[str, Any], where: str) -> None:
    for name, why in UNREAD.items():
        if row.get(name):
            raise BirlError(f"{where}: `{name}` would be ignored: {why}")


@dataclass(frozen=True, slots=True)
class TextForm:
    """Form of SFT rows. `roles`: roles whose messages are trained."""

    roles: Sequence[str]
    prompt: str | None
    response: str | None

    def read(
        self, row: dict[str, Any], where: str, shown: Shown | None = None
    ) -> tuple[Conversation | None, Conversation]:
        """Return a prompt and its answer, or None and a whole text or conversation. `shown`: the row's pictures. Raises
        `BirlError`."""
        _check_read(row, where)
        check_input(row, self.prompt, where)
        shown = shown or Shown()
        value = pick(row, self.prompt) if self.prompt else None
        answer = pick(row, self.response) if self.response else None
        if value is None and self.prompt and row.get("text") is None:
            raise BirlError(f"{where}: has no `{self.prompt}`, which other rows have. All rows need the same columns.")
        if value is None:
            unplaced(shown, where)
            return None, plain_text(row.get("text"), where, "text")
        if not isinstance(value, str) and not self._is_prompt(value, answer):
            talk = messages_of(value, where, str(self.prompt), whole=True, shown=shown)
            if "all" not in self.roles and not any(m.role in self.roles for m in talk):
                raise BirlError(
                    f"{where}: no message of {', '.join(self.roles)}, so there is nothing to train. Remove the row."
                )
            return None, talk
        prompt = _prompt(value, where, str(self.prompt), shown)
        if self.response is None:
            raise BirlError(
                f"{where}: `{self.prompt}` has no answer. Set data.answer_column, or put the "
                "answer into `messages`. Prompts alone are for `birl rl`."
            )
        if isinstance(answer, list):
            return prompt, messages_of(answer, where, self.response, whole=True, shown=Shown(shown.finder))
        return prompt, plain_text(answer, where, self.response)

    def _is_prompt(self, value: Any, answer: Any) -> bool:
        """Whether `value` is a prompt: there is an answer column, and it does not end with an assistant message."""
        last = value[-1] if isinstance(value, list) and value else None
        return answer is not None and not (isinstance(last, dict) and last.get("role") == "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Parsed preference row. `answers`: the chosen and the rejected answer, or the only one, labelled by `good`; each
    is text, or messages that may repeat the prompt."""

    prompt: Conversation | None
    answers: tuple[Conversation, ...]
    margin: float
    good: bool


@dataclass(frozen=True, slots=True)
class PairForm:
    """Form of rows for reward models and preference losses."""

    config: schema.Pairs
    prompt: str | None

    @property
    def label(self) -> str:
        return self.config.label_column if isinstance(self.config, schema.LabelledPairs) else ""

    @property
    def columns(self) -> list[str]:
        chosen, rejected = self.config.chosen_column, self.config.rejected_column
        return [chosen] if self.label else [chosen, rejected]

    def read(self, row: dict[str, Any], where: str, shown: Shown | None = None) -> Pair:
        """Raises `BirlError`."""
        _check_read(row, where)
        check_input(row, self.prompt, where)
        shown = shown or Shown()
        value = pick(row, self.prompt) if self.prompt else None
        prompt: Conversation | None = None
        if value is not None:
            prompt = _prompt(value, where, str(self.prompt), shown)
            shown = Shown(shown.finder)
        answers = [pick(row, column) for column in self.columns]
        if prompt is None and len(answers) == 2 and all(isinstance(a, str) for a in answers):
            prompt, answers = _same_beginning(*answers)
        return Pair(
            prompt=prompt,
            answers=tuple(self._answer(prompt, a, where, c, shown) for a, c in zip(answers, self.columns, strict=True)),
            margin=self._margin(row, where),
            good=_truth(pick(row, self.label), where, self.label) if self.label else True,
        )

    def _answer(self, prompt: Conversation | None, value: Any, where: str, name: str, shown: Shown) -> Conversation:
        if isinstance(value, str):
            unplaced(shown, where)
            if prompt is None:
                raise BirlError(
                    f"{where}: `{name}` is an answer without a prompt: add a column `prompt` or "
                    "`messages`, or give whole conversations."
                )
            return plain_text(value, where, name)
        talk = messages_of(value, where, name, whole=True, shown=shown)
        if talk[-1].role != "assistant":
            raise BirlError(
                f"{where}: `{name}` ends with a message of {talk[-1].role}; the answer to judge is missing."
            )
        return talk

    def _margin(self, row: dict[str, Any], where: str) -> float:
        name = self.config.margin_column if isinstance(self.config, schema.RankedPairs) else ""
        if not name:
            return 0.0
        value = pick(row, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise BirlError(f"{where}: `{name}` is {kind(value)}, it needs to be a number.")
        return float(value)


def _prompt(value: Any, where: str, name: str, shown: Shown) -> Conversation:
    if not isinstance(value, str):
        return messages_of(value, where, name, shown=shown)
    text = plain_text(value, where, name)
    return shown.placed((Message(role="user", content=text),), 0) if shown.beside else text


def unplaced(shown: Shown, where: str) -> None:
    """Raises `BirlError` if there are pictures, but no message to put them into."""
    if shown.beside:
        raise BirlError(f"{where}: has pictures, which need messages instead of raw text.")


def _same_beginning(chosen: str, rejected: str) -> tuple[str | None, list[Any]]:
    """Extract the prompt of two texts: their common prefix, up to a space (TRL's extract_prompt)."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    same -= same > 0 and chosen[same - 1] == " "
    if not chosen[:same].strip() or not chosen[same:].strip() or not rejected[same:].strip():
        return None, [chosen, rejected]
    return chosen[:same], [chosen[same:], rejected[same:]]


def _truth(value: Any, where: str, name: str) -> bool:
    plain = value.strip().lower() if isinstance(value, str) else value
    if plain is not None and plain in TRUE:
        return True
    if plain is not None and plain in FALSE:
        return False
    raise BirlError(f"{where}: `{name}` is {value!r:.100}, it needs to be true or false.")
