"""Discrete-event simulation of decoding engines, and the episodes that they play, which are drawn once: all splits and
all values of max_staleness get the same ones.

Between two admissions, and between two versions of the weights, engines do not affect each other, so each has a clock
of its own. Decoding is continuous: all n running sequences move at one token per f(n) + c (context) seconds. `steps`
counts the tokens of a sequence that was always running. An answer of k tokens that arrives at steps = s begins with the
next whole step and ends k later, whatever joins or leaves. Prompts are computed one after another, while decoding
stands still.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from birl.plan.scenario import Engine, Episodes, step_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BLOCK = 1024  # groups that are drawn together, so that group i does not depend on how many are drawn


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive groups. `tokens` [groups, episodes, turns]: tokens of answers, 0 after the last turn; `wait` [as
    tokens]: seconds after the turn; `reward` [groups, episodes]: seconds from the last token to the reward."""

    tokens: NDArray[np.int32]
    wait: NDArray[np.float32]
    reward: NDArray[np.float32]


@dataclass(slots=True)
class Draws:
    episodes: Episodes
    group_size: int
    seed: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)

    def block(self, number: int) -> Block:
        if number not in self.blocks:
            self.blocks[number] = self._draw(np.random.default_rng([self.seed, number]))
        return self.blocks[number]

    def groups(self, numbers: Ints) -> Block:
        """The groups with these numbers, from 0."""
        blocks, within = np.divmod(numbers, BLOCK)
        if not len(numbers):
            blocks, within = np.zeros(1, np.int64), np.zeros(0, np.int64)
        parts = {int(b): self.block(int(b)) for b in np.unique(blocks)}
        if len(parts) == 1:
            (only,) = parts.values()
            return Block(tokens=only.tokens[within], wait=only.wait[within], reward=only.reward[within])
        place = np.searchsorted(np.array(list(parts)), blocks) * BLOCK + within
        tokens, wait, reward = (
            np.concatenate([getattr(p, name) for p in parts.values()])[place] for name in ("tokens", "wait", "reward")
        )
        return Block(tokens=tokens, wait=wait, reward=reward)

    def _draw(self, random: np.random.Generator) -> Block:
        its, low, high = self.episodes, *self.episodes.turns
        shape = (BLOCK, self.group_size, int(high))
        turns = random.integers(int(low), int(high) + 1, shape[:2])
        live = np.arange(shape[2]) < turns[:, :, None]
        tokens = self._lengths(random, shape) * live
        # there is no wait for an environment after the last turn
        wait = random.uniform(*its.wait, shape) * (np.arange(shape[2]) < turns[:, :, None] - 1)
        reward = random.uniform(*its.reward, shape[:2])
        return Block(tokens=tokens.astype(np.int32), wait=wait.astype(np.float32), reward=reward.astype(np.float32))

    def _lengths(self, random: np.random.Generator, shape: tuple[int, ...]) -> Ints:
        its = self.episodes
        if its.tokens:
            sizes = np.array([len(row) for row in its.tokens])
            flat = np.concatenate([np.array(row) for row in its.tokens])
            start = np.cumsum(sizes) - sizes
            row = random.integers(0, len(sizes), shape[0])
            if sizes.max() == 1:  # a flat list: every answer is drawn independently
                row = random.integers(0, len(sizes), shape)
                return flat[row]
            within = (random.random(shape) * sizes[row][:, None, None]).astype(np.int64)
            return flat[start[row][:, None, None] + within]
        if its.sigma == 0:
            return np.full(shape, min(round(its.mean), its.max) or 1)
        drawn = random.lognormal(math.log(its.mean) - its.sigma**2 / 2, its.sigma, shape)
        return np.clip(np.rint(drawn), 1, its.max).astype(np.int64)


ROUNDING = 1e-6  # tokens; what counts as finished
TOTALS = ("busy", "held", "waited", "sequences", "decoded")


