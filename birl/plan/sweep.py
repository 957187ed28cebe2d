"""Simulates splits of a number of GPUs into engines and learners, and searches for the fastest."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from birl.errors import BirlError
from birl.plan.fleet import Draws
from birl.plan.pipeline import Simulation, Split, engine_seconds
from birl.plan.scenario import Scenario

SIXTEENTHS = (1, 2, 4, 6, 8, 10, 12, 14, 15)  # first shares of the GPUs for engines


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one split in the counted steps. Shares are of the time from the first to the last."""

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


def sweep(scenario: Scenario, gpus: int, draws: Draws, report: Callable[[str], None]) -> list[Row]:
    """Simulate all splits at the first staleness, and at each further one the neighbours of the best, while that gets
    faster. Before these the synchronous one on shared GPUs, where generation and training alternate. `report` is called
    with the next split. Raises `BirlError` if the GPUs cannot be split."""
    prompts = scenario.run.prompts or max(round(scenario.run.prompts_per_gpu * gpus), 1)
    possible = splits(scenario, gpus)
    staleness = [e for e in scenario.run.max_staleness if e >= scenario.sync.every - 1]
    rows: dict[tuple[int, int], Row] = {}
    begun = [0]

    def row(engines: int, learners: int, most: int, shared: bool = False) -> Row:
        begun[0] += 1
        report(f"{gpus:,} GPUs, max_staleness {most}, {engines:,} engines + {learners:,} learners ({begun[0]})")
        split = Split(engines=engines, learners=learners, max_staleness=most, prompts=prompts, shared=shared)
        return simulate(scenario, split, gpus, draws)

    its, result = scenario, []
    if 0 in staleness and not its.run.engines and gpus >= max(its.engine.gpus, its.learner.gpus):
        result.append(row(gpus // its.engine.gpus, gpus // its.learner.gpus, 0, shared=True))
    if not staleness or not (possible or result):
        raise BirlError(
            f"run.gpus={gpus} cannot be split{f' with run.engines={[*its.run.engines]}' * bool(its.run.engines)}: an "
            f"engine takes engine.gpus={its.engine.gpus}, a learner learner.gpus={its.learner.gpus}."
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
    return result + [rows[key] for key in sorted(rows)]


def _climb(place: int, count: int, row: Callable[[int], Row]) -> None:
    """From `place` in the faster direction until it gets slower (hill climbing)."""
    here = row(place).seconds_per_step
    for side in (1, -1):
        at, last = place + side, here
        while 0 <= at < count and (speed := row(at).seconds_per_step) < last:
            at, last = at + side, speed
        if last < here:
            return


def best_of(rows: list[Row]) -> Row:
    """The fastest row; of those within 1 % of it the one with the least staleness."""
    bound = 1.01 * min(row.seconds_per_step for row in rows)
    return min((r for r in rows if r.seconds_per_step <= bound), key=lambda r: (r.max_staleness, r.seconds_per_step))


def compared_with(scenario: Scenario, row: Row, draws: Draws) -> Callable[..., bool]:
    """Returns a function: whether a step is more than 1 % faster with these changed fields of the `Split`."""

    def faster(**changes: int) -> bool:
        names = ("engines", "learners", "max_staleness", "prompts", "shared")
        split = replace(Split(**{name: getattr(row, name) for name in names}), **changes)
        return simulate(scenario, split, row.gpus, draws).seconds_per_step < 0.99 * row.seconds_per_step

    return faster


def splits(scenario: Scenario, gpus: int) -> list[tuple[int, int]]:
    """Pairs (engines, learners) that use as many of `gpus` GPUs as possible, fewest engines first."""
    engine, learner = scenario.engine.gpus, scenario.learner.gpus
    wanted = scenario.run.engines or [gpus * share // 16 // engine for share in SIXTEENTHS]
    if not scenario.run.engines and gpus <= 8 * max(engine, learner):
        wanted = range(1, gpus // engine + 1)
    result: dict[tuple[int, int], None] = {}
    for engines in sorted(wanted):
        learners = (gpus - engines * engine) // learner
        if engines >= 1 and learners >= 1:
            engines = engines if scenario.run.engines else (gpus - learners * learner) // engine  # nothing lies idle
            result[engines, learners] = None
    return list(result)


def simulate(scenario: Scenario, split: Split, gpus: int, draws: Draws) -> Row:
    """Bursts as large as the slots persist for long, so a whole number of rounds is counted, after two."""
    turn = split.max_staleness + 1
    start = 2 * turn if split.max_staleness else 1
    counted = max(-(-8 // turn), 2) * turn
    if scenario.run.steps:
        start, counted = min(start, scenario.run.steps - 1), max(scenario.run.steps - start, 1)
    simulation = Simulation(scenario, split, draws)
    simulation.run(start + counted)
    return row_of(simulation, gpus, start)


def row_of(simulation: Simulation, gpus: int, start: int) -> Row:
    """The row of a simulation; its first `start` steps are not counted."""
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
        **asdict(split),
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
    )


def compare(scenario: Scenario) -> dict[str, float]:
    """Simulate the configuration whose time was measured."""
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
