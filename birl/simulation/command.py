"""`birl plan --simulate`: how to split GPUs into engines and learners, who waits for whom, and what asynchronous
training gains, from the measured times of the parts."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from birl.errors import BirlError
from birl.simulation.draws import Draws
from birl.simulation.events import Simulation, Split, engine_seconds
from birl.simulation.read import read
from birl.simulation.scenario import COMPONENTS, Scenario, source

SIXTEENTHS = (1, 2, 4, 6, 8, 10, 12, 14, 15)  # shares of the GPUs that generate, to begin with
LITTLE = 0.05  # of the time; less waiting is called balance


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one split came to, in the counted steps. Shares are of the time from the first to the last."""

    gpus: int
    engines: int
    learners: int
    shared: bool
    max_staleness: int
    prompts: int
    steps: int
    seconds_per_step: float
    answer_tokens_per_second: float
    trained_tokens_per_second: float
    engines_busy: float
    engines_waiting: float
    engines_waiting_for_environments: float
    engines_working_while_learners_wait: float
    sequences: float
    learners_busy: float
    learners_waiting: float
    learner_efficiency: float
    ideal_seconds: float
    of_ideal: float
    staleness_mean: float
    staleness_max: int
    engine_failures: int
    steps_done_again: int


def run(words: list[str], *, measured: str = "", as_json: bool = False) -> dict[str, Any]:
    """Print what the command says: tables, or JSON. `measured`: a file that holds a result too, to compare with."""
    scenario = read([*([measured] if measured else []), *words])
    if measured and not scenario.result.seconds_per_step:
        raise BirlError(f"{measured}: has no result.seconds_per_step to compare with.")
    compared = compare(scenario) if scenario.result.seconds_per_step else None
    rows = [row for gpus in scenario.run.gpus for row in sweep(scenario, gpus, _progress())]
    best = [best_of([r for r in rows if r.gpus == gpus]) for gpus in dict.fromkeys(scenario.run.gpus)]
    found = {
        "figures": {key: {"value": value, "source": source(scenario, key)} for key, value in figures(scenario)},
        "measured": compared,
        "configurations": [asdict(row) for row in rows],
        "best": [asdict(row) | {"advice": advice(row)} for row in best],
    }
    print(json.dumps(found, indent=1) if as_json else "\n".join(render(scenario, compared, rows, best)))
    return found


