"""One attempt to reproduce a recipe with one seed: its stages as `birl` commands, and their results."""

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

ELSEWHERE = ("run", "resume", "threads", "output")  # keys that may differ between a finished stage and its command now


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Example: Attempt(recipe=recipe, seed=0, folder=Path("runs/reproduce/countdown/seed-0"), words=("threads=1",))"""

    recipe: Recipe
    seed: int
    folder: Path
    words: tuple[str, ...] = ()
    """Further key=value words of the user, for every stage."""
    below: Path | None = None
    """Working directory of the commands, below which paths are relative; None: paths are absolute."""

    def command(self, stage: Stage) -> list[str]:
        """The words after `birl`."""
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
        """Check all configurations before anything starts. Raises one `BirlError` that lists all errors."""
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
        """All commands in order: the stages, and the exports of models that later ones need."""
        wanted = {name for stage in self.recipe.stages for name in models_in(stage.words)}
        for stage in self.recipe.stages:
            yield stage, self.command(stage)
            if stage.name in wanted:
                run, model = self._path(self.folder / stage.name), self._path(self.model(stage.name))
                yield stage, ["checkpoints", run, "export", "last", model]

    def run(self, start: Callable[[Sequence[str]], int | None]) -> int:
        """Run everything that is not done yet; returns the exit code of the first command that failed, 130 if one was
        stopped. `start` runs a `birl` command and returns its exit code, None if it did not begin."""
        for stage, command in self.commands():
            if self.done(stage, command):
                continue
            code = start(command)
            if code is None or (code == 0 and not self.done(stage, command)):
                return 130  # a signal: progress is saved
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
        """Whether a stage was run with this configuration; if not, an evaluation is repeated, a run reports it."""
        from birl.config.file import flatten
        from birl.config.load import load
        from birl.config.schema import COMMANDS

        now = json.loads(json.dumps(flatten(load(COMMANDS[stage.command], self.command(stage)[1:]))))
        return all(before.get(key) == now.get(key) for key in {*before, *now} if key not in ELSEWHERE)

    def findings(self) -> list[Finding]:
        """All expected figures with the results of this attempt. Raises `BirlError` for files that cannot be read."""
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
