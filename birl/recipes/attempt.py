"""One attempt to reproduce a recipe with one seed: its stages as `birl` commands, and what they gave."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.recipes.band import Finding, Points, compare
from birl.recipes.recipe import Recipe, Stage, models_in
from birl.track.runs import mapping, summary

ELSEWHERE = ("run", "resume", "threads", "output")  # in which what is done may differ from what would start now


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Example: Attempt(recipe=recipe, seed=0, folder=Path("runs/reproduce/countdown/seed-0"), words=("threads=1",))"""

    recipe: Recipe
    seed: int
    folder: Path
    words: tuple[str, ...] = ()
    """More key=value of the user, for every stage."""
    below: Path | None = None
    """The folder that the commands run in, where paths can be short; None: paths are whole."""

    def command(self, stage: Stage) -> list[str]:
        """The words behind `birl`."""
        models = {name: self._path(self.model(name)) for name in models_in(stage.words)}
        own = [_filled(word, models) for word in stage.words]
        file = [self._path(stage.file)] if stage.file else []
        key, out = ("output", self.result(stage)) if stage.command == "eval" else ("run", self.folder / stage.name)
        return [stage.command, *file, *own, f"seed={self.seed}", *self.words, f"{key}={self._path(out)}"]

    def _path(self, path: Path) -> str:
        return str(path.relative_to(self.below) if self.below and path.is_relative_to(self.below) else path)

    def model(self, stage: str) -> Path:
        return self.folder / f"{stage}-model"

    def result(self, stage: Stage) -> Path:
        return self.folder / f"{stage.name}.json"

    def check(self) -> None:
        """Raises one `BirlError` with everything that is wrong with the configurations, before anything starts."""
        from birl.config.load import load
        from birl.config.schema import COMMANDS

        problems = []
        for stage in self.recipe.stages:
            try:
                load(COMMANDS[stage.command], self.command(stage)[1:])
            except BirlError as error:
                problems.append(f"{self.recipe.name}, stage {stage.name}:\n{error}")
        if problems:
            raise BirlError("\n".join(problems))

    def commands(self) -> Iterator[tuple[Stage, list[str]]]:
        """Everything that is to be done, in order: the stages, and the models that later ones want."""
        wanted = {name for stage in self.recipe.stages for name in models_in(stage.words)}
        for stage in self.recipe.stages:
            yield stage, self.command(stage)
            if stage.name in wanted:
                run, model = self._path(self.folder / stage.name), self._path(self.model(stage.name))
                yield stage, ["checkpoints", run, "export", "last", model]

    def run(self, start: Callable[[Sequence[str]], int | None]) -> int:
        """Everything that is not done yet; the exit code of the first command that failed, 130 where one was stopped.
        `start` runs a `birl` command and gives its exit code, None where it did not begin."""
        for stage, command in self.commands():
            if self.done(stage, command):
                continue
            code = start(command)
            if code is None or (code == 0 and not self.done(stage, command)):
                return 130  # a signal: what was done is saved
            if code:
                return code
        return 0

    def done(self, stage: Stage, command: Sequence[str]) -> bool:
        if command[0] == "checkpoints":
            return self.model(stage.name).is_dir()
        if command[0] == "eval":
            return self._same(stage, mapping(self.result(stage)).get("config", {}))
        run = self.folder / stage.name
        return bool(summary(run).get("finished")) and self._same(stage, mapping(run / "config.json"))

    def _same(self, stage: Stage, before: dict[str, Any]) -> bool:
        """What has another configuration is not done: an evaluation is repeated, a run says what differs."""
        from birl.config.load import flatten, load
        from birl.config.schema import COMMANDS

        now = json.loads(json.dumps(flatten(load(COMMANDS[stage.command], self.command(stage)[1:]))))
        return all(before.get(key) == now.get(key) for key in {*before, *now} if key not in ELSEWHERE)

    def findings(self) -> list[Finding]:
        """Every expected figure beside what this attempt gave. Raises `BirlError` for files that cannot be read."""
        stages = {stage.name: stage for stage in self.recipe.stages}
        return [
            finding
            for expected in self.recipe.expected
            for finding in compare(expected, self.points(stages[expected.stage], expected.metric), self.seed)
        ]

    def points(self, stage: Stage, metric: str) -> Points:
        """A metric over the steps of a stage; of `birl eval` one point at step 0."""
        if stage.command == "eval":
            value = mapping(self.result(stage)).get("metrics", {}).get(metric)
            return [] if value is None else [(0, float(value))]
        from birl.track.log import read_jsonl

        points: dict[int, float] = {}
        for name in ("metrics.jsonl", "validation.jsonl"):
            file = self.folder / stage.name / name
            for record in read_jsonl(file) if file.exists() else []:
                if metric in record:
                    points[int(record["step"])] = math.nan if record[metric] is None else float(record[metric])
        return sorted(points.items())


def _filled(word: str, models: dict[str, str]) -> str:
    for name, model in models.items():
        word = word.replace(f"{{{name}}}", model)
    return word
