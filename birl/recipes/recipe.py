"""Recipes: stages, and their expected results. Read from `NAME.expected.yaml`, beside the stages' files, in the folder
`recipes` here, else in that of birl's repository."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.regular import read_text

COMMANDS = ("sft", "rm", "dpo", "rl", "eval")
ENDING = ".expected.yaml"
OWN = Path(__file__).parents[2]  # the repository, unless birl was installed without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One `birl` command. In `words` {NAME} stands for the model of the stage of that name.

    Example: Stage(name="dpo", command="dpo", file=Path("recipes/pairs/dpo.yaml"), words=("model.path={sft}",))
    """

    name: str
    command: str
    file: Path | None
    """Configuration of that command; None: `words` are complete."""
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One figure or curve by seed, and its tolerance.

    Example: Expectation(stage="rl", metric="validation/all/score", values={0: 0.96}, tolerance=0.05)
    """

    stage: str
    metric: str
    """Name in the stage's validation.jsonl or metrics.jsonl, or in the output of `birl eval`."""
    tolerance: float
    """Allowed difference on both sides, in the metric's unit."""
    step: str = "last"
    """Step of `values`: last | first | best (the largest) | a number."""
    values: Mapping[int, float]
    """Values by seed; empty for a curve."""
    curves: Mapping[int, Path]
    """CSV files by seed, each with a column `step`; empty for values."""
    column: str = ""
    """Column of the curves with this metric."""
    window: int = 1
    """Number of consecutive points of a curve that are compared by their mean."""

    @property
    def seeds(self) -> list[int]:
        return sorted({*self.values, *self.curves})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Example: Recipe(name="countdown", about="reach a number", hardware="2 CPU cores", minutes=20, stages=..., ...)"""

    name: str
    source: Path
    about: str
    """Goal in one line."""
    hardware: str
    minutes: float | None
    """Minutes of all stages for one seed on that hardware; None if unknown."""
    stages: tuple[Stage, ...]
    expected: tuple[Expectation, ...]
    not_run: str
    """Why it was never run here; empty if it was."""
    published: str
    """Results of its authors, with their source; empty if there are none."""


TOP = ("about", "hardware", "minutes", "stages", "expect", "not_run", "published")
STAGE = ("command", "file", "name", "words")
EXPECT = ("stage", "metric", "step", "values", "tolerance", "curve", "column", "window")


def read(source: Path, name: str) -> Recipe:
    """Read a recipe. Raises one `BirlError` that lists all errors in the file."""
    return _Reader(source, _content(source)).recipe(name)


def _content(source: Path) -> dict[str, Any]:
    import yaml

    from birl.config.file import parse

    try:
        result = yaml.safe_load(text) if parse(text := read_text(source)) else None  # keys that are there twice: error
    except OSError as error:
        raise BirlError(f"{source}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BirlError(f"{source}: is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(result, dict):
        raise BirlError(f"{source}: expected the keys {', '.join(TOP)}, not {type(result).__name__}")
    return result


class _Reader:
    """Reads a recipe and collects errors, to report them together."""

    def __init__(self, source: Path, content: dict[str, Any]) -> None:
        self.source, self.content, self.wrong = source, content, list[str]()

    def recipe(self, name: str) -> Recipe:
        content = self.content
        self.known(content, TOP, "")
        stages = self.stages(content.get("stages"))
        expected = self.expected(content.get("expect"), [stage.name for stage in stages])
        not_run = self.text(content, "not_run")
        if expected and not_run:
            self.wrong.append("not_run: what never ran has nothing to expect; take out one of not_run and expect")
        if not expected and not not_run:
            self.wrong.append("expect: is missing; say what is expected, or in not_run why the recipe never ran")
        minutes = content.get("minutes")
        if minutes is not None and not (_is_number(minutes) and minutes > 0):
            self.wrong.append(f"minutes: must be a number above 0, not {minutes!r}")
        result = Recipe(
            name=name,
            source=self.source,
            about=self.text(content, "about", needed=True),
            hardware=self.text(content, "hardware", needed=True),
            minutes=minutes,
            stages=stages,
            expected=expected,
            not_run=not_run,
            published=self.text(content, "published"),
        )
        if self.wrong:
            raise BirlError("\n".join(f"{self.source}: {problem}" for problem in self.wrong))
        return result

    def stages(self, listed: Any) -> tuple[Stage, ...]:
        """The stages; by default one: `birl rl` with the file of the same name."""
        if listed is None:
            listed = [{"command": "rl", "file": self.source.name.replace(ENDING, ".yaml")}]
        if not (isinstance(listed, list) and listed and all(isinstance(entry, dict) for entry in listed)):
            self.wrong.append("stages: must be a list of stages, each with command and file")
            return ()
        result: list[Stage] = []
        for number, entry in enumerate(listed, 1):
            result.append(self.stage(entry, f"stages, number {number}: ", [stage.name for stage in result]))
        return tuple(result)

    def stage(self, entry: dict[str, Any], where: str, before: list[str]) -> Stage:
        self.known(entry, STAGE, where)
        command, words = entry.get("command"), entry.get("words") or []
        if command not in COMMANDS:
            self.wrong.append(f"{where}command: must be {' | '.join(COMMANDS)}, not {command!r}")
        name = str(entry.get("name") or command)
        if name in before:
            self.wrong.append(f"{where}two stages are called {name}; give one another name")
        file = self.source.parent / str(entry["file"]) if entry.get("file") else None
        if file is not None and not file.is_file():
            self.wrong.append(f"{where}file: there is no {file}")
        if not (isinstance(words, list) and all(isinstance(word, str) and "=" in word for word in words)):
            self.wrong.append(f"{where}words: must be a list of key=value, not {words!r}")
            words = []
        for used in models_in(words):
            if used not in before:
                self.wrong.append(
                    f"{where}words: {{{used}}} is no stage before this one ({', '.join(before) or 'none'})"
                )
        return Stage(name=name, command=str(command), file=file, words=tuple(words))

    def expected(self, listed: Any, stages: list[str]) -> tuple[Expectation, ...]:
        if listed is None:
            return ()
        if not (isinstance(listed, list) and all(isinstance(entry, dict) for entry in listed)):
            self.wrong.append("expect: must be a list, each with metric, tolerance, and values or curve")
            return ()
        return tuple(self.expectation(entry, f"expect, number {n}: ", stages) for n, entry in enumerate(listed, 1))

    def expectation(self, entry: dict[str, Any], where: str, stages: list[str]) -> Expectation:
        self.known(entry, EXPECT, where)
        stage = str(entry.get("stage") or (stages[-1] if stages else ""))
        if stage not in stages:
            self.wrong.append(f"{where}stage: there is no stage {stage}; there is {', '.join(stages)}")
        tolerance: Any = entry.get("tolerance")
        window: Any = entry.get("window", 1)
        if not (_is_number(tolerance) and tolerance >= 0):
            self.wrong.append(f"{where}tolerance: must be a number of at least 0, not {tolerance!r}")
            tolerance = 0.0
        if type(window) is not int or window < 1:
            self.wrong.append(f"{where}window: must be a whole number of at least 1, not {window!r}")
            window = 1
        step = str(entry.get("step", "last"))
        if step not in ("last", "first", "best") and not step.isdigit():
            self.wrong.append(f"{where}step: must be last | first | best | a number, not {step!r}")
        if ("values" in entry) == ("curve" in entry):
            self.wrong.append(f"{where}needs either values, as in {{0: 0.9, 1: 0.92}}, or curve")
        return Expectation(
            stage=stage,
            metric=self.text(entry, "metric", needed=True, where=where),
            tolerance=float(tolerance),
            step=step,
            values=self.values(entry.get("values"), where),
            curves=self.curves(entry.get("curve"), where),
            column=str(entry.get("column") or entry.get("metric")),
            window=window,
        )

    def values(self, table: Any, where: str) -> dict[int, float]:
        if table is None:
            return {}
        if not (isinstance(table, dict) and table and all(type(s) is int and _is_number(v) for s, v in table.items())):
            self.wrong.append(f"{where}values: must be numbers by seed, as in {{0: 0.9, 1: 0.92}}, not {table!r}")
            return {}
        return {seed: float(value) for seed, value in table.items()}

    def curves(self, pattern: Any, where: str) -> dict[int, Path]:
        """The existing files, by the number in place of {seed}."""
        if pattern is None:
            return {}
        before, seed, behind = str(pattern).partition("{seed}")
        if not seed:
            self.wrong.append(f"{where}curve: must be files with {{seed}} in their name, not {pattern!r}")
            return {}
        folder = self.source.parent
        files = {str(file.relative_to(folder)): file for file in folder.glob(f"{before}*{behind}")}
        numbers = {name.removeprefix(before).removesuffix(behind): file for name, file in files.items()}
        result = {int(number): file for number, file in numbers.items() if number.isdigit()}
        if not result:
            self.wrong.append(f"{where}curve: there is no file {folder / str(pattern)}")
        return result

    def text(self, entry: dict[str, Any], key: str, needed: bool = False, where: str = "") -> str:
        result = entry.get(key)
        if result is None and not needed:
            return ""
        if not isinstance(result, str) or not result.strip():
            self.wrong.append(f"{where}{key}: must be a text{'' if result is None else f', not {result!r}'}")
            return ""
        return result.strip()

    def known(self, entry: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
        for key in entry:
            if key not in keys:
                hint = did_you_mean(str(key), keys)
                self.wrong.append(f"{where}there is no key {key}; there are {', '.join(keys)}.{hint}")


def models_in(words: list[str] | tuple[str, ...]) -> list[str]:
    """Stages whose models are used, as {NAME}."""
    import re

    return [name for word in words for name in re.findall(r"\{(\w+)\}", word)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def root() -> Path:
    """The folder that contains `recipes`; paths in recipes are relative to it. Raises `BirlError` if there is none."""
    for folder in (Path.cwd(), OWN):
        if next((folder / "recipes").rglob(f"*{ENDING}"), None) is not None:
            return folder
    raise BirlError(
        "There are no recipes here, and birl was installed without its repository, which has them. Go to a folder "
        f"with recipes/NAME{ENDING}, or name such a file: birl reproduce my{ENDING}"
    )


def names() -> dict[str, Path]:
    """Files of all recipes by name, such as gpu/tinyzero_countdown."""
    shelf = root() / "recipes"
    files = sorted(shelf.rglob(f"*{ENDING}"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(shelf).as_posix().removesuffix(ENDING): file for file in files}


def find(name: str) -> tuple[Recipe, Path]:
    """The recipe with this name or file, and the folder that its paths are relative to. Raises `BirlError`."""
    if name.endswith((".yaml", ".yml")):
        file = Path(name) if name.endswith(ENDING) else Path(name).with_suffix(ENDING)
        if not file.is_file():
            raise BirlError(f"{name}: there is no {file}, which says what a run of it should give.")
        return read(file.absolute(), file.name.removesuffix(ENDING)), Path.cwd()
    result = names()
    if name not in result:
        raise BirlError(f"There is no recipe {name}.{did_you_mean(name, result)} `birl reproduce` lists them.")
    return read(result[name], name), root()
