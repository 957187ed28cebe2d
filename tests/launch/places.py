"""What the tests of launchers share: a job in a folder of its own, the words of a dry run, programs that only say what
they were asked."""

import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RECIPE = "data: {train: my.jsonl}\nengine: {kind: birl, count: 2}\nweights: {method: direct}\n"
ROW = '{"prompt": "What is 3 + 4?", "answer": "7"}\n'
#: the keys that a place does not start without
NEEDED = {"aws": ("launch.bucket=my-runs", "launch.ssh_from=203.0.113.7/32")}


def folder(path: Path) -> Path:
    """A working folder with a recipe and its data."""
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "my.jsonl").write_text(ROW)
    return path


def words(where: str, *more: str) -> list[str]:
    """Of `birl launch WHERE rl` in such a folder."""
    return [where, "rl", "recipe.yaml", "steps=3", "run=runs/demo", *NEEDED.get(where, ()), *more]


def files(shown: str) -> dict[str, str]:
    """What a dry run shows, by name."""
    found: dict[str, str] = {}
    for part in shown.split("\n# --- ")[1:]:
        name, _, text = part.partition("\n")
        found[name] = text.rstrip("\n") + "\n"
    return found


def documents(text: str) -> list[dict]:
    return list(yaml.safe_load_all(text))


def is_shell(text: str) -> None:
    """Raises where sh would not read it."""
    done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, timeout=10)
    assert done.returncode == 0, done.stderr


STAND_IN = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=log)
answers = {answers!r}
for words, answer in answers.items():
    if words in " ".join(sys.argv[1:]):
        sys.exit(answer) if isinstance(answer, int) else print(answer)
        break
"""


def stand_ins(place: Path, names: Sequence[str], answers: Mapping[str, str | int] | None = None) -> Path:
    """Programs in `place`/bin that append their words to the file that is returned, and print the first of `answers`
    whose key is among their words (a number: their exit code)."""
    log = place / "asked.jsonl"
    (place / "bin").mkdir(exist_ok=True)
    for name in names:
        file = place / "bin" / name
        file.write_text(STAND_IN.format(python=sys.executable, log=str(log), answers=dict(answers or {})))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return log


def head_words(text: str) -> list[str]:
    """The words of `birl launch ray` in a script."""
    (line,) = [line for line in text.splitlines() if line.startswith("birl launch ray ")]
    return shlex.split(line)[3:]
