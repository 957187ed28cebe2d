"""Many engines that decode, simulated from event to event, each with a clock of its own.

Between two things that concern all of them (new groups, new weights) engines do not see each other. So an engine need
not wait for the events of the others: in every round each engine goes to its own next event, all in one sweep of arrays
[engines, open episodes]. Nothing is averaged; every answer of every engine ends at its own time.

An engine's decoding is continuous: all n running sequences move at one token per f(n) + c (context) seconds. `steps`
counts how many tokens a sequence that was always there would have by now; an answer of k tokens that comes at steps = s
begins with the next whole one and ends k later, whatever joins or leaves. Prompts are computed one after another while
decoding stands still.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from birl.errors import BirlError
from birl.simulation.draws import Block, Floats, Ints
from birl.simulation.scenario import Engine, Failures, step_seconds

INF = np.inf
ROUNDING = 1e-6  # tokens; what counts as finished
HOUR = 3600.0


@dataclass(slots=True, eq=False)
class Fleet:
    """Rows are engines; columns are places for open episodes, grown as needed.

    A place waits (`ready` is when it may start), or runs (`goal` is the count of steps at which its turn ends), or is
    free (`group` is -1).
    """

    engine: Engine
    count: int
    prompt: float
    observation: float
    route: str = "episode"
    failures: Failures = field(default_factory=Failures)
    seed: int = 0
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    finished: Floats = field(default_factory=lambda: np.zeros(0))  # [places]: when the last reward of a group was there
    missing: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [places]: episodes not done
    seconds: Floats = field(init=False)  # f(n)
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = np.array(step_seconds(self.engine))
        self.random = np.random.default_rng([self.seed, 1])
        self.clear(0.0)

    # --- what happens to all engines at once ---

    def clear(self, now: float) -> None:
        """Drop everything that is open; all clocks at `now`. Totals stay."""
        count, old = self.count, self.state
        zero = np.zeros
        self.state = {
            "time": np.full(count, now),
            "steps": zero(count),
            "running": zero(count, np.int64),
            "waiting": zero(count, np.int64),  # places with a `ready`
            "context": zero(count),
            "stall": zero(count),  # seconds of prefill before decoding goes on
            "hold": zero(count),  # seconds of standing still before that
            "fails": np.full(count, INF),
            "goal": np.full((count, 1), INF),
            "ready": np.full((count, 1), INF),
            "group": np.full((count, 1), -1, np.int64),
            "size": zero((count, 1)),  # tokens of context when the turn started
            "due": zero((count, 1)),  # tokens to prefill at the start of the turn
            "turn": zero((count, 1), np.int64),
            "row": zero((count, 1), np.int64),  # of `tokens`, `wait` and `reward`
            "busy": old.get("busy", zero(count)),
            "held": old.get("held", zero(count)),
            "waited": old.get("waited", zero(count)),  # idle while its episodes are in their environments
            "sequences": old.get("sequences", zero(count)),  # integral of the running sequences over time
            "decoded": old.get("decoded", 0.0),
            "prefilled": old.get("prefilled", 0.0),
            "failed": old.get("failed", 0),
        }
        if self.failures.hours_between:
            self.state["fails"] = now + self.lifetimes(count)
        self.tokens = self.waits = np.zeros((0, 1))
        self.rewards = np.zeros(0)

    tokens: Any = field(init=False, default=None)
    waits: Any = field(init=False, default=None)
    rewards: Any = field(init=False, default=None)

    def lifetimes(self, count: int) -> Floats:
        return self.random.exponential(self.failures.hours_between * HOUR / self.engine.gpus, count)

    def pause(self, seconds: float, recompute: bool) -> None:
        """New weights."""
        s = self.state
        s["hold"] += seconds
        if recompute:
            s["stall"] += s["context"] / self.engine.prefill
            s["prefilled"] += float(s["context"].sum())
            idle = (s["group"] >= 0) & ~np.isfinite(s["goal"]) & (s["turn"] > 0)
            s["due"] = np.where(idle, s["size"], s["due"])

    def admit(self, places: Ints, block: Block, now: float) -> None:
        """Start these groups; all clocks are at `now`."""
        groups, size = block.tokens.shape[:2]
        last = int(places.max()) + 1
        if last > len(self.finished):
            grown = max(last, 2 * len(self.finished))
            self.finished = np.concatenate([self.finished, np.zeros(grown - len(self.finished))])
            self.missing = np.concatenate([self.missing, np.zeros(grown - len(self.missing), np.int64)])
        self.finished[places], self.missing[places] = 0.0, size
        whole = self.route == "group"
        open_now = (self.state["group"] >= 0).sum(axis=1)
        chosen = least_loaded(open_now, groups if whole else groups * size, size if whole else 1)
        engines = np.repeat(chosen, size) if whole else chosen
        self._place(engines, np.repeat(places, size), self._rows(block), now)

    def _rows(self, block: Block) -> Ints:
        """Append the episodes to the arrays that `row` points into, without those of episodes that are over."""
        s, count = self.state, block.tokens.shape[0] * block.tokens.shape[1]
        used = s["group"] >= 0
        keep = s["row"][used]
        s["row"][used] = np.arange(len(keep))
        turns = block.tokens.shape[2]
        old = (self.tokens[keep], self.waits[keep]) if len(self.tokens) else (np.zeros((0, turns)),) * 2
        self.tokens = np.concatenate([old[0], block.tokens.reshape(count, turns)])
        self.waits = np.concatenate([old[1], block.wait.reshape(count, turns)])
        self.rewards = np.concatenate([self.rewards[keep], block.reward.reshape(count)])
        return np.arange(len(keep), len(keep) + count)

    def _place(self, engines: Ints, groups: Ints, rows: Ints, now: float) -> None:
        s = self.state
        order = np.argsort(engines, kind="stable")  # within an engine in order of groups
        engines, groups, rows = engines[order], groups[order], rows[order]
        new = np.bincount(engines, minlength=self.count)
        free = s["group"] < 0
        lacking = int((new - free.sum(axis=1)).max())
        if lacking > 0:
            self._widen(lacking)
            free = s["group"] < 0
        rank = free.cumsum(axis=1)
        e, c = np.nonzero(free & (rank <= new[:, None]))  # by engine, then column: as `engines` is sorted
        first = np.ones(len(e), bool)  # the first answer of a group on an engine pays for the prompt
        if self.engine.share_prompts:
            first[1:] = (engines[1:] != engines[:-1]) | (groups[1:] != groups[:-1])
        s["group"][e, c], s["row"][e, c], s["turn"][e, c] = groups, rows, 0
        s["size"][e, c], s["due"][e, c], s["ready"][e, c] = self.prompt, self.prompt * first, now
        s["waiting"] += new

    def _widen(self, columns: int) -> None:
        for name, empty in (
            *(("goal", INF), ("ready", INF), ("group", -1), ("size", 0.0), ("due", 0.0), ("turn", 0), ("row", 0)),
        ):
            old = self.state[name]
            self.state[name] = np.concatenate([old, np.full((self.count, columns), empty, old.dtype)], axis=1)

    # --- time ---

    def advance(self, horizon: float, before: int | None = None) -> None:
        """Every engine to `horizon`, or, with `before`, at most to where all its groups at places below that are done
        (never beyond its last event of that kind)."""
        s = self.state
        needed = None
        if before is not None:
            needed = ((s["group"] >= 0) & (s["group"] < before)).sum(axis=1)
        while True:
            late = s["time"] < horizon
            active = np.flatnonzero(late if needed is None else late & (needed > 0))
            if not len(active):
                return
            self._round(active, horizon, needed, before)

    def _round(self, active: Ints, horizon: float, needed: Ints | None, before: int | None) -> None:
        """Each active engine to its next event."""
        s, every = self.state, len(active) == self.count
        goal = s["goal"] if every else s["goal"][active]
        time, n, context = s["time"][active], s["running"][active], s["context"][active]
        still = s["hold"][active] + s["stall"][active]
        column = goal.argmin(axis=1)
        left = np.maximum(goal[np.arange(len(active)), column] - s["steps"][active], 0.0)
        next_ready, waits = np.full(len(active), INF), np.flatnonzero(s["waiting"][active])
        next_ready[waits] = s["ready"][active[waits]].min(axis=1)
        rate = self.seconds[n] + self.engine.per_context * context
        bend = self.engine.per_context * n / 2
        with np.errstate(invalid="ignore"):
            ends = np.where(n > 0, still + left * (rate + bend * left), INF)
        ends[(left <= ROUNDING) & (n > 0)] = 0.0  # the others of a tie: a prompt that began since is not before them
        starts = np.where(n < self.engine.max_batch, np.maximum(next_ready - time, 0.0), INF)
        breaks = np.maximum(s["fails"][active] - time, 0.0)
        dt = np.minimum(np.minimum(ends, starts), np.minimum(breaks, horizon - time))
        self._pass(active, dt, ends, rate, bend, left)
        over = dt == horizon - time
        s["time"][active] = np.where(over, horizon, time + dt)
        end = ends <= dt
        several = end & (left <= ROUNDING)  # the second of a tie: look for all of them
        self._end(active[end & ~several], column[end & ~several], needed, before)
        if several.any():
            at, columns = np.nonzero(s["goal"][active[several]] <= s["steps"][active[several]][:, None] + ROUNDING)
            self._end(active[several][at], columns, needed, before)
        self._begin(active[(next_ready <= s["time"][active]) & (s["running"][active] < self.engine.max_batch)])
        if self.failures.hours_between:
            self._break(active[breaks <= dt])

    def _pass(self, active: Ints, dt: Floats, ends: Floats, rate: Floats, bend: Floats, left: Floats) -> None:
        """Count what happens in `dt` seconds without an event."""
        s = self.state
        n = s["running"][active]
        held = np.minimum(s["hold"][active], dt)
        stalled = np.minimum(s["stall"][active], dt - held)
        decoding = dt - held - stalled
        moved = 2 * decoding / (rate + np.sqrt(rate * rate + 4 * bend * decoding))
        moved = np.where(n > 0, np.where(ends <= dt, left, moved), 0.0)
        s["hold"][active] -= held
        s["stall"][active] -= stalled
        s["steps"][active] += moved
        s["context"][active] += n * moved
        s["held"][active] += held
        works = n > 0
        s["busy"][active] += np.where(works, dt - held, stalled)
        s["sequences"][active] += n * (dt - held)
        s["decoded"] += float((n * moved).sum())
        idle = ~works & (decoding > 0)
        if idle.any():
            rows = active[idle]
            s["waited"][rows] += np.where((s["group"][rows] >= 0).any(axis=1), decoding[idle], 0.0)

    def _end(self, e: Ints, c: Ints, needed: Ints | None, before: int | None) -> None:
        """The turns at [e, c] are over: the next one waits for its environment, or the episode is done."""
        if not len(e):
            return
        s = self.state
        row, turn = s["row"][e, c], s["turn"][e, c]
        tokens = self.tokens[row, turn]
        np.subtract.at(s["running"], e, 1)
        np.subtract.at(s["context"], e, s["size"][e, c] + tokens)
        s["context"][e[s["running"][e] == 0]] = 0.0  # no rounding that stays
        s["goal"][e, c] = INF
        s["size"][e, c] += tokens
        goes_on = turn + 1 < self.tokens.shape[1]
        goes_on[goes_on] = self.tokens[row[goes_on], turn[goes_on] + 1] > 0
        ge, gc = e[goes_on], c[goes_on]
        s["ready"][ge, gc] = s["time"][ge] + self.waits[row[goes_on], turn[goes_on]]
        np.add.at(s["waiting"], ge, 1)
        s["turn"][ge, gc] += 1
        s["size"][ge, gc] += self.observation
        s["due"][ge, gc] = self.observation
        de, dc = e[~goes_on], c[~goes_on]
        group = s["group"][de, dc]
        np.maximum.at(self.finished, group, s["time"][de] + self.rewards[row[~goes_on]])
        np.subtract.at(self.missing, group, 1)
        s["group"][de, dc] = -1
        if needed is not None:
            np.subtract.at(needed, de[group < before], 1)

    def _begin(self, engines: Ints) -> None:
        """Waiting turns that are ready start, as many as there is room for, the longest waiting first."""
        if not len(engines):
            return
        s = self.state
        due = s["ready"][engines] <= s["time"][engines][:, None]
        room = self.engine.max_batch - s["running"][engines]
        crowded = due.sum(axis=1) > room
        if crowded.any():
            ready = np.where(due[crowded], s["ready"][engines[crowded]], INF)
            group = s["group"][engines[crowded]]
            place = np.lexsort((group, ready), axis=1).argsort(axis=1)
            due[crowded] &= place < room[crowded][:, None]
        at, c = np.nonzero(due)
        e = engines[at]
        s["ready"][e, c] = INF
        begin = np.ceil(s["steps"][engines] - ROUNDING)  # with the next step of those that run
        idle = s["running"][engines] == 0
        s["steps"][engines] = np.where(idle, begin, s["steps"][engines])
        until = (begin - s["steps"][engines])[at]
        s["goal"][e, c] = begin[at] + self.tokens[s["row"][e, c], s["turn"][e, c]]
        np.add.at(s["running"], e, 1)
        np.subtract.at(s["waiting"], e, 1)
        np.add.at(s["context"], e, s["size"][e, c] - until)
        np.add.at(s["stall"], e, s["due"][e, c] / self.engine.prefill)
        s["prefilled"] += float(s["due"][e, c].sum())

    def _break(self, engines: Ints) -> None:
        """Engines that fail: open turns begin again, with empty caches."""
        if not len(engines):
            return
        s = self.state
        s["failed"] += len(engines)
        if s["failed"] > 10_000 + 1000 * self.count:
            raise BirlError(
                f"failures.hours_between={self.failures.hours_between:g}: engines fail so often that hardly an answer "
                "is finished; name a longer time."
            )
        s["fails"][engines] = s["time"][engines] + self.failures.restart + self.lifetimes(len(engines))
        s["hold"][engines], s["stall"][engines] = self.failures.restart, 0.0
        s["waiting"][engines] += s["running"][engines]
        s["running"][engines], s["context"][engines] = 0, 0.0
        goal, ready = s["goal"][engines], s["ready"][engines]
        running = np.isfinite(goal)
        s["goal"][engines] = INF
        s["ready"][engines] = np.where(running, s["time"][engines][:, None], ready)
        s["due"][engines] = np.where(s["group"][engines] >= 0, s["size"][engines], 0.0)

    # --- going back ---

    def copy(self) -> tuple[Any, ...]:
        """What `restore` takes: engines may be tried ahead and set back."""
        state = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in self.state.items()}
        return state, self.finished.copy(), self.missing.copy(), self.random.bit_generator.state

    def restore(self, copied: tuple[Any, ...]) -> None:
        self.state, self.finished, self.missing, self.random.bit_generator.state = copied

    def totals(self) -> dict[str, float]:
        """Engine-seconds and tokens so far."""
        s = self.state
        names = ("busy", "held", "waited", "sequences", "decoded", "prefilled", "failed")
        return {name: float(np.sum(s[name])) for name in names}


def least_loaded(load: Ints, count: int, weight: int = 1) -> Ints:
    """Engines for `count` new pieces of `weight` episodes, each to the one with the fewest open episodes then.

    Example: least_loaded(np.array([2, 0]), 3) is [1, 1, 0]
    """
    low, high = 0, int(load.max()) // weight + count + 1  # pieces up to a level: the lowest that holds all
    while low < high:
        level = (low + high) // 2
        room = np.maximum(-((load - level * weight) // weight), 0).sum()
        low, high = (level + 1, high) if room < count else (low, level)
    pieces = np.maximum(-((load - low * weight) // weight), 0)
    engines = np.repeat(np.arange(len(load)), pieces)
    nth = np.arange(len(engines)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return engines[np.argsort(load[engines] + nth * weight, kind="stable")[:count]]
