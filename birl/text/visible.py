"""The text of an answer while it grows, as a reader may see it: whole characters, and nothing of a stop string or
behind it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from birl.text.thinking import unfinished

INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character


class Visible:
    """Text of one answer. Tokens come by `feed`, which gives what is certain of the text so far; `whole` is all of it
    once no more tokens come. What `feed` gave is always a beginning of `whole`.

    Unlike the tokens, the text has neither the stop string nor the token (one of `hidden`) that ended the answer.
    Nothing is given away from where one of `fences` begins, nor spaces before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        hidden: frozenset[int],
        stop: Sequence[str],
        fences: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.hidden, self.stop, self.fences = tokenizer, hidden, tuple(stop), tuple(fences)
        self.tokens: list[int] = []
        self.text = ""  # of the tokens before `read`
        self.sent = 0  # characters of it that were given away
        self.window = self.read = 0  # decoding needs a few tokens before the new ones: those from `window` on

    def feed(self, tokens: Sequence[int]) -> str:
        self.tokens += tokens
        new = self._decoded(self._shown())
        if new and not new.endswith(INCOMPLETE):
            self.text += new
            self.window, self.read = self.read, self._shown()
        return self._certain()

    def whole(self) -> str:
        """The text of the finished answer."""
        everything = self.text + self._decoded(len(self.tokens))
        cut = self._first(everything)
        return self.text + self._decoded(self._shown()) if cut is None else everything[:cut]

    def _shown(self) -> int:
        """Tokens without those at the end that would be hidden if it ended here."""
        n = len(self.tokens)
        while n > self.read and self.tokens[n - 1] in self.hidden:
            n -= 1
        return n

    def _decoded(self, end: int) -> str:
        """Text of the tokens from `read` to `end`."""
        before = self._text(self.tokens[self.window : self.read])
        return self._text(self.tokens[self.window : end])[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _first(self, text: str) -> int | None:
        """Where the first stop string begins: not before `sent`, as nothing of one is given away."""
        return min((at for s in self.stop if (at := text.find(s, self.sent)) >= 0), default=None)

    def _certain(self) -> str:
        """What no later token can take back, as far as it was not given away."""
        end = self._first(self.text)
        if end is None:
            end = len(self.text) - unfinished(self.text, (*self.stop, *self.fences))
        if self.fences:
            end = min([end, *(at for fence in self.fences if (at := self.text.find(fence)) >= 0)])
            end = len(self.text[:end].rstrip())
        given = self.text[self.sent : end]
        self.sent = max(self.sent, end)
        return given
