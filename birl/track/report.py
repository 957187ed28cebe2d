"""report.html: a self-contained report of a run, made from the files of its folder only."""

import base64
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from birl.regular import read_bytes, write_whole
from birl.track.charts import Charts, Line, escape, line
from birl.track.figures import TABLE, figure, headed, ordered
from birl.track.panel import PHASES
from birl.track.progress import headline, idle_words, numbers, rises, source, stored
from birl.track.runs import summary
from birl.track.sink import hidden
from birl.track.summary import Pair, change, facts, pairs, shown, tally, told, trained_on, verdict
from birl.track.units import count, counted, decimal, duration
from birl.types import PICTURES, Outcome, Picture

PAIRS_SHOWN = 12
PICTURES_SHOWN, PICTURE_BYTES = 4, 2**18  # for each prompt, and size of each
CHARTS = ("entropy", "kl", "length/mean", "grad_norm", "clip_fraction", "speed/generate", "mismatch/mean")
Records = list[dict[str, Any]]


def write_report(run: Path) -> Path:
    """Write `run`/report.html; returns its path."""
    path = Path(run) / "report.html"
    write_whole(path, report(Path(run)).encode("utf-8", "replace"))
    return path


def report(run: Path) -> str:
    """The report as HTML, also for an unfinished run."""
    steps, validations = stored(run / "metrics.jsonl"), stored(run / "validation.jsonl")
    kept = {key: value for key, value in summary(run).items() if value is not None}
    result = {key: kept[key] for key in ("ended", "finished") if key in kept} | facts(run)
    if isinstance(spent := kept.get("seconds"), float):  # of all its processes, as in the terminal
        result["seconds"] = spent
    title = str(kept.get("title") or run.name)
    charts = Charts()
    body = [
        _head(run, title, result),
        _curves(charts, steps, validations),
        _samples(run, pairs(validations)),
        _counts(steps),
        _next(kept.get("next"), bool(kept.get("finished"))),
        _config(run / "config.yaml"),
        _others(charts, steps, validations),
    ]
    return charts.page(title, "".join(body))


def _head(run: Path, title: str, facts: Mapping[str, Any]) -> str:
    cards = [_fact(*card) for card in _fact_cards(facts)]
    state = "not finished"
    if "ended" in facts:
        verb = "finished" if facts.get("finished") else "stopped"
        state = f"{verb} {escape(facts['ended'])[:16].replace('T', ' ')} UTC"
    idle = f"<p><b>Warning:</b> {idle_words(facts['idle'], facts['steps'])}.</p>" if facts.get("idle") else ""
    return (
        f'<h1>{escape(title)}</h1><p class="muted">{escape(run)} · {state}</p>{idle}'
        f'<div class="facts">{"".join(cards)}</div>'
    )


