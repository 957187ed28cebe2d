"""What a run came to, from the files of its folder, and how the terminal says it at the end."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from birl.track.progress import headline, is_share, stored, validation_name, validation_score
from birl.track.units import count, decimal, duration
from birl.track.visible import visible

SUMS = {
    "seconds": "time/step",
    "generated": "tokens/generated",
    "trained": "tokens/trained",
    "learned": "tokens/learned",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One answer to the same prompt at the first and at the last validation. Right: a score of at least 1."""

    prompt: str
    answer: str
    before: str
    after: str
    score_before: float
    score_after: float

    @property
    def change(self) -> int:
        """1: became right, -1: became wrong, 0: neither."""
        return int(self.score_after >= 1) - int(self.score_before >= 1)


def pairs(validations: list[dict[str, Any]]) -> list[Pair]:
    """Samples of the first validation with those of the last, matched by prompt and by their order within it."""
    with_samples = [record for record in validations if record.get("samples")]
    if len(with_samples) < 2:
        return []
    last = dict(_keyed(with_samples[-1]["samples"]))
    return [_pair(sample, last[key]) for key, sample in _keyed(with_samples[0]["samples"]) if key in last]


def _keyed(samples: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, int], dict[str, Any]]]:
    seen: dict[tuple[str, str], int] = {}
    for sample in samples:
        key = (str(sample.get("source")), str(sample.get("prompt")))
        seen[key] = seen.get(key, 0) + 1
        yield (*key, seen[key]), sample


def _pair(before: dict[str, Any], after: dict[str, Any]) -> Pair:
    answer = before.get("answer")
    return Pair(
        prompt=str(before.get("prompt", "")),
        answer="" if answer is None else str(answer),
        before=str(before.get("completion", "")),
        after=str(after.get("completion", "")),
        score_before=score(before),
        score_after=score(after),
    )


def score(sample: Mapping[str, Any]) -> float:
    value = sample.get("score")
    return float(value) if isinstance(value, (int, float)) else math.nan


def facts(run: Path) -> dict[str, Any]:
    """Steps, time, tokens, reward and validation of a run, first and last. A figure that was not measured is absent."""
    steps, validations = stored(run / "metrics.jsonl"), stored(run / "validation.jsonl")
    measured = [(v["step"], validation_score(v)) for v in validations]
    scores = [(step, value) for step, value in measured if value is not None and math.isfinite(value)]
    name = headline(steps[0]) if steps else "loss"
    found: dict[str, Any] = {"steps": int(steps[-1]["step"]) if steps else 0, "headline": name}
    curve = [record[name] for record in steps if math.isfinite(record.get(name, math.nan))]
    if curve:
        found[name] = {"first": curve[0], "last": curve[-1]}
    if scores:
        found["validation"] = {
            "first": scores[0][1],
            "first_step": scores[0][0],
            "last": scores[-1][1],
            "last_step": scores[-1][0],
            "best": (max if is_share(name := validation_name(validations[-1])) else min)(value for _, value in scores),
            "name": name.removeprefix("validation/"),
        }
    for key, metric in SUMS.items():
        values = [record[metric] for record in steps if math.isfinite(record.get(metric, math.nan))]
        if values:
            found[key] = sum(values)
    return found


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """The facts as trackers keep them, one number each: {"steps": 30.0, "validation/best": 0.74, ...}."""
    flat: dict[str, float] = {}
    for key in ("headline", "validation", "steps", "seconds", "generated", "trained", "learned"):
        name = found.get("headline", "") if key == "headline" else key
        value = found.get(name)
        parts = value if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}/{part}".rstrip("/"): float(v) for part, v in parts.items() if isinstance(v, (int, float))}
    return flat


def lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and words for each fact."""
    if v := found.get("validation"):
        label = "validation" if is_share(v["name"]) else f"held-out {v['name']}"
        best = f"({change(v)}, best {decimal(v['best'])})"
        yield label, f"{decimal(v['first'])} before  ->  {decimal(v['last'])} after  {best}"
    name = found.get("headline", "loss")
    if curve := found.get(name):
        label = "reward" if name == "reward/mean" else name
        yield label, f"{decimal(curve['first'])} first step  ->  {decimal(curve['last'])} last step"
    if "seconds" in found:
        yield "time", f"{duration(found['seconds'])} for {count(found['steps'])} steps"
    if "generated" in found:
        yield "tokens", f"{count(found['generated'])} generated, {trained_on(found)}"


def trained_on(found: Mapping[str, Any]) -> str:
    """Prompts are computed with each answer, and nothing is learned from them: both figures are told."""
    trained = f"{count(found.get('trained', 0))} trained on"
    return f"{trained}: {count(found['learned'])} of answers, the rest prompts" if "learned" in found else trained


def change(validation: Mapping[str, Any]) -> str:
    """From the first validation to the last, in points where it is a share."""
    rise = validation["last"] - validation["first"]
    return f"{100 * rise:+.1f} points" if is_share(validation["name"]) else decimal(rise, "+")


def shown(all_pairs: list[Pair], number: int) -> list[Pair]:
    """A few pairs that hide no loss: answers that became right, and always one that became wrong, if there is one."""
    better = [pair for pair in all_pairs if pair.change > 0]
    worse = [pair for pair in all_pairs if pair.change < 0][:1]
    same = [pair for pair in all_pairs if pair.change == 0]
    return [*better[: number - len(worse)], *worse, *same][:number]


def tally(all_pairs: list[Pair]) -> str:
    right = sum(pair.change > 0 for pair in all_pairs)
    wrong = sum(pair.change < 0 for pair in all_pairs)
    kept = sum(pair.change == 0 and pair.score_after >= 1 for pair in all_pairs)
    neither = len(all_pairs) - right - wrong - kept
    changed = f"of {len(all_pairs)} answers {right} became right, {wrong} became wrong"
    return f"{changed}, {kept} stayed right, {neither} stayed wrong"


def closing(
    run: Path, title: str, found: Mapping[str, Any], report: Path | None, ascii_only: bool
) -> Iterator[RenderableType]:
    """The end of a run as the terminal shows it."""
    how = "done" if found.get("finished", True) else f"stopped after step {found.get('step', 0)}"
    yield Text(f"\n{visible(title)}: {how}", style="bold")
    grid = Table.grid(padding=(0, 2))
    for label, words in [*lines(found), ("run folder", str(run)), *([("report", str(report))] if report else [])]:
        grid.add_row(Text("  " + label, style="bright_black"), Text(words, overflow="fold"))
    yield grid
    all_pairs = pairs(stored(run / "validation.jsonl"))
    if all_pairs:
        yield Text(f"\n{tally(all_pairs)}; for example")
        yield _side_by_side(shown(all_pairs, 3), ascii_only)
    commands = [str(command) for command in found.get("next") or []]
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
        table.add_row(Text(prompt), _judged(pair.before, pair.score_before), _judged(pair.after, pair.score_after))
    return table


def _judged(text: str, value: float) -> Text:
    mark, style = ("right", "green") if value > 0.5 else ("wrong", "red")
    judged = Text(f"{mark} ", style=f"bold {style}") if math.isfinite(value) else Text("not scored ", style="bold")
    return judged.append(_clipped(text), style="default")


def _clipped(text: str, most: int = 240) -> str:
    """Start and end: the answer usually stands at the end."""
    text = visible(text.strip())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
