"""`birl launch WHERE COMMAND ...`, `birl status`, `birl logs`, `birl stop`, `birl scale`."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from birl.config.keys import documentation, written
from birl.config.load import load_with_choices, read_section
from birl.config.schema import TRAINING
from birl.errors import BirlError, did_you_mean
from birl.flags import Flag, taken
from birl.launch.job import Job, derive
from birl.launch.launcher import FILE, PROCESSES, WHERE, Handle, find, launcher
from birl.preflight import check_names
from birl.visible import visible

PREFIX = "launch."
DRY, HELP, FOLLOW = Flag(name="--dry-run"), Flag(name="--help"), Flag(name="--follow")
EXAMPLE, MORE = "`birl launch local rl data.train=my.jsonl`", "`birl launch --help` explains them"
ELEMENT = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|((?:\[[^]]*\]|[^,])+?))\s*(?:,|$)""")  # element of a list
TRUST = Flag(name="--trust")  # accept a run folder that another account launched


def run(words: list[str]) -> int:
    """`birl launch`. Raises `BirlError`."""
    flags, rest = taken("launch", ["--help" if word == "-h" else word for word in words], (DRY, HELP))
    where, command, *rest = [*rest, "", ""]
    rest = [word for word in rest if word]
    if HELP.name in flags:
        print(usage(where))
        return 0
    if not where:
        raise BirlError(f"Name a place and a command, as in {EXAMPLE}. Places: {', '.join(WHERE)}; {MORE}.")
    place = launcher(where)
    if not command:
        raise BirlError(f"Name what to start, as in {EXAMPLE}. Commands: {', '.join(TRAINING)}; {MORE}.")
    keys, others = keys_of(place.Keys, rest)
    job = derive(command, others, keys)
    if where in PROCESSES:  # files of the configuration must be on this machine
        check_names(load_with_choices(TRAINING[command], others)[0])
    if DRY.name in flags:
        print(shown(job, place.render(job, keys)), end="")
        return 0
    handle = place.submit(job, keys)
    handle.save()
    print(f"{job.name} was handed to {where} as {handle.id}. Its run folder: {job.run}")
    for what in ("status", "logs", "stop"):
        print(f"  birl {what} {shlex.quote(str(job.run))}")
    return 0


def keys_of(schema: type[Any], words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the launcher's keys, written launch.KEY=VALUE, and the other words. Raises `BirlError`."""
    given, rest, docs = {}, [], documentation(schema)
    for word in words:
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix(PREFIX).partition("=")
        if key not in docs:
            near = did_you_mean(key, docs, PREFIX)
            raise BirlError(f"{word}: there is no such key; there are {', '.join(PREFIX + k for k in docs)}.{near}")
        if not equals:
            raise BirlError(f"{word}: has no value; write {PREFIX}{key}=VALUE")
        given[key] = listed(value) if docs[key].several else value
    return read_section(schema, given, PREFIX), rest


def listed(text: str) -> list[str]:
    """Split a list, with or without brackets around it, at commas that are not within brackets or quotes.

    Example: listed('[--exclude=n[1,3],"numpy>=1,<3"]') == ["--exclude=n[1,3]", "numpy>=1,<3"]
    """
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return ["".join(match.groups("")) for match in ELEMENT.finditer(inside) if any(match.groups())]


def shown(job: Job, rendered: dict[str, str]) -> str:
    lines = [f"# {job.name}: birl {job.command}, run folder {job.run}"]
    for role in job.roles:
        needs = [f"{role.gpus:g} GPU", f"{role.cpus} CPU", *([f"{role.memory_gb:g} GiB"] if role.memory_gb else [])]
        lines.append(f"#   {role.name}: {role.count} x ({', '.join(needs)})")
    if job.env:
        lines.append(f"# from the environment, by name: {', '.join(job.env)}")
    for name, text in rendered.items():
        lines += ["", f"# --- {name}", text.rstrip("\n")]
    return "\n".join(lines) + "\n"


def usage(where: str) -> str:
    lines = [
        "Usage: birl launch WHERE COMMAND [FILE.yaml] [key=value ...] [launch.key=value ...] [--dry-run]",
        "",
        f"COMMAND: {', '.join(TRAINING)}, with what it takes otherwise. --dry-run shows every file and command. Then:",
        "birl status RUN, birl logs RUN [ROLE] [--follow], birl stop RUN, birl scale RUN engines=+2. RUN is a folder.",
        "",
        *(f"  {name:<12} {text}" for name, text in WHERE.items()),
    ]
    if where:
        lines += ["", f"Keys of birl launch {where}:"]
        schema = launcher(where).Keys
        docs = documentation(schema)
        for name in (f.name for f in fields(schema)):
            doc = docs[name]
            unit = f" [{doc.unit}]" if doc.unit else ""
            lines.append(f"  {PREFIX}{name}={written(doc.default)}{unit}\n      {doc.text}")
    return "\n".join(lines)


def status(words: list[str]) -> int:
    """`birl status RUN`; returns 1 if a process has failed."""
    handle = one(words, "status")
    result = launcher(handle.where).status(handle)
    print(visible(f"{handle.name}: {handle.where} {handle.id}"))
    for line in result:
        text = f"  {f'{line.role} {line.index}':<14} {line.state:<11} {line.where:<24} {line.detail}"
        print(visible(text).rstrip())  # the detail is the last line that a process printed
    return 1 if any(line.state == "failed" for line in result) else 0


def logs(words: list[str]) -> int:
    flags, rest = taken("logs", [FOLLOW.name if word == "-f" else word for word in words], (FOLLOW, TRUST))
    run, *roles = rest or [""]
    if not run or len(roles) > 1:
        raise BirlError(f"Name a run folder with {FILE}, as in `birl logs runs/NAME [ROLE] [--follow]`")
    handle = find(run, TRUST.name in flags)
    for line in launcher(handle.where).logs(handle, roles[0] if roles else "", FOLLOW.name in flags):
        sys.stdout.write(line if line.endswith("\n") else line + "\n")
        sys.stdout.flush()
    return 0


def stop(words: list[str]) -> int:
    handle = one(words, "stop")
    if state := launcher(handle.where).stop(handle):
        print(f"{visible(handle.name)} had ended before: it is {state}.")
        return 0
    again = f"`birl launch {handle.where} ...` with the same arguments resumes from its checkpoint."
    print(f"{visible(handle.name)} was stopped. {again}")
    return 0


def scale(words: list[str]) -> int:
    """`birl scale RUN engines=+2`."""
    flags, rest = taken("scale", words, (TRUST,))
    run, change, *more = [*rest, "", ""]
    if not run or not change.startswith("engines=") or any(more):
        raise BirlError("Name a run folder and the engines, as in `birl scale runs/NAME engines=+2`")
    handle = find(run, TRUST.name in flags)
    place = launcher(handle.where)
    if not hasattr(place, "scale"):
        raise BirlError(f"{handle.where} keeps the number of engines that a job was started with")
    number = place.scale(handle, change.removeprefix("engines="))  # pyright: ignore[reportAttributeAccessIssue]
    shown = f"`birl status {shlex.quote(handle.run)}` shows them."
    print(f"{visible(handle.name)}: {number} engine{'s' * (number > 1)}. {shown}")
    return 0


def one(words: list[str], command: str) -> Handle:
    flags, rest = taken(command, words, (TRUST,))
    if len(rest) != 1:
        raise BirlError(f"birl {command}: name a run folder with {FILE}, as in `birl {command} runs/NAME`")
    return find(rest[0], TRUST.name in flags)
