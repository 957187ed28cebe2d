"""Results of a run, from the files of its folder, and their text for the terminal."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from birl.track import progress
from birl.track.units import count, counted, decimal, duration
from birl.visible import visible

STYLES = {"right": "green", "wrong": "red", "unscored": "default", "": "default"}
SUMS = {
    "seconds": "time/step",
    "generated": "tokens/generated",
    "trained": "tokens/trained",
    "learned": "tokens/learned",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One answer to the same prompt at the first and at the last validation. `threshold`: least score that is right,
    NaN if scores are not right or wrong."""

    prompt: str
    answer: str
    before: str
    after: str
    pictures: tuple[str, ...] = ()  # relative to the run folder
    score_before: float
    score_after: float
    threshold: float = 1.0

    @property
    def change(self) -> int:
        """1: became right, or better if scores are not right or wrong; -1: became wrong, or worse; 0: neither."""
        before, after = self.score_before, self.score_after
        if math.isnan(self.threshold):
            return int(after > before) - int(after < before)
        return int(after >= self.threshold) - int(before >= self.threshold)


def right_from(*records: Mapping[str, Any]) -> float:
    """`progress.right_from` of these validations."""
    given = [float(record["threshold"]) for record in records if "threshold" in record]
    scores = [score(sample) for record in records for sample in record["samples"]]
    graded = any("validation/all/score" in r and not any("/pass@" in name for name in r) for r in records)
    return progress.right_from([0.5] if graded else scores, given[-1] if given else 0.0)


def verdict(value: float, threshold: float) -> str:
    """right, wrong, unscored, or empty if scores are not right or wrong."""
    if not math.isfinite(value):
        return "unscored"
    return "" if math.isnan(threshold) else "right" if value >= threshold else "wrong"


def pairs(validations: list[dict[str, Any]]) -> list[Pair]:
    """Pair samples of the first validation with those of the last, by prompt and by their order within it."""
    with_samples = [record for record in validations if record.get("samples")]
    if len(with_samples) < 2:
        return []
    first, last = with_samples[0], with_samples[-1]
    after, threshold = dict(_keyed(last["samples"])), right_from(first, last)
    return [_pair(sample, after[key], threshold) for key, sample in _keyed(first["samples"]) if key in after]


def _keyed(samples: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, int], dict[str, Any]]]:
    seen: dict[tuple[str, str], int] = {}
    for sample in samples:
        key = (str(sample.get("source")), f"{sample.get('prompt')} {sample.get('pictures') or ''}")
        seen[key] = seen.get(key, 0) + 1
        yield (*key, seen[key]), sample


def _pair(before: dict[str, Any], after: dict[str, Any], threshold: float) -> Pair:
    answer = before.get("answer")
    return Pair(
        prompt=str(before.get("prompt", "")),
        answer="" if answer is None else str(answer),
        before=str(before.get("completion", "")),
        after=str(after.get("completion", "")),
        pictures=tuple(map(str, before.get("pictures") or ())),
        score_before=score(before),
        score_after=score(after),
        threshold=threshold,
    )


def score(sample: Mapping[str, Any]) -> float:
    value = sample.get("score")
    return float(value) if isinstance(value, (int, float)) else math.nan


def facts(run: Path) -> dict[str, Any]:
    """Steps, time, tokens, reward and validation of a run, first and last; unmeasured ones are absent."""
    steps, validations = progress.stored(run / "metrics.jsonl"), progress.stored(run / "validation.jsonl")
    measured = [(v["step"], progress.validation_score(v)) for v in validations]
    scores = [(step, value) for step, value in measured if value is not None and math.isfinite(value)]
    name = progress.headline(steps[0]) if steps else "loss"
    result: dict[str, Any] = {"steps": int(steps[-1]["step"]) if steps else 0, "headline": name}
    curve = [record[name] for record in steps if math.isfinite(record.get(name, math.nan))]
    if curve:
        result[name] = {"first": curve[0], "last": curve[-1]}
    if scores:
        name = progress.validation_name(validations[-1])
        if name == "validation/all/score" and all(map(progress.is_share, validations)):
            name = "validation/all/pass@1"  # the same figure
        result["validation"] = {
            "first": scores[0][1],
            "first_step": scores[0][0],
            "last": scores[-1][1],
            "last_step": scores[-1][0],
            "best": (max if progress.rises(name) else min)(value for _, value in scores),
            "name": name.removeprefix("validation/"),
        }
    if idle := sum(map(progress.nothing_trained, steps)):
        result["idle"] = idle
    if failed := int(sum(sum(progress.failures(record).values()) for record in steps)):
        result["failed"] = failed
    for key, metric in SUMS.items():
        values = [record[metric] for record in steps if math.isfinite(record.get(metric, math.nan))]
        if values:
            result[key] = sum(values)
    return result


def figures(facts: Mapping[str, Any]) -> dict[str, float]:
    """The facts as numbers for trackers: {"steps": 30.0, "validation/best": 0.74, ...}."""
    flat: dict[str, float] = {}
    for key in ("headline", "validation", "steps", "seconds", "generated", "trained", "learned"):
        name = facts.get("headline", "") if key == "headline" else key
        value = facts.get(name)
        parts = value if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}/{part}".rstrip("/"): float(v) for part, v in parts.items() if isinstance(v, (int, float))}
    return flat


def lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and text of each fact."""
    if v := facts.get("validation"):
        label = "validation" if progress.rises(v["name"]) else f"held-out {v['name']}"
        best = f"({change(v)}, best {decimal(v['best'])})"
        yield label, f"{decimal(v['first'])} before  ->  {decimal(v['last'])} after  {best}"
    name = facts.get("headline", "loss")
    if curve := facts.get(name):
        label = "reward" if name == "reward/mean" else name
        yield label, f"{decimal(curve['first'])} first step  ->  {decimal(curve['last'])} last step"
    if "idle" in facts:
        yield "warning", progress.idle_words(facts["idle"], facts["steps"])
    if "failed" in facts:
        yield "failed", f"{counted(facts['failed'], 'episode')}, without a reward: `detail` of rollouts.jsonl says why"
    if "seconds" in facts:
        yield "time", f"{duration(facts['seconds'])} for {counted(facts['steps'], 'step')}"
    if "generated" in facts:
        yield "tokens", f"{count(facts['generated'])} generated, {trained_on(facts)}"


def trained_on(facts: Mapping[str, Any]) -> str:
    """Tokens of prompts are computed with each answer but not trained on: both figures are shown."""
    trained = f"{count(facts.get('trained', 0))} trained on"
    return f"{trained}: {count(facts['learned'])} of answers, the rest prompts" if "learned" in facts else trained


def change(validation: Mapping[str, Any]) -> str:
    """Change from the first validation to the last, in points if it is a share."""
    rise = validation["last"] - validation["first"]
    return f"{100 * rise:+.1f} points" if validation["name"].endswith(("/pass@1", "accuracy")) else decimal(rise, "+")


def shown(all_pairs: list[Pair], number: int) -> list[Pair]:
    """A few pairs to show: answers that became right, and always one that became wrong, if there is one. Equal pairs
    are shown once."""
    all_pairs = list({(pair.prompt, pair.before, pair.after): pair for pair in all_pairs}.values())
    better = [pair for pair in all_pairs if pair.change > 0]
    worse = [pair for pair in all_pairs if pair.change < 0][:1]
    same = [pair for pair in all_pairs if pair.change == 0]
    return [*better[: number - len(worse)], *worse, *same][:number]


def tally(all_pairs: list[Pair]) -> str:
    """Counts of changes, for pairs with the same threshold."""
    right = sum(pair.change > 0 for pair in all_pairs)
    wrong = sum(pair.change < 0 for pair in all_pairs)
    threshold = all_pairs[0].threshold if all_pairs else 1.0
    if math.isnan(threshold):
        same = len(all_pairs) - right - wrong
        return f"of {len(all_pairs)} answers {right} score higher, {wrong} lower, {same} the same"
    kept = sum(pair.change == 0 and pair.score_after >= threshold for pair in all_pairs)
    neither = len(all_pairs) - right - wrong - kept
    changed = f"of {len(all_pairs)} answers {right} became right, {wrong} became wrong"
    rule = f" (right: a score of at least {threshold:g})" if threshold != 1 else ""
    return f"{changed}, {kept} stayed right, {neither} stayed wrong{rule}"


def closing(
    run: Path, shown_as: Path, title: str, facts: Mapping[str, Any], report: Path | None, ascii_only: bool
) -> Iterator[RenderableType]:
    """The final output of a run in the terminal."""
    how = "done" if facts.get("finished", True) else f"stopped after step {facts.get('step', 0)}"
    yield Text(f"\n{visible(title)}: {how}", style="bold")
    grid = Table.grid(padding=(0, 2))
    for label, words in [*lines(facts), ("run folder", str(shown_as)), *([("report", str(report))] if report else [])]:
        grid.add_row(Text("  " + label, style="bright_black"), Text(words, overflow="fold"))
    yield grid
    all_pairs = pairs(progress.stored(run / "validation.jsonl"))
    if all_pairs:
        yield Text(f"\n{tally(all_pairs)}; for example")
        yield _side_by_side(shown(all_pairs, 3), ascii_only)
    commands = [str(command) for command in facts.get("next") or []]
    if commands:
        yield Text("\nnext", style="bold")
        yield Text("\n".join("  " + visible(command) for command in commands))


def _side_by_side(chosen: list[Pair], ascii_only: bool) -> Table:
    table = Table(
        box=box.ASCII if ascii_only else box.ROUNDED, border_style="bright_black", show_lines=True, expand=True
    )
    for name in ("prompt", "before", "after"):
        table.add_column(name, ratio=1, overflow="fold")
    for pair in chosen:
        prompt = _clipped(pair.prompt) + (f"\n[{_clipped(pair.answer)}]" if pair.answer else "")
        sides = (_judged(pair.before, pair.score_before, pair), _judged(pair.after, pair.score_after, pair))
        table.add_row(Text(prompt), *sides)
    return table


def _judged(text: str, value: float, pair: Pair) -> Text:
    judged = Text(f"{told(value, pair.threshold)} ", style=f"bold {STYLES[verdict(value, pair.threshold)]}")
    return judged.append(_clipped(text), style="default")


def told(value: float, threshold: float) -> str:
    """A score as text: right, wrong, score 0.732, right (score 0.732), not scored."""
    kind = verdict(value, threshold)
    if kind == "unscored":
        return "not scored"
    figure = f"score {decimal(value)}" if not kind or value not in (0, 1) else ""
    return f"{kind} ({figure})" if kind and figure else kind or figure


def _clipped(text: str, most: int = 240) -> str:
    """Start and end, as the answer is usually at the end."""
    text = visible(text.strip())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
