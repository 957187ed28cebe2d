"""`birl trace RUN`: breakdown of a run's time in the terminal, and its trace for Chrome or Perfetto."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from birl.errors import BirlError
from birl.flags import Flag, taken
from birl.regular import check_target, writing
from birl.track.limit import limit, phrase
from birl.track.runs import config
from birl.track.shares import Shares, shares_of
from birl.track.timeline import Timeline, joined, steps_of
from birl.track.units import count, duration
from birl.visible import visible

USAGE = (
    "Usage: birl trace RUN [--output FILE.json]\n\n"
    "Shows the time of a run: the share of each wait in every process, and which side limits it. RUN may still be\n"
    "running. chrome://tracing and ui.perfetto.dev open RUN/trace.json; --output writes that of all ranks to one file."
)
OUTPUT = Flag(
    name="--output", value="FILE", takes="a file, as in `birl trace runs/demo --output trace.json`", read=Path
)
SMALL = 0.005  # smaller shares are not shown


def run(words: list[str]) -> int:
    flags, named = taken("trace", words, (OUTPUT,))
    if len(named) != 1:
        raise BirlError("birl trace takes one run, as in `birl trace runs/demo`")
    folder, output = Path(named[0]), flags.get(OUTPUT.name)
    if not folder.is_dir():
        raise BirlError(f"There is no folder {folder}. Name a run, as in `birl trace runs/demo`.")
    timeline = Timeline(folder)
    timeline.read()
    for line in describe(timeline):
        print(line)
    if output is not None:
        with writing(output):
            check_target(output)
            with output.open("wb") as file:
                file.writelines(joined(folder))
        print(f"\n{count(len(timeline))} spans in {output}: open it in chrome://tracing or https://ui.perfetto.dev.")
    return 0


def describe(timeline: Timeline) -> Iterator[str]:
    """Lines of the text summary."""
    for place in timeline.broken[:3]:
        yield f"warning: {place} is no span and was passed over"
    shares = shares_of(timeline, steps_of(timeline))
    result = limit(shares, config(timeline.run))
    if shares is not None:
        first, last = shares.steps
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        yield f"{visible(timeline.run.name)}: {which}, {duration(shares.seconds)} in all"
        yield ""
        yield from table(shares)
        yield ""
    yield from wrap(result.sentence, 100)


def table(shares: Shares) -> Iterator[str]:
    """Lines of the table: shares of the time by process."""
    blocks = {"learner": shares.learner, **shares.processes}
    if shares.episodes:
        blocks["episodes (of their own time)"] = {
            name if name == "engine" else f"wait:{name}": share for name, share in shares.episodes.items()
        }
    for process, its in blocks.items():
        rows = [(name, share) for name, share in its.items() if share >= SMALL]
        for i, (name, share) in enumerate(rows):
            label, words = visible(process) if i == 0 else "", visible(phrase(name))
            yield f"{label:<32}{share:>6.1%}  {bar(share)}  {words}".rstrip()


def bar(share: float, width: int = 20) -> str:
    """Bar of plain ASCII. Example: bar(0.5, 4) == "##.." """
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "#" * filled + "." * (width - filled)
