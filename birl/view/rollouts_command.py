"""`birl rollouts RUN "query"`: the page's search of rollouts in the terminal."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from birl.errors import BirlError
from birl.flags import Flag, taken, whole
from birl.regular import check_target, writing
from birl.visible import visible

if TYPE_CHECKING:
    from birl.view.search import Search

USAGE = (
    'Usage: birl rollouts RUN ["SQL condition"] [--text WORDS] [--limit N] [--export FILE.jsonl or FILE.csv]\n\n'
    "Lists the episodes of a run that match an SQL condition, as on the page of `birl view`:\n\n"
    "  birl rollouts runs/demo 'reward < 0.5 and step > 3 order by step desc'\n"
    "  birl rollouts runs/demo \"'repetition' in flags and step between 10 and 20\"\n"
    "  birl rollouts runs/demo \"outcome = 'truncated' order by tokens desc\" --limit 5\n"
    "  birl rollouts runs/demo 'reward >= 1' --text 'two words' --export found.csv\n\n"
    "--text: words in the prompt or the answer, case-insensitive. --limit: episodes to show (default 20; --export\n"
    "writes all). docs/rollouts.md has all columns and flags."
)
LIMIT = 20
SHAPE = "{row:>7} {step:>6} {outcome:<12} {reward:>8} {tokens:>6}  {flags:<12} {text}"


def _exported(text: str) -> Path:
    if (file := Path(text)).suffix not in (".jsonl", ".csv"):
        raise ValueError
    return file


WORDS = Flag(name="--text", value="WORDS", takes="words, as in `birl rollouts RUN --text 'two apples'`", read=str)
SHOWN = Flag(name="--limit", value="N", takes="a whole number, as in `birl rollouts RUN --limit 50`", read=whole)
EXPORT = Flag(name="--export", value="FILE", takes="a file that ends in .jsonl or .csv", read=_exported)


def run(words: list[str]) -> int:
    flags, named = taken("rollouts", words, (WORDS, SHOWN, EXPORT))
    if not named:
        raise BirlError("Name a run folder, as in `birl rollouts runs/NAME`; `birl runs` lists them.")
    folder, condition = Path(named[0]), " ".join(named[1:])
    limit, target = flags.get(SHOWN.name), flags.get(EXPORT.name)
    if not folder.is_dir():
        raise BirlError(f"There is no folder {folder}. Name a run, as in `birl rollouts runs/demo`.")
    from birl.view.episodes import Episodes
    from birl.view.query import Query
    from birl.view.search import Search

    search = Search(Episodes(folder / "rollouts.jsonl"), Query.parse(condition, flags.get(WORDS.name, "")))
    search.episodes.read_on()
    search.go_on()
    if search.episodes.skipped:
        line, why = next(iter(search.episodes.broken.items()), (0, ""))
        rest = f" So are {more} others." if (more := search.episodes.skipped - 1) else ""
        place = visible(f"{search.episodes.path}, line {line}: {why}")
        print(f"birl: {place}. It is left out; delete it to end this message.{rest}", file=sys.stderr)
    if target is not None:
        return _export(search, target, limit)
    _print(search, LIMIT if limit is None else limit)
    return 0


def _print(search: "Search", limit: int) -> None:
    from birl.view import flags
    from birl.view.episodes import OUTCOMES

    rows, episodes = search.rows, search.episodes
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 10_000
    names = ("row", "step", "outcome", "reward", "tokens", "flags", "text")
    print(SHAPE.format(**{name: name for name in names})[:width].rstrip())
    for row in rows[:limit].tolist():
        head, known = episodes.head(row), episodes.rows[row]
        text = " ".join(visible(flags.plain(str(head.get("text") or ""))).split())
        line = SHAPE.format(
            row=row,
            step=int(known["step"]),
            outcome=OUTCOMES[known["outcome"]],
            reward="-" if known["reward"] != known["reward"] else f"{known['reward']:.4g}",
            tokens=int(known["tokens"]),
            flags=",".join(name for name, _ in episodes.reasons(row, head)),
            text=text[:400],
        )
        print(line[:width].rstrip())
    more = f", {limit} shown (--limit N shows more)" if len(rows) > limit else ""
    print(f"{len(rows):,} of {episodes.count:,} episodes{more}")


def _export(search: "Search", target: Path, limit: int | None) -> int:
    from birl.view.search import lines

    rows = search.rows[:limit].tolist()
    result = lines(search.episodes, rows, target.suffix.removeprefix("."))
    if target.exists() and target.samefile(search.episodes.path):
        raise BirlError(f"{target} is the run's own file. Choose another name.")
    part = target.with_name(target.name + ".part")
    with writing(target):
        check_target(target)
        part.unlink(missing_ok=True)
        with part.open("wb") as file:
            file.writelines(result)
        os.replace(part, target)
    print(f"{len(rows):,} episodes in {target}")
    return 0
