"""What became of every sampled token: `ledger.jsonl` in the run folder, append-only, so that it survives crashes and
resumes.

    {"life": 1, "event": "began", "step": 0}                                    a process started or resumed the run
    {"life": 1, "event": "sampled", "group": 7, "tokens": 412}                  a group was rolled out
    {"life": 1, "event": "settled", "step": 2, "group": 7, "tokens": {"trained": 400, "timeout": 12}}

A token is trained once, or it is counted under the reason why not: `no_gradient` (its answer's advantage is 0; it
counts in the denominator), `masked`, `frozen` (sampled by an earlier version of a policy), `refused` (the group had no
signal), an outcome such as `timeout`, `redone` (trained by a life whose steps after the last checkpoint were lost, then
sampled anew), `abandoned` (its process ended first) or `open` (still waiting). `audit` checks that the sums agree and
that nothing was trained twice.
"""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.regular import parse_json, read_bytes
from birl.rollout.assemble import Usage
from birl.track.log import JsonLog, numbered
from birl.types import Group, Outcome, Sample, Trajectory
from birl.visible import visible

FILE = "ledger.jsonl"
FIELDS = {  # whole numbers that a row of each event has
    "began": ("life", "step"),
    "sampled": ("life", "group", "tokens"),
    "settled": ("life", "step", "group"),
}


def sampled(trajectory: Trajectory) -> int:
    """Tokens that the model generated in one episode."""
    return sum(len(turn.completion.tokens) for turn in trajectory.turns)


class Ledger:
    """Writes the file. A life is one process, from its start to its end."""

    def __init__(self, run: Path, step: int) -> None:
        """`step`: of the checkpoint that this life resumes from; 0 without one."""
        path = run / FILE
        self.totals: Counter[str] = Counter()
        self.log = JsonLog(path)
        self.log.cut(sys.maxsize)  # removes a line that a crash cut
        self.life = 1 + max((lives(line) for line in read_bytes(path).split(b"\n")), default=0)
        self._write({"event": "began", "step": step})

    def rolled_out(self, group: Group) -> int:
        """Record a group that was rolled out; returns its tokens."""
        tokens = sum(map(sampled, group.trajectories))
        self.totals["sampled"] += tokens
        self._write({"event": "sampled", "group": group.index, "tokens": tokens})
        return tokens

    def settle(self, step: int, groups: Sequence[Group], refused: Iterable[Group], settled: dict[int, Counter[str]]):
        rows = [(g.index, settled[g.index]) for g in groups]
        rows += [(g.index, Counter(refused=sum(map(sampled, g.trajectories)))) for g in refused]
        for index, tokens in rows:
            self.totals.update(tokens)
            self._write({"event": "settled", "step": step, "group": index, "tokens": dict(+tokens)})

    def close(self) -> None:
        self.log.close()

    def _write(self, row: dict[str, object]) -> None:
        self.log.append([{"life": self.life, **row}])


def settle(groups: Sequence[Group], usage: Usage, trained: Iterable[tuple[Sample, bool]]) -> dict[int, Counter[str]]:
    """Group index -> tokens by what became of them. `trained`: samples of the step, and whether each has a gradient."""
    used: dict[tuple[int, int], Counter[str]] = {}
    for sample, gradient in trained:
        mine = used.setdefault((sample.group, sample.episode), Counter())
        mine["trained" if gradient else "no_gradient"] += int(sample.mask.sum())
    result: dict[int, Counter[str]] = {}
    for group in groups:
        good = set(usage.usable(group))
        tokens = result.setdefault(group.index, Counter())
        for i, trajectory in enumerate(group.trajectories):
            mine = used.get((group.index, i), Counter())
            tokens.update(mine)
            rest = sampled(trajectory) - mine.total()
            if i in good:
                frozen = sum(len(turn.completion.tokens) for turn in trajectory.turns if turn.frozen)
                tokens["frozen"] += frozen
                rest -= frozen
                reason = "masked"
            elif trajectory.outcome in (Outcome.OK, Outcome.TRUNCATED):
                reason = (
                    "truncated" if trajectory.outcome is Outcome.TRUNCATED and usage.truncated == "drop" else "group"
                )
            else:
                reason = str(trajectory.outcome)
            tokens[reason] += rest
    return result


