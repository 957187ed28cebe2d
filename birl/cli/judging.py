"""`birl eval --judge`: agreement of the judges of `reward.judge` with the people who made data.validation.

chosen, rejected                          preferences: text or messages, as `birl dpo` reads them
response | completion | output, and
score | rating | human | label            a number, or true and false, for each answer
"""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isnan
from typing import Any

from birl.cli import output
from birl.config import schema
from birl.data.forms import pair_form
from birl.data.messages import messages_of, text_of
from birl.data.rows import Rows, pick
from birl.data.tasks import ANSWERS, PROMPTS, answer_text, column_of, existing, read_sources
from birl.errors import BirlError
from birl.rewards.calibration import Gold, Measure, changes_with_order, measures, prefers_first
from birl.rewards.judge import rubric_of, text
from birl.rewards.panel import Panel, Verdict
from birl.rewards.questions import Question, Rubric, settings
from birl.rewards.requests import NoAnswer
from birl.text.tools import as_dict
from birl.track.units import counted
from birl.types import Conversation
from birl.visible import visible

RESPONSES = ("response", "completion", "output")
SCORES = ("score", "rating", "human", "label")
GOOD = 0.5  # least value of a good answer, unless validation.threshold is set


@dataclass(frozen=True, slots=True)
class Judged:
    """Questions for each prompt, and verdicts for each judge."""

    gold: list[Gold]
    questions: list[list[Question]]
    verdicts: list[list[list[Verdict]]]


def run(config: schema.Eval) -> int:
    """Print the result. Raises `BirlError`, also if no question has a verdict."""
    if not config.data.validation:
        raise BirlError("--judge needs human-judged rows: name them, as in data.validation=judged.jsonl.")
    panel = Panel.of(settings(config))
    read = [gold_of(rows, config, panel) for rows, _ in read_sources(config.data, "validation")]
    if len({preferences for _, preferences in read}) > 1:
        raise BirlError("data.validation: one source has preferences and another has scores. Measure one at a time.")
    preferences = read[0][1]
    gold, rubrics = zip(*(one for golds, _ in read for one in golds), strict=True)
    if config.output:
        output.prepare(config.output)
    judged = asyncio.run(ask(panel, gold, rubrics))
    result = {
        name: measured(panel, judged, which, preferences, config.validation.threshold or GOOD)
        for name, which in columns(panel)
    }
    failed = failures(panel, judged)
    show(result)
    for judge, kinds in failed.items():
        print(f"{visible(judge)}: no verdict on {', '.join(f'{n} ({kind})' for kind, n in kinds.items())}")
    if config.output:
        record = {"panel": settings(config), "failures": failed, "answers": answers(panel, judged)}
        output.write(config.output, record | {"measures": {n: [asdict(m) for m in own] for n, own in result.items()}})
        print(f"Written to {config.output}")
    return 0


def columns(panel: Panel) -> list[tuple[str, list[int]]]:
    """Each judge, and if there are several, all together."""
    each = [(judge, [i]) for i, judge in enumerate(panel.judges)]
    return each if len(each) == 1 else [*each, (f"{panel.combine} of {len(each)}", list(range(len(each))))]


async def ask(panel: Panel, gold: Sequence[Gold], rubrics: Sequence[Rubric]) -> Judged:
    """Ask in batches of prompts, so that each request has the whole reward.timeout."""
    every = [panel.manner.questions(g.prompt, g.right, g.answers, r) for g, r in zip(gold, rubrics, strict=True)]
    asked, judges = counted(sum(map(len, every)), "question"), counted(len(panel.judges), "judge")
    print(f"birl: {asked} about {counted(len(gold), 'prompt')} to {judges} ...", file=sys.stderr)
    verdicts: list[list[list[Verdict]]] = []
    for part in batches(every, panel.concurrency):
        given = await panel.verdicts([question for questions in part for question in questions])
        first = 0
        for questions in part:
            verdicts.append([own[first : first + len(questions)] for own in given])
            first += len(questions)
    judged = Judged(list(gold), every, verdicts)
    reasons = Counter(str(v.values) for own in verdicts for each in own for v in each if isinstance(v.values, NoAnswer))
    if not any(not isinstance(v.values, NoAnswer) for own in verdicts for each in own for v in each):
        told = "".join(f"\n  {n} x {visible(why)}" for why, n in reasons.most_common(3))
        raise BirlError(f"reward.judge={', '.join(panel.judges)}: no question has a verdict. Most frequent:{told}")
    for why, n in reasons.most_common(3):
        print(f"birl: {n} x {visible(why)}", file=sys.stderr)
    return judged


def batches(every: Sequence[list[Question]], size: int) -> Iterator[list[list[Question]]]:
    """Batches of prompts in order, each with at least `size` questions."""
    part: list[list[Question]] = []
    for questions in every:
        part.append(questions)
        if sum(map(len, part)) >= size:
            yield part
            part = []
    if part:
        yield part


def measured(panel: Panel, judged: Judged, which: list[int], preferences: bool, threshold: float) -> list[Measure]:
    values = [
        panel.values(gold.answers, questions, [own[i] for i in which])
        for gold, questions, own in zip(judged.gold, judged.questions, judged.verdicts, strict=True)
    ]
    result = measures(judged.gold, values, preferences=preferences, threshold=threshold)
    if len(which) == 1 and panel.manner.mode != "score":
        own = [verdicts[which[0]] for verdicts in judged.verdicts]
        result += [prefers_first(judged.questions, own), changes_with_order(judged.questions, own)]
    return [measure for measure in result if measure.n]


