"""Questions that need several look-ups, as in Search-R1: `<search>query</search>` is answered with
`<information>passages</information>`, `<answer>...</answer>` ends the episode. The index is BM25 (bm25s)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from birl.config.schema.kinds import Count
from birl.data.parse import parse_json
from birl.envs.tasks.invented import passages, questions
from birl.envs.tasks.rows import Replies, Row, answered, held_out, normal, user_message
from birl.errors import BirlError
from birl.types import Conversation, Feedback, Message, Task

ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
HOW = (
    "Answer the question. To look something up, write <search>words</search>; what was found comes between "
    "<information> and </information>. When you know the answer, write <answer>answer</answer>."
)
AGAIN = "Write <search>words</search> to look something up, or <answer>answer</answer> to answer."
LONGEST = 500  # characters of a query that are read


class Index:
    """Passages ranked by the words that they share with a query, the most relevant first."""

    def __init__(self, texts: Sequence[dict[str, str]]) -> None:
        try:
            self.bm25s: Any = import_module("bm25s")
        except ImportError as error:
            raise BirlError("env.kind=search needs bm25s: pip install 'birl[search]'") from error
        self.passages = texts
        self.index = self.bm25s.BM25()
        self.index.index(self._words([f"{p['title']} {p['text']}" for p in texts]), show_progress=False)

    def search(self, query: str, k: int) -> list[dict[str, str]]:
        """The best passages, at most k; none without a word of the query."""
        words = self._words([query[:LONGEST]])
        places, scores = self.index.retrieve(words, k=min(k, len(self.passages)), show_progress=False)
        return [self.passages[i] for i, score in zip(places[0], scores[0], strict=True) if score > 0]

    def _words(self, texts: list[str]) -> Any:
        return self.bm25s.tokenize(texts, show_progress=False)


class Search:
    """The reward is 1 if the answer has the same words as the right one, ignoring capitals, articles and punctuation,
    else 0. The first of several tags in a reply counts: the rest was invented by the model."""

    @dataclass(kw_only=True)
    class Config:
        corpus: str = ""
        """JSON Lines file of passages with `title` and `text`. Empty: about 150 built-in passages on an invented
        country, with questions; for another file, data.train holds the questions."""
        passages: Count = 3
        """Maximum number of passages per search result."""
        turns: Replies = 6
        """Maximum number of replies; then the episode ends without an answer. env.max_turns limits it, too."""

    @staticmethod
    def tasks(config: Config, split: str) -> list[Row]:
        if config.corpus:
            return []
        return [
            {**row, "prompt": f"{HOW}\n\nQuestion: {row['prompt']}"}
            for row in questions()
            if held_out(row["prompt"]) == (split == "validation")
        ]

    @classmethod
    def shared(cls, config: Config) -> Index:
        return Index(read(Path(config.corpus)) if config.corpus else passages())

    @staticmethod
    def gold(task: Task) -> list[str]:
        looked_up = task.columns.get("searches") or []
        return [*(f"<search>{words}</search>" for words in looked_up), f"<answer>{task.answer}</answer>"]

    def __init__(self, task: Task, config: Config, shared: Index) -> None:
        self.task, self.config, self.index = task, config, shared
        self.turn = self.searches = 0

    async def start(self) -> Conversation:
        return self.task.prompt

    def step(self, reply: Message) -> Feedback:
        self.turn += 1
        result = ACTION.search(reply.content)
        if result and result[1] == "answer":
            right = normal(result[2]) == normal(answered(self.task))
            return Feedback(reward=float(right), info={"search/searches": float(self.searches)})
        if result:
            self.searches += 1
            hits = self.index.search(result[2], self.config.passages)
            told = "\n".join(f"{p['title']}: {p['text']}" for p in hits) or "Nothing was found."
            told = f"<information>\n{told}\n</information>"
        else:
            told = AGAIN
        if isinstance(self.task.prompt, str):
            told = f"\n{told}\n"
        return Feedback(messages=user_message(told), done=self.turn >= self.config.turns)

    async def close(self) -> None:
        pass


def read(path: Path) -> list[dict[str, str]]:
    """Passages of a JSON Lines file. Raises `BirlError` with the line."""
    try:
        result = list(parse_json(path))
    except OSError as error:
        raise BirlError(f"env.corpus={path}: cannot be read: {error}") from error
    if not result:
        raise BirlError(f"env.corpus={path}: has no passages")
    for number, row in enumerate(result, 1):
        if not all(isinstance(row.get(key), str) for key in ("title", "text")):
            raise BirlError(f"env.corpus={path}: row {number} needs a `title` and a `text`, both text")
    return result
