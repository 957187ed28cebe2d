"""Commands with a configuration (training, `eval`, `serve`): words are flags, YAML files and key=value."""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from birl.cli import load
from birl.cli.commands import TRAINING
from birl.errors import BirlError, did_you_mean

FLAGS = ("--help", "--print-config", "--multirun", "--dry-run", "--validate", "--judge", "--contamination")
SHORT_FLAGS = {"-h": "--help", "help": "--help", "-m": "--multirun"}
ONLY = {  # flag -> the commands that accept it, and why others do not
    "--dry-run": (TRAINING, "belongs to training"),
    "--validate": (("eval",), "belongs to `birl eval`, which plays the right answers"),
    "--judge": (("eval",), "belongs to `birl eval`, which compares judges with people"),
    "--contamination": (("rl",), "belongs to `birl rl`, which has data.train and data.validation"),
    "--multirun": ((*TRAINING, "eval"), "runs one job after another, and a server does not end; start one for each"),
}


#: command -> module that runs it
RUNS = dict.fromkeys(TRAINING, "birl.train.command") | {
    "eval": "birl.cli.evaluation",
    "serve": "birl.server.serve",
    "tinker": "birl.server.tinker.restarts",
}


def run(command: str, words: list[str]) -> int:
    """Run a command; returns the exit code. Raises `BirlError`."""
    from birl.config.file import to_yaml
    from birl.config.load import load_with_choices
    from birl.config.schema import COMMANDS

    schema = COMMANDS[command]
    flags, overrides = _split_flags(command, words)
    if "--help" in flags:
        _help(command, schema, overrides)
        return 0
    if "--multirun" in flags:
        return _multirun(command, schema, overrides, flags)
    if "--judge" in flags:
        overrides = [*overrides, "reward.functions=[judge]"]
    config: Any
    named: dict[str, str] = {}
    if "--dry-run" in flags and command == "rl":
        overrides, card = load("birl.plan.cluster").split_device(overrides)
        named = {"card": card} if card else {}
    config, choices = load_with_choices(schema, overrides)
    if "--print-config" in flags:
        print("# presets: " + " ".join(f"{group}={name}" for group, name in choices.items()))
        print(to_yaml(config), end="")
        return 0
    if "--judge" in flags:
        return load("birl.cli.judging").run(config)
    if command == "eval" and config.baseline:
        load("birl.rollout.evaluate").Baseline.read(config.baseline)
    if command == "eval" and config.output:  # fail before the evaluation
        load("birl.cli.output").prepare(config.output)
    if RUNS[command] not in sys.modules and _ended(command, config, choices, flags):  # else it reports as soon
        return 0
    for flag in ("--validate", "--contamination"):
        if flag in flags:
            return load(f"birl.cli.{flag[2:]}").run(config)
    loop = load(RUNS[command])
    if command not in TRAINING:
        return loop.run(config) or 0  # `birl eval` returns None
    config, choices = _over_ranks(schema, overrides, config, choices)
    if _ranks().leads():
        return exit_code(loop.train(config, choices, dry_run="--dry-run" in flags, **named))
    loop.follow(config)
    return 0


def _ended(command: str, config: Any, choices: dict[str, str], flags: set[str]) -> bool:
    """Print the end of a run that has finished before; whether it has. Raises `BirlError` for what needs no torch."""
    from birl.config.load import run_folder
    from birl.hosts import bind, token_for
    from birl.preflight import check_folder, check_names, ended

    check_names(config, rows="--validate" not in flags)  # which lists all wrong rows
    if os.environ.get("RANK", "0") != "0":
        return False
    if command in ("serve", "tinker"):  # only one of several ranks listens
        if command == "serve":
            token_for(config.host)
        bind(config.host, config.port).close()
    if command in TRAINING:
        folder = Path(run_folder(config, choices)).absolute()
        check_folder(folder, config, "--dry-run" in flags)
        alone = "--dry-run" not in flags and os.environ.get("WORLD_SIZE", "1") == "1"
        if alone and (result := ended(folder, config)):
            load("birl.track.tracker").say_end(folder, config.track, result)
            return True
    if not flags & {"--validate", "--contamination"}:  # they use no model
        print(f"birl: loading {config.model.path}", file=sys.stderr, flush=True)  # importing torch takes seconds
    return False


def exit_code(summary: dict[str, Any] | None) -> int:
    """Exit code of a training: 0, or that of the signal that ended it early."""
    return 128 + summary["signal"] if summary and not summary.get("finished", True) else 0