def failures(panel: Panel, judged: Judged) -> dict[str, dict[str, int]]:
    """Number of failures by judge and kind."""
    result: dict[str, dict[str, int]] = {}
    for i, judge in enumerate(panel.judges):
        kinds = Counter(
            v.values.kind.value for own in judged.verdicts for v in own[i] if isinstance(v.values, NoAnswer)
        )
        result |= {judge: dict(kinds)} if kinds else {}
    return result


def answers(panel: Panel, judged: Judged) -> list[dict[str, Any]]:
    """Records for the output file: values of people and judges for each answer, and the judges' replies."""
    result = []
    for gold, questions, verdicts in zip(judged.gold, judged.questions, judged.verdicts, strict=True):
        values = panel.values(gold.answers, questions, verdicts)
        for answer, human, value in zip(gold.answers, gold.human, values, strict=True):
            replies = [[v.reply for q, v in zip(questions, own, strict=True) if answer in q.shown] for own in verdicts]
            given = {"problem": str(value)} if isinstance(value, NoAnswer) else {"judge": value}
            result.append({"prompt": gold.prompt, "answer": answer, "human": human, **given, "replies": replies})
    return result


def gold_of(rows: Rows, config: schema.Eval, panel: Panel) -> tuple[list[tuple[Gold, Rubric]], bool]:
    """Rows of a source, grouped by prompt, and whether they are preferences. Raises `BirlError`."""
    right = column_of(rows, config.data.answer_column, ANSWERS, "data.answer_column")
    pairs = rows.has("chosen") and rows.has("rejected")
    read = _preferences(rows, config) if pairs else _scores(rows, config)
    together: defaultdict[tuple[str, str, Rubric], list[Gold]] = defaultdict(list)
    for i, gold in enumerate(read):
        row = rows[i]
        try:
            rubric = rubric_of(panel, {name: [value] for name, value in row.items()}, 0)
        except BirlError as error:
            raise BirlError(f"{rows.where(i)}: {error}") from error
        gold = replace(gold, right=answer_text(pick(row, right)) if right else "")
        together[gold.prompt, gold.right, rubric].append(gold)
    if pairs:
        return [(gold, key[2]) for key, own in together.items() for gold in own], True
    return [
        (replace(own[0], answers=tuple(g.answers[0] for g in own), human=tuple(g.human[0] for g in own)), key[2])
        for key, own in together.items()
    ], False


def _preferences(rows: Rows, config: schema.Eval) -> Iterator[Gold]:
    form = pair_form(rows, schema.LabelledPairs(prompt_column=config.data.prompt_column))
    for i in range(len(rows)):
        pair = form.read(rows[i], rows.where(i))
        prompt = pair.prompt if pair.prompt is not None else pair.answers[0][:-1]
        yield Gold(prompt=_asked(prompt), answers=tuple(map(_last_text, pair.answers)), human=(1.0, 0.0))


def _scores(rows: Rows, config: schema.Eval) -> Iterator[Gold]:
    prompt = column_of(rows, config.data.prompt_column, PROMPTS, "data.prompt_column")
    response, score = (column_of(rows, "", names, "") for names in (RESPONSES, SCORES))
    if prompt is None or response is None or score is None:
        raise BirlError(
            f"{rows.name}: --judge needs a prompt ({' or '.join(PROMPTS)}) with `chosen` and `rejected`, or with an "
            f"answer ({' or '.join(RESPONSES)}) and its human score ({' or '.join(SCORES)}). {existing(rows)}"
        )
    for i in range(len(rows)):
        row, where = rows[i], rows.where(i)
        asked, answer, value = pick(row, prompt), pick(row, response), pick(row, score)
        if not isinstance(value, bool | int | float) or not abs(value) < inf:
            raise BirlError(f"{where}: `{score}` is {value!r:.100}, it needs to be a number, or true or false.")
        if not isinstance(asked, str):
            asked = messages_of(asked, where, prompt)
        if not isinstance(answer, str):
            answer = messages_of(answer, where, response, whole=True)
        yield Gold(
            prompt=_asked(asked) if not isinstance(asked, str) else text_of(asked, where, prompt),
            answers=(_last_text(answer),),
            human=(float(value),),
        )


def _asked(prompt: Conversation) -> str:
    return prompt if isinstance(prompt, str) else text([as_dict(message) for message in prompt])


def _last_text(answer: Conversation) -> str:
    return answer if isinstance(answer, str) else answer[-1].content


def show(result: dict[str, list[Measure]]) -> None:
    """Print measures as a table, with 95 % intervals."""
    from rich.table import Table

    from birl.track.console import Terminal

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("judge", overflow="fold")
    for head in ("measure", "value", "95 %", "n"):
        table.add_column(head, no_wrap=True, justify="left" if head == "measure" else "right")
    for judge, own in result.items():
        for measure in own:
            between = "" if isnan(measure.low) else f"{measure.low:.3f} - {measure.high:.3f}"
            value = "" if isnan(measure.value) else f"{measure.value:.3f}"
            table.add_row(visible(judge), measure.name, value, between, str(measure.n))
    Terminal(width=None if sys.stdout.isatty() else 10_000).print(table)
