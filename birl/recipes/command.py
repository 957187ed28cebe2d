"""`birl reproduce [NAME [--seed N] [--dry-run] [key=value ...]]`"""

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from birl.errors import STOPPED, BirlError, first_line
from birl.flags import Flag, taken, whole
from birl.jobs import Jobs
from birl.recipes.attempt import Attempt
from birl.recipes.band import Finding
from birl.recipes.recipe import Expectation, Recipe, find, names, read

FOLDER = Path("runs") / "reproduce"
SEED = Flag(name="--seed", value="N", takes="a whole number, as in --seed 1", read=whole)
DRY = Flag(name="--dry-run")


def run(words: Sequence[str]) -> int:
    """Returns the exit code: 0 within the band, 1 outside or nothing to compare, else of the command that failed."""
    name, seed, dry, more = _split(words)
    if not name:
        print("\n".join(_listed()))
        return 0
    recipe, root = find(name)
    seeds = [seed for expected in recipe.expected for seed in expected.seeds]
    seed = seed if seed is not None else min(seeds, default=0)
    here = Path.cwd()
    folder = here / FOLDER / recipe.name / f"seed-{seed}"
    attempt = Attempt(recipe=recipe, seed=seed, folder=folder, words=more, below=here if here == root else None)
    attempt.check()
    print("\n".join(_about(recipe, seed)))
    if dry:
        print(*(f"  birl {shlex.join(command)}" for _, command in attempt.commands()), sep="\n")
        return 0
    jobs = Jobs()
    with jobs.forwarding():
        code = reproduce(attempt, lambda command: jobs.start(command, folder=root))
    return 128 + jobs.stopped if code in STOPPED and jobs.stopped else code


def reproduce(attempt: Attempt, start: Callable[[Sequence[str]], int | None]) -> int:
    """Run the rest of an attempt by `start`, and print the comparison."""
    code = attempt.run(start)
    if code in STOPPED:
        print("birl reproduce: stopped; the same command goes on from here.", file=sys.stderr)
    elif code:
        print(f"birl reproduce: a stage ended with exit code {code}; its output is above.", file=sys.stderr)
    if code:
        return code
    result = attempt.findings()
    print("\n".join(_compared(attempt, result)))
    return 0 if result and all(finding.within for finding in result) else 1


def _split(words: Sequence[str]) -> tuple[str, int | None, bool, tuple[str, ...]]:
    """Parse the words: name, seed, --dry-run, and key=value words."""
    flags, rest = taken("reproduce", words, (SEED, DRY))
    more, names = [word for word in rest if "=" in word], [word for word in rest if "=" not in word]
    for word in more:
        key, _, value = word.partition("=")
        if key == "seed":
            raise BirlError(f"{word}: write --seed {value}")
        if key in ("run", "output"):
            raise BirlError(f"{word}: leave it out; results are in {FOLDER}/NAME/seed-N of the current folder.")
    if len(names) > 1:
        raise BirlError(f"birl reproduce takes one recipe at a time, got {', '.join(names)}")
    if not names and (more or flags):
        raise BirlError("Name a recipe; `birl reproduce` alone lists them")
    return "".join(names), flags.get(SEED.name), DRY.name in flags, tuple(more)


def _listed() -> Iterator[str]:
    for name, file in names().items():
        try:
            recipe = read(file, name)
        except BirlError as error:
            yield f"{name}\n{_indented(first_line(error))}\n"
            continue
        yield "\n".join([name, *map(_indented, (recipe.about, _cost(recipe), _promise(recipe)))]) + "\n"
    yield "birl reproduce NAME runs one; --dry-run says what it would do."


def _about(recipe: Recipe, seed: int) -> Iterator[str]:
    yield f"{recipe.name}, seed {seed}: {recipe.about}"
    yield _indented(_cost(recipe))
    yield _indented(_promise(recipe))
    if recipe.published:
        yield _indented(f"published: {recipe.published}")


def _indented(text: str) -> str:
    """Indent by two spaces, from the second line on by four."""
    width = max(40, min(shutil.get_terminal_size((120, 24)).columns, 120))
    return textwrap.fill(
        text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _cost(recipe: Recipe) -> str:
    stages = " -> ".join(stage.name for stage in recipe.stages)
    minutes = "" if recipe.minutes is None else f", about {recipe.minutes:g} min a seed"
    return f"{stages}; {recipe.hardware}{minutes}"


def _promise(recipe: Recipe) -> str:
    if recipe.not_run:
        return f"NOT RUN: {recipe.not_run}"
    return "expected: " + ", ".join(_figures(expected) for expected in recipe.expected)


def _figures(expected: Expectation) -> str:
    seeds = ", ".join(map(str, expected.seeds))
    those = f"(seed{'s' * (len(expected.seeds) > 1)} {seeds}; +-{expected.tolerance:g})"
    if expected.curves:
        return f"the curve of {expected.metric} {those}"
    low, high = min(expected.values.values()), max(expected.values.values())
    at = {"last": "", "first": " at first", "best": " at best"}.get(expected.step, f" at step {expected.step}")
    return f"{expected.metric}{at} {low:.3f}{f' to {high:.3f}' * (high > low)} {those}"


def _compared(attempt: Attempt, findings: list[Finding]) -> Iterator[str]:
    recipe = attempt.recipe
    yield ""
    if not findings:
        yield f"{recipe.name}, seed {attempt.seed}: no band to compare with, as it never ran before ({recipe.not_run})."
        yield f"  its figures are in {attempt.folder}"
        return
    heads = ("stage", "metric", "step", "band", "measured", "")
    rows = [(f.stage, f.metric, f.steps, f"{f.low:.3f} to {f.high:.3f}", *_verdict(f)) for f in findings]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    wrong = sum(not finding.within for finding in findings)
    changed = f" (changed by {' '.join(attempt.words)})" if attempt.words else ""
    verdict = f"OUTSIDE the band: {wrong} of {len(findings)} figures" if wrong else "within the band"
    yield f"\n{recipe.name}, seed {attempt.seed}{changed}: {verdict}"


def _verdict(finding: Finding) -> tuple[str, str]:
    missing = finding.measured != finding.measured
    return "none" if missing else f"{finding.measured:.3f}", "within" if finding.within else "OUTSIDE"