def _fact_cards(facts: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    if v := facts.get("validation"):
        label = "validation" if rises(v["name"]) else f"held-out {v['name']}"
        note = f"{label}, step {v['first_step']} → {v['last_step']} ({change(v)})"
        yield decimal(v["first"]), decimal(v["last"]), note
    name = facts.get("headline", "loss")
    if curve := facts.get(name):
        label = "training reward" if name == "reward/mean" else "training loss"
        yield decimal(curve["first"]), decimal(curve["last"]), f"{label}, first → last step"
    yield "", duration(facts["seconds"]) if "seconds" in facts else "?", f"for {counted(facts.get('steps', 0), 'step')}"
    if "generated" in facts:
        yield "", count(facts["generated"]), f"tokens generated, {trained_on(facts)}"


def _fact(before: str, value: str, note: str) -> str:
    before = f"<i>{escape(before)} → </i>" if before else ""
    return f'<div class="fact"><b>{before}{escape(value)}</b><span>{escape(note)}</span></div>'


def _curves(charts: Charts, steps: Records, validations: Records) -> str:
    if not steps and not validations:
        return '<p class="muted">No step was finished.</p>'
    name = headline(steps[0]) if steps else "loss"
    tested = [line(metric, validations, metric.removeprefix("validation/")) for metric in _tested(validations)]
    drawn = [
        charts.draw("Training reward [reward]" if name == "reward/mean" else "Training loss", _lines(name, steps)),
        charts.draw("Validation", tested),
        *(
            charts.draw(headed(row.title, row.unit), _lines(row.name, steps), about=_about(row.name, steps))
            for row in map(figure, CHARTS)
        ),
        charts.draw("Where the time goes [s per step]", _time_series(steps), stacked=True),
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(drawn)}</div>'


def _together(name: str) -> dict[str, str]:
    """The figures that share a chart with `name`, each with the label of its line."""
    return {row.name: row.line for row in TABLE.values() if row.title == figure(name).title}


def _about(name: str, steps: Records) -> str:
    """The sentence of the first figure of this chart that the run has."""
    return next((figure(one).about for one in _together(name) if any(one in record for record in steps)), "")


def _lines(name: str, steps: Records) -> list[Line]:
    lines = [line(one, steps, label) for one, label in _together(name).items()]
    return [one for one in lines if one[1]]


def _tested(validations: Records) -> list[str]:
    """Validation metrics that share an axis: mean scores, and pass@k if it differs. A single source equals `all` and is
    left out."""
    names = list(dict.fromkeys(name for record in validations for name in numbers(record)))
    names = [name for name in names if name.endswith("/score") or "/pass@" in name]
    twice = {
        n
        for n in names
        if n.endswith("/pass@1") and all(r.get(n) == r.get(f"validation/{source(n)}/score") for r in validations)
    }
    several = len({source(name) for name in names} - {"all"}) > 1
    total = any(source(name) == "all" for name in names)
    return [n for n in names if n not in twice and (several or source(n) == "all" or not total)]


def _time_series(steps: Records) -> list[Line]:
    """Only parts that took time; if a step lacks one, it took none."""
    at = [record["step"] for record in steps]
    parts = {part: [record.get(f"time/{part}", 0.0) for record in steps] for part in PHASES}
    return [(part, at, values) for part, values in parts.items() if any(v > 0 for v in values)]


def _samples(run: Path, all_pairs: list[Pair]) -> str:
    if not all_pairs:
        return ""
    first = shown(all_pairs, PAIRS_SHOWN)
    rest = [pair for pair in all_pairs if pair not in first]
    side_by_side = partial(_side_by_side, run)
    inside = f'<div class="inside">{"".join(map(side_by_side, rest))}</div>'
    more = f"<details><summary>{len(rest)} more</summary>{inside}</details>"
    body = "".join(map(side_by_side, first)) + (more if rest else "")
    return f'<h2>Before and after</h2><p class="muted">First and last validation: {escape(tally(all_pairs))}.</p>{body}'


def _pictures(run: Path, pair: Pair) -> str:
    """Pictures of a prompt, embedded in the page, unless a file is large or missing."""
    result = []
    for name in pair.pictures[:PICTURES_SHOWN]:
        path = run / PICTURES / Path(name).name
        if path.is_file() and path.stat().st_size <= PICTURE_BYTES:
            picture = Picture.of(read_bytes(path))
            data = base64.b64encode(picture.data).decode("ascii")
            result.append(f'<img alt="" style="max-height:10em" src="data:{picture.media_type};base64,{data}">')
    return "".join(result)


def _side_by_side(run: Path, pair: Pair) -> str:
    answer = f' <span class="muted">→ {escape(pair.answer)}</span>' if pair.answer else ""
    asked = f'{_pictures(run, pair)}<div class="prompt text">{escape(pair.prompt)}{answer}</div>'
    before = _side("before", pair.before, pair.score_before, pair.threshold)
    sides = before + _side("after", pair.after, pair.score_after, pair.threshold)
    return f'<div class="pair">{asked}<div class="answers">{sides}</div></div>'


def _side(when: str, text: str, score: float, threshold: float) -> str:
    score_line = f'<div class="judged">{when}: {told(score, threshold)}</div>'
    kind = verdict(score, threshold) or "unscored"
    return f'<div class="side {kind}">{score_line}<div class="text">{escape(text)}</div></div>'


def _counts(steps: Records) -> str:
    total = {name: _sum(steps, f"outcome/{name}") for name in ("asked", *Outcome)}
    if not total["asked"]:
        return ""
    rows = [(name, count(total[name]), f"{100 * total[name] / total['asked']:.1f} %") for name in Outcome]
    note = "Every episode that was asked for ended in exactly one of these."
    if sum(total[name] for name in Outcome) != total["asked"]:
        note = "These do not add up: please report it."
    groups = [(n.replace("_", " "), count(_sum(steps, f"groups/{n}")), "") for n in ("kept", "no_signal", "refilled")]
    tables = _table(("episodes", count(total["asked"]), ""), rows) + _table(("groups", "", ""), groups)
    return f'<h2>Outcomes</h2><p class="muted">{note}</p><div class="tables">{tables}</div>'


def _sum(steps: Records, name: str) -> float:
    values = [record.get(name, 0.0) for record in steps]
    return sum(value for value in values if math.isfinite(value))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="box"><table><tr>{top}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _next(commands: Any, finished: bool) -> str:
    lines = "\n".join(map(str, commands if isinstance(commands, list) else []))
    note = "" if finished else "<p>Start the same command again: the run goes on from its newest checkpoint.</p>"
    return f'<h2>How to go on</h2>{note}<div class="box"><pre>{escape(lines)}</pre></div>' if lines else note


def _config(path: Path) -> str:
    if not path.exists():
        return ""
    text = hidden(read_bytes(path).decode("utf-8", "replace"))  # a report is shared
    return f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>"


def _others(charts: Charts, steps: Records, validations: Records) -> str:
    """A chart for each metric that has none yet, unknown ones included, unless it was always zero."""
    known = {name for first in (*CHARTS, "reward/mean") for name in _together(first)} | set(_tested(validations))
    drawn = []
    for records in (steps, validations):
        names = list(dict.fromkeys(name for record in records for name in numbers(record)))
        names = [name for name in names if name not in known and any(record.get(name) for record in records)]
        for row in ordered(names):
            drawn.append(charts.draw(row.heading, [line(row.name, records, row.name)], about=row.about, points=100))
    inside = f'<div class="inside"><div class="charts">{"".join(drawn)}</div></div>'
    summary = f"<details><summary>{len(drawn)} more curves</summary>{inside}</details>"
    return f"<h2>Everything else</h2>{summary}" if drawn else ""
