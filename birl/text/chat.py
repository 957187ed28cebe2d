"""The only place where messages and tokens meet.

    render   messages -> ids of a first prompt
    extend   ids so far + the ids of a reply + new messages -> ids of the next prompt; earlier ids never change
    append   the same for a prompt of plain text
    parse    ids of a reply -> message
    conversation   messages -> ids of all of it, and which of them are to be learned

Text becomes ids once. A reply is never encoded again from its text, as encode(decode(ids)) may differ from ids; what
the template puts behind a reply is taken from the template itself, by comparing renderings of a made-up conversation.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from birl.errors import BirlError, HistoryRewritten
from birl.text import tools as formats
from birl.types import Conversation, Message

PROBE = (Message(role="user", content="birl-probe-question"), Message(role="assistant", content="birl-probe-reply"))
Tools = Sequence[Mapping[str, Any]]
REWRITES = (
    "The chat template rewrites earlier messages when new ones come, so a conversation cannot be extended token by "
    "token. Use another template (model.chat_template=FILE.jinja) or an environment with one turn."
)


class Chat:
    """A tokenizer and its chat template. `end_ids` holds the tokens that end an answer; a model may name more of them
    than the tokenizer's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(i for i in (tokenizer.eos_token_id,) if isinstance(i, int))

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def end(self) -> int:
        """The token that ends an answer without a template."""
        if self.tokenizer.eos_token_id is None:
            raise BirlError("The tokenizer has no end token (eos_token), so a model cannot learn to stop.")
        return int(self.tokenizer.eos_token_id)  # pyright: ignore

    def render(self, prompt: Conversation, tools: Tools = ()) -> tuple[int, ...]:
        """Ids of a prompt: messages through the template, up to where the assistant's answer starts; text as it is,
        with the tokens that the tokenizer itself puts in front, unless the text holds them already. Raises `BirlError`
        where the template would leave out `tools` (JSON schemas, as OpenAI has them)."""
        if not isinstance(prompt, str):
            return formats.render(self, [formats.as_dict(m) for m in prompt], tools)
        ids, front = self.encode(prompt), self._front
        return ids if ids[: len(front)] == front else (*front, *ids)

    def text(self, prompt: Conversation) -> str:
        """What `render` encodes."""
        return prompt if isinstance(prompt, str) else self._text(prompt, answer=True)

    def extend(
        self, ids: tuple[int, ...], reply_tokens: tuple[int, ...], messages: tuple[Message, ...], tools: Tools = ()
    ) -> tuple[int, ...]:
        """Ids of the next prompt. A reply that did not end itself (a stop string, say) is ended as the template
        would. Raises `HistoryRewritten` where the template changes what was there before."""
        if not self.has_template:
            return (*ids, *reply_tokens, *self.encode("".join(m.content for m in messages)))
        glue = self.encode(self._after_reply(messages, tools))
        if reply_tokens and reply_tokens[-1] in self.end_ids and reply_tokens[-1] in glue:
            end = glue.index(reply_tokens[-1])
            if not self.decode(glue[:end]).strip():  # some templates put a space before the end token
                glue = glue[end + 1 :]
        return (*ids, *reply_tokens, *glue)

    def append(self, ids: tuple[int, ...], reply_tokens: tuple[int, ...], text: str) -> tuple[int, ...]:
        """Ids of a text that begins with a prompt and its reply, whose end token the text may hold, or leave out."""
        more = self.encode(text)
        if reply_tokens and reply_tokens[-1] in self.end_ids:
            if more[:1] == reply_tokens[-1:]:
                more = more[1:]
            else:
                reply_tokens = reply_tokens[:-1]
        return (*ids, *reply_tokens, *more)

    def conversation(
        self, messages: Sequence[Message], roles: Sequence[str] = ("assistant",)
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a finished conversation, and for each whether a message of one of `roles` has it. What comes behind
        the last such message is left out.

        An assistant's tokens are those that an engine would have sampled: its text up to the token that ends it,
        without the header before and the line break behind. For another role the whole message counts, its header
        included. Each piece is encoded alone, as when the conversation happens. Roles ("all",): everything counts.
        """
        if "all" in roles:
            whole = self.encode(self._text(messages, answer=False))
            return whole, (True,) * len(whole)
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for n, message in enumerate(messages):
            if message.role not in roles:
                continue
            opened = self._text(messages[:n], answer=message.role == "assistant") if n else ""
            closed = self._text(messages[: n + 1], answer=False)
            if not (opened.startswith(done) and closed.startswith(opened)):
                raise HistoryRewritten(REWRITES)
            before, own = self.encode(opened[len(done) :]), self.encode(closed[len(opened) :])
            cut = len(own)
            if message.role == "assistant":
                cut = max((i + 1 for i, t in enumerate(own) if t in self.end_ids), default=len(own))
            ids += (*before, *own)
            mask += [False] * len(before) + [True] * cut + [False] * (len(own) - cut)
            done = closed
        return tuple(ids), tuple(mask)

    def parse(self, tokens: Sequence[int], tools: Tools = ()) -> Message:
        """What the model said, without the end token; calls are looked for where there are `tools`."""
        tokens = list(tokens)
        while tokens and tokens[-1] in self.end_ids:
            tokens.pop()
        text = self.decode(tokens)
        content, calls = formats.parse(text) if tools else (text, ())
        return Message(role="assistant", content=content, tool_calls=calls)

    def decode(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text that already holds its special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _text(self, messages: Sequence[Message], answer: bool) -> str:
        return formats.text(self, [formats.as_dict(m) for m in messages], answer=answer)

    def _after_reply(self, messages: tuple[Message, ...], tools: Tools) -> str:
        """What stands between the end of a reply's own text and the next answer, new messages included."""
        made = [formats.as_dict(m) for m in (*PROBE, *messages)]
        whole = formats.text(self, made, tools)
        before = self._before_glue if not tools else self._before(tools)
        if not whole.startswith(before):
            raise HistoryRewritten(REWRITES)
        return whole[len(before) :]

    @cached_property
    def _front(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text, such as a token for its beginning; never what it would put behind."""
        probe = PROBE[0].content
        bare, ids = self.encode(probe), tuple(self.tokenizer(probe).input_ids)
        return next((ids[:n] for n in range(len(ids)) if ids[n : n + len(bare)] == bare), ())

    @cached_property
    def _before_glue(self) -> str:
        return self._before(())

    def _before(self, tools: Tools) -> str:
        """The rendering of the probe up to the end of the reply's content; checks that the template only appends."""
        made = [formats.as_dict(m) for m in (*PROBE, PROBE[0])]
        alone, longer = formats.text(self, made[:2], tools, answer=False), formats.text(self, made, tools)
        cut = alone.find(PROBE[1].content)
        before = alone[: cut + len(PROBE[1].content)]
        if cut < 0 or not longer.startswith(before):
            raise HistoryRewritten(REWRITES)
        return before


class StopChecker:
    """Says when one of `stop` has appeared in the text of the tokens fed so far. A stop string may span tokens, and a
    character may: what the newest tokens mean is only known from the decoded text, so a window of them is decoded
    again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        # a token is at least one byte; twice that for safety with characters that are incomplete at the window's start
        self.window = 2 * max(len(s.encode()) for s in stop) + 8
        self.tokens: list[int] = []

    def feed(self, token: int) -> bool:
        self.tokens = [*self.tokens, token][-self.window :]
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in self.stop)