@dataclass(slots=True, order=True)
class Open:
    """An unfinished episode; `wait` and `reward` in seconds, the rest in tokens."""

    place: int  # of its group, in order of admission
    number: int
    turns: list[int] = field(compare=False)
    wait: list[float] = field(compare=False)
    reward: float = field(compare=False)
    size: float = field(compare=False)  # of its context at the start of the turn
    due: float = field(compare=False)  # prefill at the start of the turn
    turn: int = field(default=0, compare=False)


@dataclass(slots=True)
class DecodingEngine:
    """One engine. Totals since the start: `busy`, `held` (paused for new weights) and `waited` (for environments) in
    seconds, `sequences` in sequence-seconds, `decoded` in tokens."""

    engine: Engine
    observation: float
    seconds: list[float]  # f(n), time of a step by number of sequences
    time: float = 0.0
    steps: float = 0.0
    context: float = 0.0  # of all running sequences [tokens]
    stall: float = 0.0  # remaining seconds of prefill, in which nothing decodes
    hold: float = 0.0  # remaining seconds of a pause, before the prefill
    running: list[tuple[float, Open]] = field(default_factory=list[tuple[float, Open]])  # a heap by the last step
    waiting: list[tuple[float, Open]] = field(default_factory=list[tuple[float, Open]])  # a heap by ready time
    busy: float = 0.0
    held: float = 0.0
    waited: float = 0.0
    sequences: float = 0.0
    decoded: float = 0.0

    @property
    def open(self) -> int:
        return len(self.running) + len(self.waiting)

    def _pace(self) -> tuple[float, float]:
        """Seconds of a token now, and how much half of the context growth per token adds to them."""
        n = len(self.running)
        return self.seconds[n] + self.engine.per_context * self.context, self.engine.per_context * n / 2

    def next(self) -> float:
        """Time of the next begin or end of a turn [s]."""
        begins = math.inf
        if self.waiting and len(self.running) < self.engine.max_batch:
            begins = max(self.waiting[0][0], self.time)
        return min(begins, self._ends())

    def _ends(self) -> float:
        """Time at which the next turn ends, if none begins before [s]."""
        if not self.running:
            return math.inf
        (rate, bend), left = self._pace(), self.running[0][0] - self.steps
        return self.time + (self.hold + self.stall + left * (rate + bend * left) if left > ROUNDING else 0.0)

    def advance(self, until: float) -> list[tuple[Open, float]]:
        """Simulate until time `until`. Returns the episodes that ended by then, each with its time."""
        done: list[tuple[Open, float]] = []
        while (event := self.next()) <= until:
            self._pass(event - self.time, ends=event == self._ends())
            self.time = event
            self._end(done)
            self._begin()
        self._pass(until - self.time)
        self.time = until
        return done

    def pause(self, seconds: float) -> None:
        """Pause for new weights; with recompute_kv running contexts are prefilled again."""
        self.hold += seconds
        if self.engine.recompute_kv:
            self.stall += self.context / self.engine.prefill
            for _, episode in self.waiting:
                episode.due = episode.size if episode.turn else episode.due

    def _pass(self, seconds: float, *, ends: bool = False) -> None:
        """Let `seconds` pass in which no turn begins or ends. `ends`: a turn ends then, exactly at its last token."""
        held = min(self.hold, seconds)
        stalled = min(self.stall, seconds - held)
        self.hold, self.stall, self.held = self.hold - held, self.stall - stalled, self.held + held
        decoding, n = seconds - held - stalled, len(self.running)
        if n:
            rate, bend = self._pace()
            moved = 2 * decoding / (rate + math.sqrt(rate * rate + 4 * bend * decoding))
            moved = max(self.running[0][0] - self.steps, 0.0) if ends else moved
            self.steps += moved
            self.context += n * moved
            self.decoded += n * moved
            self.busy += seconds - held
            self.sequences += n * (seconds - held)
        else:
            self.busy += stalled
            self.waited += decoding if self.waiting else 0.0

    def _end(self, done: list[tuple[Open, float]]) -> None:
        while self.running and self.running[0][0] <= self.steps + ROUNDING:
            _, episode = heapq.heappop(self.running)
            episode.size += episode.turns[episode.turn]
            self.context = self.context - episode.size if self.running else 0.0  # so that rounding errors do not add up
            if episode.turn + 1 == len(episode.turns):
                done.append((episode, self.time))
                continue
            ready = self.time + episode.wait[episode.turn]
            episode.turn, episode.due = episode.turn + 1, self.observation
            episode.size += self.observation
            heapq.heappush(self.waiting, (ready, episode))

    def _begin(self) -> None:
        """Start the turns that are ready while there is room, longest waiting first."""
        begin = float(math.ceil(self.steps - ROUNDING))  # with the next step of the running sequences
        if not self.running:
            self.steps = begin
        while self.waiting and self.waiting[0][0] <= self.time and len(self.running) < self.engine.max_batch:
            _, episode = heapq.heappop(self.waiting)
            heapq.heappush(self.running, (begin + episode.turns[episode.turn], episode))
            self.context += episode.size - (begin - self.steps)
            self.decoded -= begin - self.steps  # counted from now on, and decoded from the next step on
            self.stall += episode.due / self.engine.prefill


