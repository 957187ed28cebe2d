"""Pages that are made of the code: every key of every command from the configuration schema, and the public API.

`pages` gives them by name. Nothing of it is committed.
"""

import html
import inspect
import re
from importlib import import_module
from itertools import groupby
from pathlib import Path

from birl.cli.commands import ALL, CONFIGURED, USAGE, Command
from birl.config.keys import Doc, documentation, presets, written
from birl.config.schema import COMMANDS
from birl.envs.open import BUILT_IN
from birl.launch import command as launch
from birl.launch.launcher import WHERE, launcher
from birl.track.figures import TABLE

HEAD = "| key | default | type | meaning |\n|---|---|---|---|\n"
SPECIAL = str.maketrans({c: f"&#{ord(c)};" for c in "|*_{}[]#"})


def pages(root: Path) -> dict[str, str]:
    """Markdown by the name of its page."""
    found = {f"reference/{name}.md": command_page(name, schema) for name, schema in COMMANDS.items()}
    found["reference/figures.md"] = figures_page()
    found["reference/tasks.md"] = tasks_page()
    found["reference/places.md"] = places_page()
    found["reference/commands.md"] = commands_page()
    found["reference/api.md"] = api_page(public_modules(root))
    return found


def command_page(name: str, schema: type) -> str:
    title = " ".join((inspect.getdoc(schema) or "").split())
    head = f"{text(title)} Written as `key=value`, or in a YAML file. `birl {name} --help all` prints the same, and "
    head += f"`birl {name} --help lr` the keys that a word finds."
    parts = [f"# Keys of `birl {name}`\n\n{head}\n"]
    if groups := presets(schema):
        parts.append(presets_part(groups))
    docs = list(documentation(schema).values())
    sections = dict.fromkeys(doc.section for doc in docs)  # in the order in which they come first
    for section, own in groupby(sorted(docs, key=lambda d: list(sections).index(d.section)), lambda d: d.section):
        parts.append(f"## {section or 'The run'}\n\n{HEAD}" + "".join(row(doc, doc.key) for doc in own))
    return "\n".join(parts)


def presets_part(groups: dict[str, dict[str, Path]]) -> str:
    rows = []
    for group, files in groups.items():
        for preset, path in files.items():
            remark = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
            rows.append(f"| `{group}={preset}` | {text(remark)} |\n")
    return "## Presets\n\n| preset | what it is |\n|---|---|\n" + "".join(rows)


def tasks_page() -> str:
    """The keys that built-in environments have of their own."""
    parts = ["# Keys of built-in environments\n\n`birl rl env=NAME --help` prints them.\n"]
    for kind, place in sorted(BUILT_IN.items()):
        module, _, name = place.partition(":")
        section = getattr(import_module(module), name).Config
        rows = "".join(row(doc, f"env.{doc.key}") for doc in documentation(section).values())
        parts.append(f"## {kind}\n\n{HEAD + rows if rows else 'None.'}\n")
    return "\n".join(parts)


def commands_page() -> str:
    """What `birl COMMAND --help` prints, of all commands without keys of their own."""
    parts = ["# Other commands\n"]
    for command in ALL:
        if command.name not in CONFIGURED:
            usage = help_of(command)
            parts.append(f"## `birl {command.name}`\n\n{sentence(command.brief)}\n\n```text\n{usage}\n```\n")
    return "\n".join(parts)


def figures_page() -> str:
    """What a run writes into metrics.jsonl and validation.jsonl."""
    parts = ["# Figures\n\nOf `metrics.jsonl` and `validation.jsonl`, as the report and `birl view` name them.\n"]
    for section, rows in groupby(TABLE.values(), lambda row: row.section):
        told = "".join(f"| `{r.name}` | {text(r.heading)} | {text(r.about)} |\n" for r in rows)
        parts.append(f"## {section}\n\n| name | title [unit] | meaning |\n|---|---|---|\n{told}")
    return "\n".join(parts)


def sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def help_of(command: Command) -> str:
    if command.name == "launch":  # it has one for each place, too: places_page
        return launch.usage("")
    return USAGE.get(command.name) or import_module(command.run.partition(":")[0]).USAGE


def places_page() -> str:
    """The keys of `birl launch`, place by place."""
    parts = ["# Keys of `birl launch`\n\n`birl launch WHERE --help` prints those of a place.\n"]
    for where, brief in WHERE.items():
        rows = "".join(
            row(doc, f"{launch.PREFIX}{doc.key}", where) for doc in documentation(launcher(where).Keys).values()
        )
        parts.append(f"## {where}\n\n{text(sentence(brief))}\n\n{HEAD}{rows}")
    return "\n".join(parts)


def api_page(modules: list[str]) -> str:
    head = "# Python API\n\nThe public modules. A test compares names and parameters with a list in the repository.\n"
    return head + "".join(f"\n## {module}\n\n::: {module}\n" for module in modules)


def public_modules(root: Path) -> list[str]:
    """The headings of docs/public_api.txt."""
    lines = (root / "docs" / "public_api.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", line)]


def row(doc: Doc, key: str, place: str = "") -> str:
    """`place`: in front of the anchor, where several places have the key."""
    unit = f" [{doc.unit}]" if doc.unit else ""
    default = written(doc.default)
    shown = "" if default == "" else f"`{default}`" if "|" not in default else f"<code>{text(default)}</code>"
    kind = text(doc.type + unit)
    return f'| <span id="{place}{key}"></span>`{key}` | {shown} | {kind} | {text(doc.text)} |\n'


def text(words: str) -> str:
    """Plain words as Markdown that shows them; what is in backticks stays code."""
    pieces = re.split(r"(`[^`]+`)", words)
    return "".join(p if p.startswith("`") else html.escape(p, quote=False).translate(SPECIAL) for p in pieces)
