"""What the model was asked: rollouts.jsonl has the tokens of a prompt and not its text."""

from functools import lru_cache

from birl.errors import BirlError
from birl.view import flags
from birl.view.episodes import Episodes
from birl.view.tokens import Vocabulary
from birl.view.trajectory import blocks

KEPT = 4096  # texts; the answers of a group have one prompt


class Prompts:
    """The prompts of a run's episodes.

    Example: Prompts(episodes, Vocabulary(run / "model")).text(0) == "What is 3 + 4?"
    """

    def __init__(self, episodes: Episodes, vocabulary: Vocabulary) -> None:
        self.episodes, self.vocabulary = episodes, vocabulary
        self._decoded = lru_cache(KEPT)(self._decode)

    def text(self, row: int) -> str:
        """The user's messages before the model's first token; where the chat template marks none, all text there. Empty
        where the run has no tokenizer. Raises `BirlError` for a row that there is not."""
        return self._decoded(self.episodes.given(row))

    def _decode(self, tokens: tuple[int, ...]) -> str:
        try:
            if not tokens or not self.vocabulary.known:
                return ""
            result = list(blocks(tokens, [False] * len(tokens), self.vocabulary))
        except BirlError:
            return ""  # a broken tokenizer: the page of one episode tells what is wrong with it
        wanted = [one for one in result if one["role"] == "user"] or [one for one in result if one["role"] != "system"]
        texts = (flags.plain(self.vocabulary.text(tokens[one["body"] : one["end"]])).strip() for one in wanted)
        return "\n".join(filter(None, texts))