class Fleet:
    """`count` engines. `finished`: place of a group whose rewards are all known -> time of the last one [s]."""

    def __init__(self, engine: Engine, episodes: Episodes, count: int, route: str = "episode") -> None:
        self.engine, self.episodes, self.route = engine, episodes, route
        seconds = step_seconds(engine)
        self.engines = [DecodingEngine(engine, episodes.observation, seconds) for _ in range(count)]
        self.events = [(math.inf, at) for at in range(count)]  # a heap with at least the next event of each engine
        self.finished: dict[int, float] = {}
        self._left: dict[int, tuple[int, float]] = {}  # place -> number of unfinished episodes, time of the last reward

    def next(self) -> float:
        """Time of the next begin or end of a turn in any engine [s]."""
        while (event := self.events[0])[0] != self.engines[event[1]].next():
            heapq.heapreplace(self.events, (self.engines[event[1]].next(), event[1]))
        return event[0]

    def step(self) -> None:
        """Advance the engine that has the next event to that event."""
        now = self.next()
        self._advance(self.events[0][1], now)

    def advance(self, until: float) -> None:
        """Advance all engines to time `until` [s]."""
        for at in range(len(self.engines)):
            self._advance(at, until)
        self._sort()

    def _advance(self, at: int, until: float) -> None:
        for episode, ended in self.engines[at].advance(until):
            left, last = self._left[episode.place]
            last = max(last, ended + episode.reward)
            self._left[episode.place] = left - 1, last
            if left == 1:
                self.finished[episode.place] = last

    def _sort(self) -> None:
        self.events = sorted((engine.next(), at) for at, engine in enumerate(self.engines))

    def pause(self, seconds: float) -> None:
        for engine in self.engines:
            engine.pause(seconds)
        self._sort()

    def admit(self, first: int, block: Block, now: float) -> None:
        """Start these groups at the places from `first` on, at time `now` of all engines. Each episode, or with
        route=group each group, goes to the engine with the fewest unfinished ones."""
        least = sorted((engine.open, at) for at, engine in enumerate(self.engines))
        groups, size = block.tokens.shape[:2]
        for group, place in enumerate(range(first, first + groups)):
            self._left[place] = size, 0.0
            paid: set[int] = set()  # engines that have the prompt
            for number in range(size):
                if self.route == "episode" or number == 0:
                    load, at = least[0]
                    heapq.heapreplace(least, (load + (1 if self.route == "episode" else size), at))
                shared = self.engine.share_prompts and at in paid
                paid.add(at)
                episode = Open(
                    place=place,
                    number=number,
                    turns=[int(n) for n in block.tokens[group, number] if n],
                    wait=block.wait[group, number].tolist(),
                    reward=float(block.reward[group, number]),
                    size=self.episodes.prompt,
                    due=0.0 if shared else self.episodes.prompt,
                )
                heapq.heappush(self.engines[at].waiting, (now, episode))
        self._sort()

    def totals(self) -> dict[str, float]:
        return {name: float(sum(getattr(engine, name) for engine in self.engines)) for name in TOTALS}