@dataclass(slots=True)
class Audit:
    """`tokens` by what became of them; `problems` is empty if all sums agree."""

    sampled: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    problems: list[str] = field(default_factory=list)


def audit(run: Path) -> Audit:
    """Read and check a run's ledger. Raises `OSError` if there is none."""
    rows = [checked(run / FILE, number, row) for number, row in numbered(run / FILE)]
    result = Audit(lives=max((row["life"] for row in rows), default=0))
    began = {row["life"]: row["step"] for row in rows if row["event"] == "began"}
    order = sorted(began)
    kept = [*accumulate((began[life] for life in reversed(order)), min)][::-1]  # first step of this life and later ones
    open_tokens: dict[tuple[int, int], int] = {}
    trained_in: dict[int, int] = {}
    for row in rows:
        life, group = row["life"], row.get("group", -1)
        if row["event"] == "sampled":
            open_tokens[life, group] = open_tokens.get((life, group), 0) + row["tokens"]
            result.sampled += row["tokens"]
        elif row["event"] == "settled":
            have, settled = open_tokens.pop((life, group), None), sum(row["tokens"].values())
            if have != settled:
                result.problems.append(
                    f"life {life}, step {row['step']}: group {group} sampled {have} tokens, settled {settled}"
                )
            if (later := bisect_right(order, life)) < len(kept) and row["step"] > kept[later]:
                result.tokens["redone"] += settled
                continue
            if group in trained_in:
                result.problems.append(
                    f"group {group} was settled in step {trained_in[group]} and in step {row['step']}"
                )
            trained_in[group] = row["step"]
            result.tokens.update(row["tokens"])
    for (life, _), tokens in open_tokens.items():
        result.tokens["open" if life == result.lives else "abandoned"] += tokens
    if result.sampled != result.tokens.total():
        result.problems.append(f"{result.sampled} tokens were sampled, {result.tokens.total()} are accounted for")
    return result


def lives(line: bytes) -> int:
    """The life of a line; 0 if it is damaged (`audit` reports it, a run ignores it)."""
    try:
        row = parse_json(line)
    except ValueError:
        return 0
    return row["life"] if isinstance(row, dict) and _is_whole(row.get("life")) else 0


def checked(path: Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """The row, if it has the fields of its event. Raises `BirlError` that names line and field."""
    event = row.get("event")
    wanted = FIELDS.get(event) if isinstance(event, str) else None
    bad = "event" if wanted is None else next((name for name in wanted if not _is_whole(row.get(name))), "")
    if event == "settled" and not bad:
        tokens = row.get("tokens")
        bad = "" if isinstance(tokens, dict) and all(map(_is_whole, tokens.values())) else "tokens"
    if bad:
        raise BirlError(
            f"{path}, line {number}: `{bad}` is missing or has another type than in a ledger. The line is damaged: "
            "delete it to read the rest, which then may not close."
        )
    return row


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def run(words: Sequence[str]) -> int:
    """`birl ledger RUN`."""
    if len(words) != 1:
        raise BirlError("Name a run folder, as in `birl ledger runs/NAME`")
    folder = words[0]
    try:
        result = audit(Path(folder))
    except OSError as error:
        raise BirlError(
            f"{folder} has no {FILE}: {error.strerror}. `birl rl` writes it into its run folder (`birl runs`)."
        ) from error
    print(f"{result.sampled:>12,}  tokens sampled, by {result.lives} process{'es' * (result.lives != 1)}")
    for reason, tokens in result.tokens.most_common():
        print(visible(f"{tokens:>12,}  {reason}"))
    for problem in result.problems:
        print(visible(f"birl: {problem}"), file=sys.stderr)
    print("The ledger does not close." if result.problems else "The ledger closes.")
    return 1 if result.problems else 0