def _over_ranks(
    schema: type[Any], words: list[str], config: Any, choices: dict[str, str]
) -> tuple[Any, dict[str, str]]:
    """Use FSDP if torchrun or another launcher has started several ranks, and no key says how to split the model."""
    from birl.config.load import load_with_choices

    ranks = _ranks()
    ranks.end_with_torchrun()
    if ranks.started() > 1 and ranks.grid_of(config).size == 1:
        return load_with_choices(schema, [*words, f"parallel.fsdp={ranks.started()}"])
    return config, choices


def _ranks() -> Any:
    return import_module("birl.parallel.grid")


def flags_of(command: str) -> tuple[str, ...]:
    """Flags that the command accepts."""
    return tuple(flag for flag in FLAGS if command in ONLY.get(flag, ((command,), ""))[0])


def _split_flags(command: str, words: list[str]) -> tuple[set[str], list[str]]:
    words, known = [SHORT_FLAGS.get(word, word) for word in words], flags_of(command)
    for word in words:
        if (flag := word.partition("=")[0]) in known and flag != word:
            raise BirlError(f"{word}: {flag} is a switch and takes no value; write {flag}.")
        if word in known or not word.startswith("--") or "=" in word or "--help" in words:
            continue
        if word in ONLY:
            raise BirlError(f"{word} {ONLY[word][1]}; `birl {command}` has {', '.join(known)}")
        from birl.config.nearest import nearest_keys, suggest
        from birl.config.schema import COMMANDS

        keys = nearest_keys(word, COMMANDS[command])
        near = f" Did you mean {keys[0]}=...?" if keys else suggest(word, COMMANDS[command])
        near = near or did_you_mean(word, known)
        raise BirlError(
            f"{word}: there is no such flag ({', '.join(known)}); keys are written key=value, without dashes.{near}"
        )
    return {word for word in words if word in known}, [word for word in words if word not in known]


def _help(command: str, schema: type, words: list[str]) -> None:
    from birl.config.help import Own, render

    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    only = tuple(word.lstrip("-").partition("=")[0] for word in words if not word.endswith((".yaml", ".yml")))
    kinds = [word.partition("=")[2] for word in words if word.startswith(("env=", "env.kind="))]
    own = None
    if command in ("rl", "eval") and kinds and kinds[-1]:
        from birl.envs.open import own_section

        own = Own(kind=kinds[-1], section=own_section(kinds[-1]))
    width, flags = shutil.get_terminal_size((100, 24)).columns, tuple(f for f in flags_of(command) if f != "--help")
    print(render(command, schema, width, only, bold, own, flags))


def _multirun(command: str, schema: type[Any], overrides: list[str], flags: set[str]) -> int:
    """Run one process per combination, one after the other. All configurations are checked first."""
    from birl.config.file import to_yaml
    from birl.config.load import load_with_choices, run_folder
    from birl.jobs import Jobs, job_names, sweep, swept_keys

    swept, jobs, errors, configs = swept_keys(overrides), sweep(overrides), [], []
    for job in jobs:
        try:
            configs.append(load_with_choices(schema, job))
        except BirlError as error:
            errors.append(f"{' '.join(job)}\n{error}" if len(jobs) > 1 else str(error))
    if errors:
        raise BirlError("\n".join(errors))
    names = job_names(jobs, swept)
    if command in TRAINING and "run" not in swept:
        folder = run_folder(configs[0][0], configs[0][1], without=swept if len(jobs) > 1 else ())
        jobs = _each("run", [f"{folder}/{name}" if name else folder for name in names], jobs)
    elif command == "eval" and configs[0][0].output and "output" not in swept:
        folder = Path(configs[0][0].output).with_suffix("")
        jobs = _each("output", [f"{folder}/{name or 'result'}.json" for name in names], jobs)
    if "--print-config" in flags:
        for job in jobs:
            print(f"--- # {' '.join(job)}\n{to_yaml(load_with_choices(schema, job)[0])}", end="")
        return 0
    return Jobs().run([[command, *job, *sorted(flags - {"--multirun"})] for job in jobs], names)


def _each(key: str, values: list[str], jobs: list[list[str]]) -> list[list[str]]:
    """The words of the jobs, each with its value of the key in place of a common one."""
    kept = [[word for word in job if word.partition("=")[0] != key] for job in jobs]
    return [[*words, f"{key}={value}"] for words, value in zip(kept, values, strict=True)]
