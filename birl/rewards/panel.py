"""A panel of judges: asks every judge every question and combines the verdicts into a value for each answer.

A judge that cannot be reached, is late, refuses, or replies in another form gives no verdict; this is counted, and is
never a 0.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from birl.cache import cache_folder
from birl.config.schema import Reward
from birl.rewards.questions import Criterion, Manner, Question, Rubric
from birl.rewards.requests import Failure, NoAnswer, Pace, ask_all, tokens

Value = float | NoAnswer
FILES = 400  # files in each of 256 folders: about 100,000 replies
LONGEST = 2**16  # bytes of a cached reply


def kept(place: str, body: Mapping[str, Any]) -> Path:
    """File of a cached reply, named by the digest of address and request."""
    digest = hashlib.sha256(json.dumps([place, body], sort_keys=True).encode()).hexdigest()
    return cache_folder("judge") / digest[:2] / f"{digest}.json"


def recall(file: Path) -> str | None:
    """The cached reply; None if there is none, or an unreadable one."""
    try:
        with file.open("rb") as opened:
            reply = json.loads(opened.read(2 * LONGEST))["reply"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return reply if isinstance(reply, str) else None


def keep(file: Path, reply: str) -> None:
    """Cache a reply atomically. A full disk is ignored: the next question is then sent again."""
    data = json.dumps({"reply": reply}).encode()
    if len(data) > LONGEST:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=file.parent, delete=False) as new:
            try:
                new.write(data)
                new.close()
                os.replace(new.name, file)
            except OSError:
                os.unlink(new.name)
        forget(file.parent)


def forget(folder: Path) -> None:
    """Delete the oldest files beyond `FILES`."""
    with os.scandir(folder) as entries:
        files = list(entries)
    if len(files) > FILES:
        files.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in files[: len(files) - FILES]:
            os.unlink(entry.path)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one judge on one question: a value for each answer that was shown, or why there is none."""

    values: tuple[float, ...] | NoAnswer
    reply: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One or several judges, each http://host:port/v1#MODEL, and how they are asked. `rate`: requests per minute to
    each; 0: no limit. `column`: the one with a row's rubric.

    Example: Panel(judges=("http://localhost:8000/v1#m",), manner=Manner(mode="group"))
    """

    judges: tuple[str, ...]
    manner: Manner = field(default_factory=Manner)
    rubric: Rubric = ()
    column: str = ""
    combine: str = Reward.judge_panel
    tokens: int = Reward.judge_tokens
    cache: bool = Reward.judge_cache
    concurrency: int = Reward.concurrency
    rate: float = Reward.judge_rate
    timeout: float = Reward.timeout
    paces: Mapping[str, Pace] = field(default_factory=dict[str, Pace])

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Panel":
        """Build from the result of `asdict`, possibly after a JSON round trip. Raises `BirlError`."""
        judges = tuple(given["judges"])
        tokens([place(judge) for judge in judges])
        own = {
            "judges": judges,
            "manner": Manner(**given.get("manner", {})),
            "rubric": tuple(Criterion(**one) for one in given.get("rubric", ())),
            "paces": {judge: Pace(given.get("rate", 0.0)) for judge in judges},
        }
        return cls(**{**given, **own})

    async def verdicts(self, questions: Sequence[Question]) -> list[list[Verdict]]:
        """For each judge, a verdict on each question, all within `timeout`."""
        keys = tokens([place(judge) for judge in self.judges])
        asked = (self._ask(judge, token, questions) for judge, token in zip(self.judges, keys, strict=True))
        return await asyncio.gather(*asked)

    async def _ask(self, judge: str, token: str, questions: Sequence[Question]) -> list[Verdict]:
        """Verdicts of one judge. Equal questions are sent once, and none whose verdict is cached."""
        where, model = place(judge), judge.partition("#")[2]
        bodies = {
            question.text: {"messages": [{"role": "user", "content": question.text}], "max_tokens": self.tokens}
            | {"temperature": 0}
            | ({"model": model} if model else {})
            for question in questions
        }
        files = {text: kept(where, body) for text, body in bodies.items()}
        readers = {question.text: question.read for question in questions}
        result: dict[str, Verdict] = {}
        for text, file in files.items() if self.cache else ():
            old = recall(file)
            if old is not None and not isinstance((verdict := read(old, readers[text])).values, NoAnswer):
                result[text] = verdict
        new = [text for text in bodies if text not in result]
        limits = {"concurrency": self.concurrency, "timeout": self.timeout, "pace": self.paces.get(judge)}
        replies = await ask_all(where, [bodies[text] for text in new], reply_text, token=token, **limits)
        for text, reply in zip(new, replies, strict=True):
            result[text] = read(reply, readers[text])
            if self.cache and not isinstance(result[text].values, NoAnswer):
                keep(files[text], reply)
        return [result[question.text] for question in questions]

    def values(
        self, answers: Sequence[str], questions: Sequence[Question], verdicts: Sequence[Sequence[Verdict]]
    ) -> list[Value]:
        """Value of each answer to one prompt, from 0 to 1: each judge's mean over the questions that showed the answer,
        then combined over judges. Needs the verdicts of more than half."""
        each = [[worth(answer, answers, questions, own) for own in verdicts] for answer in answers]
        return [most(values, PANELS[self.combine]) for values in each]


def majority(values: Sequence[float]) -> float:
    """1 if more judges give at least 0.5 than less, 0 if fewer do, else 0.5."""
    votes = sum(1 if value >= 0.5 else -1 for value in values)
    return (1.0 + (votes > 0) - (votes < 0)) / 2


PANELS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "median": median, "majority": majority}


def worth(answer: str, answers: Sequence[str], questions: Sequence[Question], verdicts: Sequence[Verdict]) -> Value:
    """Value of an answer by one judge. If all answers are equal, no judge was asked and each has 0.5."""
    if not questions:
        return 0.5 if len(answers) > 1 else NoAnswer("reward.judge_mode=pairs compares answers, and there is only one")
    pairs = [(q, v.values) for q, v in zip(questions, verdicts, strict=True) if answer in q.shown]
    return most([v if isinstance(v, NoAnswer) else v[q.shown.index(answer)] for q, v in pairs], fmean)


def most(values: Sequence[Value], combine: Callable[[Sequence[float]], float]) -> Value:
    """Combine the numbers, if they are more than half; else return the first failure."""
    numbers = [value for value in values if not isinstance(value, NoAnswer)]
    failures = [value for value in values if isinstance(value, NoAnswer)]
    return float(combine(numbers)) if len(numbers) > len(failures) else failures[0]


def failures(verdicts: Sequence[Sequence[Verdict]]) -> dict[Failure, float]:
    """Fraction of all verdicts that failed, by kind."""
    every = [verdict.values for own in verdicts for verdict in own]
    counted = Counter(values.kind for values in every if isinstance(values, NoAnswer))
    return {kind: counted[kind] / max(len(every), 1) for kind in Failure}


def place(judge: str) -> str:
    return judge.partition("#")[0].rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def reply_text(reply: Any) -> str:
    """Text of the judge's reply. Raises `ValueError`, or `NoAnswer` if it refuses."""
    try:
        choice = reply["choices"][0]
        words, declined = choice["message"]["content"], choice["message"].get("refusal")
        ended = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError(f"gave no chat completion: {json.dumps(reply)[:200]}") from None
    if declined or ended == "content_filter":
        raise NoAnswer(f"the judge declines: {str(declined or words)[:200]}", Failure.REFUSED)
    if not isinstance(words, str):
        raise ValueError(f"the judge's reply is empty: {json.dumps(reply)[:200]}")
    if ended == "length":
        raise ValueError(f"the judge was cut after reward.judge_tokens, at {words[-80:]!r}")
    return words


def read(reply: str | NoAnswer, numbers: Callable[[str], tuple[float, ...]]) -> Verdict:
    if isinstance(reply, NoAnswer):
        return Verdict(reply)
    try:
        return Verdict(numbers(reply), reply)
    except ValueError as error:
        return Verdict(NoAnswer(str(error)), reply)