def sweep(scenario: Scenario, gpus: int, said: Callable[[str], None] = lambda text: None) -> list[Row]:
    """All splits at the first staleness; at each further one the splits beside the best, as long as that gets faster.
    First the synchronous way on shared GPUs, where generation and training take turns."""
    prompts = scenario.run.prompts or max(round(scenario.run.prompts_per_gpu * gpus), 1)
    draws = Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed)
    possible = splits(scenario, gpus)
    staleness = [e for e in scenario.run.max_staleness if e >= scenario.sync.every - 1]
    rows: dict[tuple[int, int], Row] = {}
    begun = [0]

    def row(engines: int, learners: int, most: int, shared: bool = False) -> Row:
        begun[0] += 1
        said(f"{gpus:,} GPUs, max_staleness {most}, {engines:,} engines + {learners:,} learners ({begun[0]})")
        split = Split(engines=engines, learners=learners, max_staleness=most, prompts=prompts, shared=shared)
        return simulate(scenario, split, gpus, draws)

    its, found = scenario, []
    if 0 in staleness and not its.run.engines and gpus >= max(its.engine.gpus, its.learner.gpus):
        found.append(row(gpus // its.engine.gpus, gpus // its.learner.gpus, 0, shared=True))
    if not staleness or not (possible or found):
        raise BirlError(
            f"{gpus} GPUs can not be split: an engine takes engine.gpus={its.engine.gpus}, a learner learner.gpus="
            f"{its.learner.gpus}."
            if staleness
            else f"sync.every={its.sync.every} needs run.max_staleness of at least {its.sync.every - 1}."
        )
    place = -1
    for most in staleness if possible else ():
        if place < 0:
            for at, split in enumerate(possible):
                rows[most, at] = row(*split, most)
        else:
            _climb(place, len(possible), lambda at, most=most: rows.setdefault((most, at), row(*possible[at], most)))
        place = min((at for m, at in rows if m == most), key=lambda at, most=most: rows[most, at].seconds_per_step)
    return found + [rows[key] for key in sorted(rows)]


def _climb(place: int, count: int, row: Callable[[int], Row]) -> None:
    """From `place` to the faster side, until it gets slower."""
    here = row(place).seconds_per_step
    for side in (1, -1):
        at, last = place + side, here
        while 0 <= at < count and (speed := row(at).seconds_per_step) < last:
            at, last = at + side, speed
        if last < here:
            return


def best_of(rows: list[Row]) -> Row:
    """The fastest; of those within 1 % of it the one with the least staleness."""
    bound = 1.01 * min(row.seconds_per_step for row in rows)
    return min((r for r in rows if r.seconds_per_step <= bound), key=lambda r: (r.max_staleness, r.seconds_per_step))


def splits(scenario: Scenario, gpus: int) -> list[tuple[int, int]]:
    """(engines, learners) that use `gpus` GPUs as far as they can, fewest engines first."""
    engine, learner = scenario.engine.gpus, scenario.learner.gpus
    wanted = scenario.run.engines or [gpus * share // 16 // engine for share in SIXTEENTHS]
    if not scenario.run.engines and gpus <= 8 * max(engine, learner):
        wanted = range(1, gpus // engine + 1)
    found: dict[tuple[int, int], None] = {}
    for engines in sorted(wanted):
        learners = (gpus - engines * engine) // learner
        if engines >= 1 and learners >= 1:
            engines = engines if scenario.run.engines else (gpus - learners * learner) // engine  # nothing lies idle
            found[engines, learners] = None
    return list(found)


def simulate(
    scenario: Scenario, split: Split, gpus: int, draws: Draws, watch: Callable[[], None] = lambda: None
) -> Row:
    """Bursts of the slots' size go round for long: counted is a whole number of them, after two."""
    turn = split.max_staleness + 1
    start = 2 * turn if split.max_staleness else 1
    counted = max(-(-8 // turn), 2) * turn
    if scenario.run.steps:
        start, counted = min(start, scenario.run.steps - 1), max(scenario.run.steps - start, 1)
    simulation = Simulation(scenario, split, draws, watch)
    simulation.run(start + counted)
    return row_of(simulation, gpus, start)


def row_of(simulation: Simulation, gpus: int, start: int) -> Row:
    """The first `start` steps are not counted."""
    scenario, split, steps = simulation.scenario, simulation.split, simulation.steps[start:]
    before = simulation.steps[start - 1] if start else None
    began = before.end if before else 0.0
    seconds = steps[-1].end - began
    done = {k: v - (before.engines[k] if before else 0.0) for k, v in steps[-1].engines.items()}
    machine = seconds * split.engines
    waited = sum(s.start - s.idle_from for s in steps)
    answers, tokens = sum(s.answers for s in steps), sum(s.tokens for s in steps)
    groups = sum(len(s.taken) for s in steps)
    least = engine_seconds(scenario, answers, groups * scenario.run.group_size, groups) / split.engines
    useful = tokens * scenario.learner.per_token / split.learners
    trained = sum(s.trained for s in steps)
    ideal = least + trained if split.shared else max(least, useful + scenario.learner.constant * len(steps))
    ages = [age for s in steps for age in s.staleness]
    return Row(
        gpus=gpus,
        engines=split.engines,
        learners=split.learners,
        shared=split.shared,
        max_staleness=split.max_staleness,
        prompts=split.prompts,
        steps=len(steps),
        seconds_per_step=seconds / len(steps),
        answer_tokens_per_second=answers / seconds,
        trained_tokens_per_second=tokens / seconds,
        engines_busy=done["busy"] / machine,
        engines_waiting=max(1 - (done["busy"] + done["held"]) / machine, 0.0),
        engines_waiting_for_environments=done["waited"] / machine,
        engines_working_while_learners_wait=sum(s.waited_busy for s in steps) / max(waited * split.engines, 1e-9),
        sequences=done["sequences"] / max(done["busy"], 1e-9),
        learners_busy=trained / seconds,
        learners_waiting=waited / seconds,
        learner_efficiency=useful / trained if trained else 1.0,
        ideal_seconds=ideal / len(steps),
        of_ideal=ideal / seconds,
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        engine_failures=int(done["failed"]),
        steps_done_again=simulation.rolled_back,
    )


def compare(scenario: Scenario) -> dict[str, float]:
    """The configuration whose time was measured, simulated."""
    result = scenario.result
    prompts = scenario.run.prompts
    if not prompts:
        raise BirlError("run.prompts: the prompts of a step of what was measured are not given.")
    split = Split(
        engines=result.engines,
        learners=result.learners,
        max_staleness=result.max_staleness,
        prompts=prompts,
        shared=result.shared,
    )
    if result.shared and result.max_staleness:
        raise BirlError("result.shared: on shared GPUs generation and training take turns; result.max_staleness is 0.")
    if result.max_staleness < scenario.sync.every - 1:
        raise BirlError(
            f"sync.every={scenario.sync.every} needs result.max_staleness={scenario.sync.every - 1} or more."
        )
    draws = Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed)
    seconds = simulate(scenario, split, 0, draws).seconds_per_step
    return {
        "measured_seconds_per_step": result.seconds_per_step,
        "simulated_seconds_per_step": seconds,
        "off": seconds / result.seconds_per_step - 1,
    }


def figures(scenario: Scenario) -> list[tuple[str, Any]]:
    """Every key of the parts that has an effect, with its value."""
    found = []
    for section in COMPONENTS:
        its = getattr(scenario, section)
        for name in (f.name for f in fields(its)):
            key, value = f"{section}.{name}", getattr(its, name)
            if name in HIDDEN.get(section, lambda its: ())(its):
                continue
            found.append((key, value))
    return found


#: what nothing reads, because of another key
HIDDEN: dict[str, Callable[[Any], tuple[str, ...]]] = {
    "engine": lambda its: ("base", "per_sequence") if its.table else ("table",),
    "episodes": lambda its: ("mean", "sigma", "max") if its.tokens else ("tokens",),
}


def advice(row: Row) -> str:
    """One sentence: what to change."""
    learners, engines = f"{row.learners_waiting:.0%}", f"{row.engines_waiting:.0%}"
    if row.shared:
        return "Generation and training take turns on the same GPUs; no split that was tried is faster."
    if max(row.learners_waiting, row.engines_waiting) < LITTLE:
        return "Balanced: nobody waits for long."
    if row.max_staleness == 0:
        return f"They take turns: learners wait {learners}, engines {engines} of the time; raise max_staleness."
    if row.learners_waiting >= row.engines_waiting:
        if row.engines_working_while_learners_wait < 0.5:
            return (
                f"A few long answers hold up the steps: learners wait {learners} of the time, and the engines work "
                f"{row.engines_working_while_learners_wait:.0%} of that; raise max_staleness or order_window."
            )
        return f"Add engines: learners wait {learners} of the time."
    if row.engines_waiting_for_environments > row.engines_waiting / 2:
        return f"Engines wait {engines} of the time, mostly for environments: more episodes at once, or fewer engines."
    if row.learner_efficiency < 0.5:
        return (
            f"Engines wait {engines} of the time, and more learners hardly help: {1 - row.learner_efficiency:.0%} of a "
            "training step is its constant part, the exchange of gradients and the longest sample."
        )
    return f"Add learners: engines wait {engines} of the time."


def render(scenario: Scenario, compared: dict[str, float] | None, rows: list[Row], best: list[Row]) -> list[str]:
    lines = ["Figures (a scenario file or section.key=value replaces them)"]
    lines += [f"  {key:<26}{_short(value):<40}{source(scenario, key)}" for key, value in figures(scenario)]
    if scenario.failures.hours_between:
        lines.append(f"  {'failures.hours_between':<26}{scenario.failures.hours_between:<40g}of one GPU")
    if compared:
        lines += [
            "",
            f"Measured {compared['measured_seconds_per_step']:.4g} s a step, simulated "
            f"{compared['simulated_seconds_per_step']:.4g} s ({compared['off']:+.1%}).",
        ]
    for found in best:
        its = [r for r in rows if r.gpus == found.gpus]
        lines += [
            "",
            f"{found.gpus:,} GPU{'s' * (found.gpus > 1)}, {found.prompts:,} prompts x {scenario.run.group_size} a step",
            HEAD,
        ]
        lines += [_line(row, row is found) for row in its]
        lines += [_verdict(found, its), advice(found)]
    return lines


HEAD = "  engines learners stale     s/step      tok/s  engines learners of ideal  mean max stale  who waits"


def _line(row: Row, best: bool) -> str:
    learners = "the same" if row.shared else f"{row.learners:,}"
    return (
        f"{'*' if best else ' '} {row.engines:>7,} {learners:>8} {row.max_staleness:>5} {row.seconds_per_step:>10.4g} "
        f"{row.answer_tokens_per_second:>10,.0f}  {row.engines_busy:>7.0%} {row.learners_busy:>8.0%} "
        f"{row.of_ideal:>8.0%}  {row.staleness_mean:>8.1f} {row.staleness_max:>5}  {_waits(row)}"
    )


def _waits(row: Row) -> str:
    parts = [("learners", row.learners_waiting), ("engines", row.engines_waiting)]
    waiting = [f"{who} {share:.0%}" for who, share in sorted(parts, key=lambda p: -p[1]) if share >= LITTLE]
    return ", ".join(waiting) or "nobody"


def _verdict(found: Row, rows: list[Row]) -> str:
    what = "shared" if found.shared else f"{found.engines:,} engines + {found.learners:,} learners"
    text = f"Fastest: {what}, max_staleness {found.max_staleness}: {found.seconds_per_step:.4g} s a step"
    turns = [r for r in rows if r.max_staleness == 0]
    if found.max_staleness and turns:
        other = best_of(turns)
        where = "on shared GPUs" if other.shared else f"with {other.engines:,} engines"
        text += f", {other.seconds_per_step / found.seconds_per_step:.2f} times as fast as synchronous {where}"
    return text + "."


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.4g}" if value < 1e6 else f"{value:.3g}"
    if value and isinstance(value[0], tuple):
        nested = isinstance(value[0][0], float) or len(value) <= 4
        return (
            " ".join(f"{n:g}:{s:.3g}" for n, s in value) if _is_table(value) and nested else f"{len(value):,} measured"
        )
    return f"{value[0]:g} to {value[1]:g}" if value[0] != value[1] else f"{value[0]:.4g}"


def _is_table(value: Any) -> bool:
    return all(len(row) == 2 for row in value) and any(isinstance(row[1], float) for row in value)


def _progress() -> Callable[[str], None]:
    """To a terminal only: a line that is written over."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)
