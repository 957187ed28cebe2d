"""The only module that converts between messages and tokens.

    render   messages -> ids of a first prompt
    extend   ids so far + the ids of a reply + new messages -> ids of the next prompt; earlier ids never change
    append   the same for a prompt of plain text
    parse    ids of a reply -> message
    conversation   messages -> ids of all of it, and which of them are trained

Text is tokenized once. A reply is never tokenized again from its text, as encode(decode(ids)) may differ from ids; the
text that the template appends to a reply is taken from the template, by comparing renderings of a probe conversation.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

from transformers import PreTrainedTokenizerBase

from birl.errors import BirlError, HistoryRewritten
from birl.foreign import Overdue
from birl.text import formats
from birl.text import tools as templates
from birl.text.bounds import CHARACTERS
from birl.text.formats import FORMATS, MARK, Dict, Format
from birl.text.grammar import words_of
from birl.text.pictures import FIRST, Pictures
from birl.text.thinking import ParsedReply, tags_of
from birl.types import Conversation, Message, Picture

PROBE = (Message(role="user", content="birl-probe-question"), Message(role="assistant", content=MARK))
Tools = Sequence[Mapping[str, Any]]
REWRITES = (
    "The chat template rewrites earlier messages when new ones come, so a conversation cannot be extended token by "
    "token. Use another template (model.chat_template=FILE.jinja) or an environment with one turn."
)
BEGINS = (
    "The chat template's prompt for an answer ends with {!r}, and its answer in messages.{} begins in another way, so "
    "such an answer is never sampled. Use another template (model.chat_template=hermes, or FILE.jinja)."
)
OTHER = "Take the model's own template, or another one (model.chat_template=FILE.jinja)."
MOST_KEPT, LARGEST_KEPT = 64, 1 << 20  # rendered texts that are kept, and characters of one
LONG_TEXT = 32  # characters: such a text does not occur in a rendering by chance
TAIL = 16  # tokens at the end of a prompt that are checked for an opened thinking block


class Chat:
    """A tokenizer and its chat template. `end_ids`: tokens that end an answer; a model may have more than the
    tokenizer. `pictures`: converts pictures to tokens. `tool_format`: one of `birl.text.formats.FORMATS`, or auto:
    detected from the template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_format: str = "auto") -> None:
        self.tokenizer, self.tool_format = tokenizer, tool_format
        self.pictures: Pictures | None = None  # of a vision-language model
        self.end_ids = frozenset(i for i in (tokenizer.eos_token_id,) if isinstance(i, int))
        self.noted = False  # the note that tools are written into messages was printed
        self.checked: set[Any] = set()  # shapes of conversations that the template renders completely
        self.rendered: OrderedDict[bytes, str] = OrderedDict()  # the newest, with which the next turns begin

    @cached_property
    def without_tools(self) -> str:
        """If the template has no tools: the role of the message, system or user, that they are written into
        (`birl/text/tools.py`); else empty."""
        if not self.has_template or self.tool_format not in ("auto", "hermes"):
            return ""
        return templates.without_tools(self)

    @cached_property
    def in_parts(self) -> bool:
        """Whether the template reads the contents of messages as lists of parts alone (SmolVLM, LLaVA)."""
        return templates.in_parts(self)

    @cached_property
    def format(self) -> Format | None:
        """The model's format of tool calls; None if unknown."""
        if self.without_tools:
            return FORMATS["hermes"]
        return templates.detect(self) if self.tool_format == "auto" else FORMATS[self.tool_format]

    @cached_property
    def words_of_grammars(self) -> Any:
        """The tokenizer for `birl.text.grammar.Guide`."""
        return words_of(self)

    @cached_property
    def tags(self) -> tuple[str, str] | None:
        """The tags around the model's thinking; None if its template has none."""
        return tags_of(templates.template_of(self))

    def ends_written(self) -> frozenset[int]:
        """The first special token that the template writes behind an answer, if any."""
        try:
            behind = self.encode(self._text(PROBE, answer=False).partition(MARK)[2])
        except BirlError as error:  # there is no template, or it refuses this conversation
            if isinstance(error.__cause__, Overdue):
                raise
            return frozenset()
        added = self.tokenizer.added_tokens_decoder
        return frozenset([i for i in behind if i in added and added[i].special][:1])

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def end(self) -> int:
        """The end token of answers without a template."""
        if self.tokenizer.eos_token_id is None:
            raise BirlError("The tokenizer has no end token (eos_token), so a model cannot learn to stop.")
        return int(self.tokenizer.eos_token_id)  # pyright: ignore

    def render(self, prompt: Conversation, tools: Tools = ()) -> tuple[int, ...]:
        """Ids of a prompt. Messages are rendered with the template, up to the start of the assistant's answer; text is
        tokenized as it is, with the tokenizer's prefix tokens unless the text has them already. Raises `BirlError` if
        the template would leave out `tools` (JSON schemas in OpenAI's format)."""
        if not isinstance(prompt, str):
            return templates.render(self, [templates.as_dict(m) for m in prompt], tools, seen(prompt))
        ids, front = self.encode(prompt), self._front
        return ids if ids[: len(front)] == front else (*front, *ids)

    def text(self, prompt: Conversation) -> str:
        """The text that `render` tokenizes."""
        return prompt if isinstance(prompt, str) else self._text(prompt, answer=True)

    def extend(
        self,
        ids: tuple[int, ...],
        reply_tokens: tuple[int, ...],
        messages: tuple[Message, ...],
        tools: Tools = (),
        history: tuple[Message, ...] | None = None,
    ) -> tuple[int, ...]:
        """Ids of the next prompt: `ids` (of `history`, by default a probe question), the reply, and `messages`. A reply
        without an end token (after a stop string, for example) is ended as in the template. Raises `HistoryRewritten`
        if the template changes earlier messages or the model's output."""
        if not self.has_template:
            return (*ids, *reply_tokens, *self.encode("".join(m.content for m in messages)))
        new = self._after_reply(ids, reply_tokens, messages, tools, history or PROBE[:1])
        glue = self.encode_with(new, seen(messages))
        if not reply_tokens or reply_tokens[-1] not in self.end_ids:
            return (*ids, *reply_tokens, *glue)
        end = next((n for n, token in enumerate(glue) if token in self._ends), None)
        if end is not None and not self.decode(glue[:end]).strip():  # some templates put a space before the end token
            if glue[end] != reply_tokens[-1]:
                raise HistoryRewritten(REWRITES)
            glue = glue[end + 1 :]
        return (*ids, *reply_tokens, *glue)

    def append(
        self, ids: tuple[int, ...], reply_tokens: tuple[int, ...], text: str, keep_end: bool = False
    ) -> tuple[int, ...]:
        """Ids of a text that begins with a prompt and its reply. The text may contain the reply's end token or not;
        with `keep_end` the sampled end token is kept in the second case, too."""
        more = self.encode(text)
        if reply_tokens and reply_tokens[-1] in self.end_ids:
            if more[:1] == reply_tokens[-1:]:
                more = more[1:]
            elif not keep_end:
                reply_tokens = reply_tokens[:-1]
        return (*ids, *reply_tokens, *more)

    def conversation(
        self, messages: Sequence[Message], roles: Sequence[str] = ("assistant",), most: int | None = None
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a finished conversation, and for each whether it belongs to a message of one of `roles`. Text after
        the last such message is left out and, with `most` [tokens], everything after so many tokens.

        The assistant's tokens are those that an engine would have sampled: the text and the end token (of the next
        message, or the tokenizer's, if the template has none), without the header before and the line break after
        them. For other roles the whole message counts, including its header. Each piece is tokenized separately, as in
        a live conversation. Roles ("all",): everything counts. Raises `BirlError` if the template would leave out a
        message or a part of an assistant's, `HistoryRewritten` if it changes one later.
        """
        templates.check_pictures(self, seen(messages))
        templates.check(self, [templates.as_dict(m) for m in messages], ())
        bound = None if most is None else CHARACTERS * most + 1
        if "all" in roles:
            text = self._text(messages, answer=False)
            templates.check_kept(enumerate(messages) if text == text[:bound] else (), text, self.tags)
            whole = self.encode_with(text[:bound], seen(messages))
            return whole, (True,) * len(whole)
        ids: list[int] = []
        mask: list[bool] = []
        done, pictures, unended = "", iter(seen(messages)), False
        for n, message in enumerate(messages):
            if message.role not in roles:
                continue
            opened = self._text(messages[:n], answer=message.role == "assistant") if n else ""
            closed = self._text(messages[: n + 1], answer=False)
            if not opened.startswith(done):
                raise HistoryRewritten(REWRITES)
            if not closed.startswith(opened):
                raise BirlError(BEGINS.format(opened[-20:], n))
            before, own = (self._piece(t, pictures) for t in (opened[len(done) : bound], closed[len(opened) : bound]))
            if unended and before[:1] and before[0] not in self.end_ids:
                before = (self.end, *before)
            cut, whole = len(own), bound is None or len(closed) <= bound
            ids += before
            mask += [unended and i == 0 for i in range(len(before))]
            unended = message.role == "assistant" and whole
            if unended:
                templates.check_kept([(n, message)], closed[len(opened) :], self.tags)
                ends = [i + 1 for i, t in enumerate(own) if t in self.end_ids]
                while len(ends) > 1 and not self.decode(own[ends[-2] : ends[-1] - 1]).strip():
                    ends.pop()  # Phi-3 writes another one behind the last answer alone, which is never sampled
                    closed, own = closed.removesuffix(self.decode(own[ends[-1] :])), own[: ends[-1]]
                cut, unended = ends[-1] if ends else len(own), not ends
            ids += own
            mask += [True] * cut + [False] * (len(own) - cut)
            done = closed
            if not whole or (most is not None and len(ids) > most):
                break
        if unended:
            ids, mask = [*ids, self.end], [*mask, True]
        return tuple(ids), tuple(mask)

    def parse(self, tokens: Sequence[int], tools: Tools = (), prompt: Sequence[int] | None = None) -> Message:
        """Parse the model's reply, without the end token; calls are parsed only if there are `tools`. `prompt`: its
        ids, which may have opened the thinking; by default the end of the template's prompt."""
        return self.parts(self.reply_text(tokens), tools, self.thinks(prompt)).message()

    def parts(self, text: str, tools: Tools = (), opened: bool = False) -> ParsedReply:
        """Parse a reply's text. `opened`: it begins within the model's thinking."""
        return formats.parts(text, self.format if tools or self._channels else None, self.tags, tools, opened)

    def fences(self, tools: bool) -> tuple[str, ...]:
        """Texts at which hidden parts of a reply may begin, which are not shown while it grows: calls, or channels."""
        return self.format.openings if self.format is not None and (tools or self._channels) else ()

    def reply_text(self, tokens: Sequence[int]) -> str:
        """The text of a reply without its end token."""
        tokens = list(tokens)
        while tokens and tokens[-1] in self.end_ids:
            tokens.pop()
        return self.decode(tokens)

    def thinks(self, prompt: Sequence[int] | None = None) -> bool:
        """Whether the answer to this prompt begins within the model's thinking."""
        if self.tags is None:
            return False
        end = self._opening if prompt is None else self.decode(prompt[-TAIL:])
        return end.rstrip().endswith(self.tags[0].rstrip())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; each picture is one placeholder."""
        tokens = tokens if self.pictures is None else self.pictures.shown(tokens)
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def shown(self, ids: Sequence[int]) -> list[str]:
        """Digests of the pictures in a sequence, in order."""
        if self.pictures is None or max(ids, default=0) < FIRST:
            return []
        return [span.picture.digest for span in self.pictures.spans(ids)]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text that already has its special tokens."""
        return self._piece(text, iter(()))

    def encode_with(self, text: str, pictures: Sequence[Picture]) -> tuple[int, ...]:
        """The same for a rendered text with these pictures. Raises `BirlError` if it has fewer or more, or if the model
        takes none."""
        templates.check_pictures(self, pictures)
        left = iter(pictures)
        result = self._piece(text, left)
        if any(True for _ in left):
            raise BirlError(f"The model's chat template leaves out pictures, so the model would not see them. {OTHER}")
        return result

    def _piece(self, text: str, pictures: Iterator[Picture]) -> tuple[int, ...]:
        if self.pictures is not None and self.pictures.token in text:
            return self.pictures.encode(text, pictures)
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _text(self, messages: Sequence[Message], answer: bool) -> str:
        return templates.text(self, [templates.as_dict(m) for m in messages], answer=answer)

    def _after_reply(
        self,
        ids: tuple[int, ...],
        reply_tokens: tuple[int, ...],
        messages: tuple[Message, ...],
        tools: Tools,
        history: tuple[Message, ...],
    ) -> str:
        """The text between the end of a reply's own text and the next answer, including new messages: the text that the
        template puts after a mark in place of the reply. Checks that the template only appends, and reproduces the
        model's output."""
        opened = self.thinks(ids)
        reply = self.parts(self.reply_text(reply_tokens), tools, opened)
        before, after = ([templates.as_dict(m) for m in talk] for talk in (history, messages))
        own = templates.as_dict(reply.message())
        start = self._rendered(before, tools)
        whole = self._rendered([*before, own, *after], tools)
        marked = templates.text(self, [*before, _marked(own), *after], tools)
        if not (whole.startswith(start) and marked.startswith(start)):
            raise HistoryRewritten(REWRITES)
        glue = self._behind_mark(marked[len(start) :], bool(reply.calls))
        if glue is None or not whole.endswith(glue):
            raise HistoryRewritten(REWRITES)
        if not _same(self.parts(whole[len(start) : len(whole) - len(glue)], tools, opened), reply):
            raise HistoryRewritten(REWRITES)
        plain = [m["content"] for m in after if len(m["content"]) >= LONG_TEXT and not m.get("tool_calls")]
        if len({text for text in plain if text in glue}) < len(after):  # else all is there: `start` was checked
            templates.check(self, [*before, own, *after], tools)
        return glue

    def _rendered(self, messages: Sequence[Dict], tools: Tools) -> str:
        """Text of a conversation up to the next answer. The newest texts are kept: the next turn begins with one."""
        key = sha256(repr((messages, tools)).encode(errors="surrogatepass")).digest()
        if (made := self.rendered.pop(key, None)) is None:
            made = templates.text(self, messages, tools)
        if len(made) <= LARGEST_KEPT:
            self.rendered[key] = made
            if len(self.rendered) > MOST_KEPT:
                self.rendered.popitem(last=False)
        return made

    def _behind_mark(self, text: str, called: bool) -> str | None:
        cut = text.find(MARK)
        if cut < 0 or not called:
            return None if cut < 0 else text[cut + len(MARK) :]
        assert self.format is not None  # otherwise there are no calls
        closing = re.compile(self.format.closing).search(text, cut + len(MARK))
        return text[closing.end() :] if closing else None

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens with which the template may end a reply."""
        added = self.tokenizer.get_added_vocab()  # pyright: ignore
        return self.end_ids | {added[t] for t in (self.format.ends if self.format else ()) if t in added}

    @cached_property
    def _channels(self) -> bool:
        return self.format is not None and self.format.channels is not None

    @cached_property
    def _opening(self) -> str:
        """The template's text before an answer."""
        return self._text(PROBE[:1], answer=True) if self.has_template else ""

    @cached_property
    def _front(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a text, such as a BOS token; never those that it appends."""
        probe = PROBE[0].content
        bare, ids = self.encode(probe), tuple(self.tokenizer(probe).input_ids)
        return next((ids[:n] for n in range(len(ids)) if ids[n : n + len(bare)] == bare), ())


def seen(messages: Sequence[Message]) -> tuple[Picture, ...]:
    return tuple(picture for message in messages for picture in message.pictures)


def _marked(own: Dict) -> Dict:
    """The reply with a mark at the end of its content or of its last call."""
    if not own.get("tool_calls"):
        return {**own, "content": MARK}
    *calls, last = own["tool_calls"]
    return {**own, "tool_calls": [*calls, {**last, **templates.call(MARK, last["function"]["name"])}]}


def _same(one: ParsedReply, other: ParsedReply) -> bool:
    """Whether both replies are equal, except for blanks around them and in JSON: the model's own tokens are kept."""
    return (
        (one.thinking is None) == (other.thinking is None)
        and one.closed == other.closed
        and (one.thinking or "").strip() == (other.thinking or "").strip()
        and one.content.strip() == other.content.strip()
        and [(c.name, json.loads(c.arguments)) for c in one.calls]
        == [(c.name, json.loads(c.arguments)) for c in other.calls]
    )


class StopChecker:
    """Detects when one of `stop` appears in the text of the tokens fed so far. A stop string may span tokens, as may a
    character: the meaning of the newest tokens is only known from decoded text, so a window of them is decoded
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
