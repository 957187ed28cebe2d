"""The readable text of a growing answer: complete characters, without a stop string or text after it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from birl.text.thinking import unfinished

INCOMPLETE = "\ufffd"  # the decoder's output for an incomplete character


class Visible:
    """Incremental decoding of one answer. `feed` takes tokens and returns the new text that is certain; `whole` returns
    the text of the finished answer. All text from `feed` is always a prefix of `whole`.

    Unlike the tokens, the text has neither the stop string nor the token (one of `hidden`) that ended the answer. Text
    from one of `fences` on, and spaces before it, are not returned by `feed`.
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
        self.sent = 0  # characters of it that were returned
        self.window = self.read = 0  # decoding needs a few earlier tokens: those from `window` on

    def feed(self, tokens: Sequence[int]) -> str:
        self.tokens += tokens
        new = self._decoded(self._shown())
        if new and not new.endswith(INCOMPLETE):
            self.text += new
            self.window, self.read = self.read, self._shown()
        return self._certain()

    def whole(self) -> str:
        """The text of the finished answer."""
        shown, everything = (self.text + self._decoded(n) for n in (self._shown(), len(self.tokens)))
        cut = self._first(everything)
        return shown if cut is None or cut >= len(shown) else everything[:cut]  # `<|im_end|>` may contain a stop string

    def _shown(self) -> int:
        """Number of tokens without trailing ones that would be hidden if the answer ended here."""
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
        """Position of the first stop string: not before `sent`, as no part of one is returned."""
        return min((at for s in self.stop if (at := text.find(s, self.sent)) >= 0), default=None)

    def _certain(self) -> str:
        """New text that no later token can change."""
        end = self._first(self.text)
        if end is None:
            end = len(self.text) - unfinished(self.text, (*self.stop, *self.fences))
        if self.fences:
            end = min([end, *(at for fence in self.fences if (at := self.text.find(fence)) >= 0)])
            end = len(self.text[:end].rstrip())
        given = self.text[self.sent : end]
        self.sent = max(self.sent, end)
        return given
