"""The rules of the simulation, written as slowly and plainly as possible."""

import math
from typing import Any

import numpy as np

from birl.plan.fleet import Draws
from birl.plan.pipeline import Simulation, Split, learner_seconds, sync_seconds
from birl.plan.scenario import Scenario, step_seconds


def simulated(scenario: Scenario, steps: int, **split: Any) -> Simulation:
    its = Split(**{"engines": 1, "learners": 1, "max_staleness": 0, "prompts": 2} | split)
    found = Simulation(scenario, its, Draws(scenario.episodes, scenario.run.group_size, scenario.run.seed))
    found.run(steps)
    return found


class Plain:
    """One heapless loop over everything: the next event of all is looked for every time."""

    def __init__(self, scenario: Scenario, split: Split, draws: Draws) -> None:
        self.its, self.split, self.draws, self.now = scenario, split, draws, 0.0
        self.engines = [{"open": [], "hold": 0.0, "stall": 0.0, "steps": 0.0} for _ in range(split.engines)]
        self.done: dict[int, float] = {}
        self.left: dict[int, int] = {}
        self.version: dict[int, int] = {}

    def admit(self, count: int, version: int) -> None:
        for place in range(len(self.version), len(self.version) + count):
            self.version[place] = version
            block, paid = self.draws.groups(np.array([place])), set()
            self.left[place] = block.tokens.shape[1]
            for e in range(block.tokens.shape[1]):
                if self.its.run.route == "episode" or e == 0:
                    at = min(range(len(self.engines)), key=lambda i: (len(self.engines[i]["open"]), i))
                turns = [int(t) for t in block.tokens[0, e] if t]
                shared = self.its.engine.share_prompts and at in paid
                paid.add(at)
                due = 0.0 if shared else self.its.episodes.prompt
                self.engines[at]["open"].append(
                    {
                        "place": place,
                        "turns": turns,
                        "wait": block.wait[0, e].tolist(),
                        "reward": float(block.reward[0, e]),
                    }
                    | {"turn": 0, "size": self.its.episodes.prompt, "due": due, "ready": self.now, "left": None}
                )

    def rate(self, engine: dict[str, Any]) -> float:
        running = [a for a in engine["open"] if a["left"] is not None]
        return step_seconds(self.its.engine)[len(running)]

    def until(self, engine: dict[str, Any]) -> float:
        running = [a for a in engine["open"] if a["left"] is not None]
        found = [math.inf]
        if running:
            found.append(engine["hold"] + engine["stall"] + min(a["left"] for a in running) * self.rate(engine))
        if len(running) < self.its.engine.max_batch:
            found += [max(a["ready"] - self.now, 0.0) for a in engine["open"] if a["left"] is None]
        return min(found)

    def passes(self, dt: float) -> None:
        for engine in self.engines:
            running = [a for a in engine["open"] if a["left"] is not None]
            held = min(engine["hold"], dt)
            stalled = min(engine["stall"], dt - held)
            engine["hold"], engine["stall"] = engine["hold"] - held, engine["stall"] - stalled
            made = (dt - held - stalled) / self.rate(engine)
            engine["steps"] += made if running else 0.0
            for a in running:
                a["left"] -= made
        self.now += dt
        for engine in self.engines:
            self.events(engine)

    def events(self, engine: dict[str, Any]) -> None:
        for a in [a for a in engine["open"] if a["left"] is not None and a["left"] <= 1e-6]:
            a["size"] += a["turns"][a["turn"]]
            a["left"] = None
            if a["turn"] + 1 < len(a["turns"]):
                a["ready"] = self.now + a["wait"][a["turn"]]
                a["turn"], a["due"] = a["turn"] + 1, self.its.episodes.observation
                a["size"] += a["due"]
            else:
                engine["open"].remove(a)
                place = a["place"]
                self.left[place] -= 1
                self.done[place] = max(self.done.get(place, 0.0), self.now + a["reward"])
        running = sum(a["left"] is not None for a in engine["open"])
        waiting = [a for a in engine["open"] if a["left"] is None and a["ready"] <= self.now + 1e-9]
        for a in sorted(waiting, key=lambda a: (a["ready"], a["place"]))[: self.its.engine.max_batch - running]:
            if not any(b["left"] is not None for b in engine["open"]):
                engine["steps"] = 0.0
            a["left"] = a["turns"][a["turn"]] + math.ceil(engine["steps"] - 1e-6) - engine["steps"]
            engine["stall"] += a["due"] / self.its.engine.prefill

    def go(self, horizon: float) -> None:
        while (dt := min(min(map(self.until, self.engines)), horizon - self.now)) < horizon - self.now:
            self.passes(dt)
        self.passes(horizon - self.now)

    def run(self, steps: int) -> list[float]:
        its, split = self.its, self.split
        window, n = its.run.order_window, its.sync.every
        self.admit((split.max_staleness - n + 2) * split.prompts - window, 0)
        self.passes(0.0)
        gone, found = set[int](), []
        for step in range(1, steps + 1):
            taken: list[int] = []
            while len(taken) < split.prompts:
                first = next(p for p in range(10**6) if p not in gone)
                ready = [p for p in range(first, first + window + 1) if p not in gone and p in self.done]
                ready = [p for p in ready if self.left[p] == 0 and self.done[p] <= self.now + 1e-9]
                if ready:
                    taken.append(ready[0])
                    gone.add(ready[0])
                    continue
                rewards = [t for p, t in self.done.items() if self.left[p] == 0 and t > self.now + 1e-9]
                self.passes(min([min(map(self.until, self.engines)), *(t - self.now for t in rewards)]))
            self.check(step, taken)
            syncs = step % n == 0
            seconds, _ = learner_seconds(its, split.learners, self.draws.groups(np.array(taken)))
            self.go(self.now + seconds + (sync_seconds(its, split.engines) if syncs else 0.0))
            if syncs:
                for engine in self.engines:
                    engine["hold"] += its.sync.pause
                    context = sum(a["size"] + self.sampled(a) for a in engine["open"] if a["left"] is not None)
                    engine["stall"] += context / its.engine.prefill
                    for a in engine["open"]:
                        if a["left"] is None and a["turn"]:
                            a["due"] = a["size"]
                self.go(self.now + its.sync.pause)
            found.append(self.now)
            self.admit(split.prompts, step - step % n)
            self.passes(0.0)
        return found

    def sampled(self, a: dict[str, Any]) -> float:
        return a["turns"][a["turn"]] - a["left"]

    def check(self, step: int, taken: list[int]) -> None:
        assert all(0 <= step - 1 - self.version[p] <= self.split.max_staleness for p in taken)
