"""The command line: `birl COMMAND [key=value ...]`. Everything heavy is imported by the command that needs it.

Exit codes: 0 done, or stopped by a signal and saved; 1 a job of --multirun failed, `birl doctor` found something
missing, `birl eval --validate` a wrong row or `birl reproduce` a figure outside its band; 2 a mistake in the input; 130
interrupted.
"""

import os
import shutil
import signal
import sys
import threading
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

from birl import __version__
from birl.allocator import keep_memory
from birl.errors import BirlError

SUMMARY = """\
birl {version}: reinforcement-learning post-training for language models

Usage: birl COMMAND [key=value ...] [--help]

  sft          train a model on texts
  rm           train a reward model on pairs of answers
  dpo          train a model on pairs of answers
  rl           train a model by reinforcement learning
  eval         measure a model on data; --validate: are the right answers right?
  serve        a model behind HTTP: OpenAI's dialect and birl's own
  launch       start a training somewhere else, or detached: this machine, a cluster, a cloud
  status       the processes of a launched training
  logs         what they print
  stop         let them save and end
  scale        more engines, or fewer
  view         runs as a live page: curves, comparison, rollouts, timeline
  rollouts     search what the model said in a run, and export it
  trace        where a run's time went, who waited for whom; for Chrome and Perfetto, too
  plan         how much memory a training will take; --simulate: how to split GPUs; --cluster: which layout
  reproduce    run a recipe, and say whether it gave what it gave before
  chat         talk to a model or to a run
  runs         the runs of a folder: state, step, reward, best validation
  diff         two runs: the keys that differ, and what came out
  ledger       where every token went that a run has sampled
  checkpoints  list, verify, export and prune the checkpoints of a run
  cache        list, verify and clear converted models
  doctor       what is installed, which device, what is missing and how to get it
  completion   a script that completes all this in bash, zsh or fish

Start here
  birl doctor
  birl rl data.train=my.jsonl            # rows such as {{"prompt": "What is 3 + 4?", "answer": "7"}}
  birl rl --help                         # every key, its default and its meaning
  birl rl --help lr                      # only the keys that contain "lr"
"""

LAUNCHED = ("launch", "status", "logs", "stop", "scale")
USAGE = {
    "status": "Usage: birl status RUN\n\nEvery process of a training that `birl launch` started; exits with 1 where "
    "one has failed.",
    "logs": "Usage: birl logs RUN [ROLE] [--follow]\n\nWhat the processes of a launched training have printed.",
    "stop": "Usage: birl stop RUN\n\nLets a launched training save and end.",
    "scale": "Usage: birl scale RUN engines=+2 | engines=-1 | engines=4\n\nAdds engines to a launched training that "
    "runs, or takes some away. A new one gets the current weights before\nits first request; one that leaves answers "
    "what it has.",
    "plan": "Usage: birl plan [FILE.yaml] [key=value ...] [--memory GIB] [--json]\n\nTakes what `birl rl` takes, but "
    "reads neither weights nor data. Predicts the memory of generation and training,\nand the largest micro-batch and "
    "batch that fit into --memory (default: what is free).\n\n"
    "       birl plan --simulate [RUN, FILE or PRESET] [section.key=value ...] [--measured FILE] [--json]\n\n"
    "How to split GPUs into engines and learners, simulated from the times of the parts, and who would wait for whom.\n"
    "PRESET: smollm2_cpu (default), h200_8b.\n\n"
    "       birl plan --cluster [MODEL] [gpu=KIND] [gpus=N] [batch=TOKENS] [sequence=TOKENS] [key=value] [--json]\n\n"
    "Which layouts ddp x fsdp x cp x tp x ep of a model fit on a cluster, and which are fastest, from data sheets.\n"
    "MODEL: a folder with config.json, or a known name such as llama3-70b. KIND: a100-80, h100, h200, b200, gb200.",
    "reproduce": "Usage: birl reproduce                                        list the recipes\n"
    "       birl reproduce NAME [--seed N] [--dry-run] [key=value ...]\n\n"
    "Runs a recipe of recipes/ into runs/reproduce/NAME/seed-N and compares what it gives with NAME.expected.yaml.\n"
    "Exits with 0 when everything is within the band, 1 when something is outside or there is no band. The same\n"
    "command again goes on where it was. --dry-run checks the configurations and prints the commands.",
    "chat": "Usage: birl chat [MODEL or RUN] [key=value ...]\n\nMODEL is a folder, a .gguf file, a hub id or "
    "smollm2 (default).",
    "runs": "Usage: birl runs [FOLDER ...] [--json]\n\nThe runs in runs/ or in FOLDER, the newest first.\n\n"
    "state   running; done; stopped (by a signal, and saved);\n        failed (it ended without saying so: an error, a "
    "kill, a power cut)\nreward  of the last step\ntime    of all its processes",
    "diff": "Usage: birl diff RUN RUN [--json]\n\nThe keys of the configuration that differ, then the figures side by "
    "side; `last` is the mean of the last ten steps.",
    "ledger": "Usage: birl ledger RUN\n\nAdds up RUN/ledger.jsonl; exits with 1 where it does not close.",
    "checkpoints": "Usage: birl checkpoints RUN                       list\n"
    "       birl checkpoints RUN verify [STEP]         compare every file with its digest; 1 where one differs\n"
    "       birl checkpoints RUN export STEP FOLDER    write a Hugging Face model folder (STEP: number, last, best)\n"
    "       birl checkpoints RUN export-adapter STEP FOLDER\n"
    "                                                  of a run with lora.rank: the adapter alone, in peft's format\n"
    "       birl checkpoints RUN prune N               keep the newest N and the best",
    "cache": "Usage: birl cache [list]        converted models and their size\n"
    "       birl cache clear NAME    remove those whose name begins so\n"
    "       birl cache clear --all   remove all\n"
    "       birl cache verify        find damaged ones; 1 where there is one",
    "doctor": "Usage: birl doctor\n\nExits with 0 when `birl rl` could run here, else with 1.",
    "completion": "",  # birl/completion/command.py
}
# What completion offers behind each command beside keys and folders.
WORDS: dict[str, tuple[str, ...]] = {
    "logs": ("--follow", "--help"),
    "plan": ("--memory", "--json", "--simulate", "--measured", "--cluster", "--help"),
    "runs": ("--json", "--help"),
    "diff": ("--json", "--help"),
    "checkpoints": ("verify", "export", "export-adapter", "prune", "--help"),
    "cache": ("list", "verify", "clear", "--all", "--help"),
    "completion": ("bash", "zsh", "fish", "--help"),
}

FLAGS = ("--help", "--print-config", "--multirun", "--dry-run", "--validate")
SHORT_FLAGS = {"-h": "--help", "-m": "--multirun"}
TRAINING = ("sft", "rm", "dpo", "rl")
CONFIGURED = (*TRAINING, "eval", "serve")
COMMANDS = (*CONFIGURED, "launch", "trace", "view", "rollouts", *USAGE)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code. A `BirlError` becomes a message, never a traceback."""
    keep_memory()
    if isinstance(sys.stdout, TextIOWrapper):  # a character that the terminal's encoding lacks is no reason to stop
        sys.stdout.reconfigure(errors="replace")
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except BirlError as error:
        for line in str(error).splitlines():
            print(f"birl: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("birl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `birl rl --help | head`; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int:
    command, *words = argv or ["--help"]
    if command in ("--help", "-h", "help") and words and words[0] in COMMANDS:
        return _dispatch([*words, "--help"])
    if command in ("--help", "-h", "help"):
        print(SUMMARY.format(version=__version__), end="")
        return 0
    if command == "--version":
        print(f"birl {__version__}")
        return 0
    if command in CONFIGURED:
        return _configured(command, words)
    if command == "launch":
        from birl.launch import command as launching

        return launching.run(words)
    if command == "view":
        from birl.view import command as viewing

        if "--help" in words or "-h" in words:
            print(viewing.USAGE)
            return 0
        return viewing.run(words)
    if command == "rollouts":
        from birl.view import rollouts_command

        if "--help" in words or "-h" in words:
            print(rollouts_command.USAGE)
            return 0
        return rollouts_command.run(words)
    if command == "trace":
        from birl.track import trace_command

        if "--help" in words or "-h" in words:
            print(trace_command.USAGE)
            return 0
        return trace_command.run(words)
    if command not in USAGE:
        from birl.config.words import did_you_mean

        what = (
            "a command comes first, as in `birl rl key=value`" if "=" in command else f"there is no command {command}"
        )
        near = did_you_mean(command, (*COMMANDS, "--version", "--help"))
        raise BirlError(f"{what}; the commands are {', '.join(COMMANDS)}.{near}")
    if "--help" in words or "-h" in words:
        print(USAGE[command] or _completion_usage())
        return 0
    return _plain(command, words)


def _completion_usage() -> str:
    return import_module("birl.completion.command").USAGE


def _completion(words: list[str]) -> int:
    from birl.completion import command

    lines = [line.split(None, 1) for line in SUMMARY.partition("Start here")[0].splitlines() if line.startswith("  ")]
    flags = {name: tuple(flag for flag in FLAGS if _belongs(flag, name)) for name in CONFIGURED}
    return command.run(words, {line[0]: line[1] for line in lines}, flags | WORDS)


def _belongs(flag: str, command: str) -> bool:
    if flag == "--dry-run":
        return command in TRAINING
    if flag == "--validate":
        return command == "eval"
    return flag != "--multirun" or command != "serve"


def _plain(command: str, words: list[str]) -> int:
    if command == "doctor":
        from birl import doctor

        if words:
            raise BirlError(f"birl doctor takes no words, got {' '.join(words)}")
        return doctor.run()
    if command == "plan":
        return _plan(words)
    if command in LAUNCHED:
        from birl.launch import command as launching

        return getattr(launching, command)(words)
    if command == "chat":
        chat = _load("birl.loops.chat")
        target = words[0] if words and "=" not in words[0] else ""
        chat.run(target or "smollm2", words[1:] if target else words)
        return 0
    if command == "runs":
        from birl.track import listing

        return listing.run(words)
    if command == "diff":
        from birl.track import difference

        return difference.run(words)
    if command == "completion":
        return _completion(words)
    if command == "reproduce":
        from birl.recipes import command as reproduce

        return reproduce.run(words)
    if command == "ledger":
        from birl.loops import ledger

        if len(words) != 1:
            raise BirlError("birl ledger: name a run folder, as in `birl ledger runs/NAME`")
        return ledger.run(words[0])
    if command == "checkpoints":
        if not words:
            raise BirlError("birl checkpoints: name a run folder, as in `birl checkpoints runs/NAME`")
        from birl.learner import checkpoint_cli

        return checkpoint_cli.run(words)
    from birl.models import cache_cli

    return cache_cli.run(words)


def _plan(words: list[str]) -> int:
    if any(word.partition("=")[0] in ("--simulate", "--measured") for word in words):
        return _simulate(words)
    if "--cluster" in words:
        return _cluster(words)
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--memory=") else [word])]
    available = None
    if "--memory" in words:
        place = words.index("--memory")
        try:
            available = float("".join(words[place + 1 : place + 2]))
        except ValueError:
            raise BirlError("--memory takes a number of GiB, as in `birl plan --memory 16`") from None
        words = words[:place] + words[place + 2 :]
    as_json, words = "--json" in words, [word for word in words if word != "--json"]
    if unknown := [word for word in words if word.startswith("--") and "=" not in word]:
        raise BirlError(f"{unknown[0]}: `birl plan` has --memory GIB, --json, --simulate and --cluster")
    from birl.loops import plan

    plan.run(words, as_json=as_json, available=available)
    return 0


def _simulate(words: list[str]) -> int:
    from birl.simulation import command

    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    measured = ""
    if "--measured" in words:
        place = words.index("--measured")
        measured = "".join(words[place + 1 : place + 2])
        if not measured or measured.startswith("--"):
            raise BirlError("--measured takes a file, as in `birl plan --simulate --measured async.json`")
        words = words[:place] + words[place + 2 :]
    as_json, words = "--json" in words, [word for word in words if word not in ("--json", "--simulate")]
    unknown = [word for word in words if word.startswith("--")]
    if unknown:
        raise BirlError(f"{unknown[0]}: `birl plan --simulate` has --measured FILE and --json")
    command.run(words, measured=measured, as_json=as_json)
    return 0


def _cluster(words: list[str]) -> int:
    from birl.planning import command

    words = [word for word in words if word != "--cluster"]
    as_json, words = "--json" in words, [word for word in words if word != "--json"]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise BirlError(f"{unknown[0]}: `birl plan --cluster` has --json")
    command.run(words, as_json=as_json)
    return 0


def _configured(command: str, words: list[str]) -> int:
    """Training, `eval` and `serve`: words are flags, YAML files and key=value."""
    from birl.config.load import load_with_choices, to_yaml

    schema = _schema(command)
    flags, overrides = _split_flags(command, words)
    if "--help" in flags:
        _help(command, schema, overrides)
        return 0
    if "--multirun" in flags:
        return _multirun(command, schema, overrides, flags)
    config: Any
    config, choices = load_with_choices(schema, overrides)
    if "--print-config" in flags:
        print("# presets: " + " ".join(f"{group}={name}" for group, name in choices.items()))
        print(to_yaml(config), end="")
    elif "--validate" in flags:
        return _load("birl.loops.validate").run(config)
    elif command == "eval":
        _load("birl.loops.evaluation").run(config)
    elif command == "serve":
        _load("birl.loops.serve").run(config)
    else:
        loop = _load(f"birl.loops.{command}")
        config, choices = _over_ranks(schema, overrides, config, choices)
        if _ranks().leads():
            loop.train(config, choices, dry_run="--dry-run" in flags)
        else:
            loop.follow(config)
    return 0


def _schema(command: str) -> type[Any]:
    from birl.config.schema import DPO, RL, RM, SFT, Eval, Serve

    return {"sft": SFT, "rm": RM, "dpo": DPO, "rl": RL, "eval": Eval, "serve": Serve}[command]


def _over_ranks(
    schema: type[Any], words: list[str], config: Any, choices: dict[str, str]
) -> tuple[Any, dict[str, str]]:
    """Where torchrun or another launcher has started several ranks, and the words do not say how to split the model
    over them: FSDP."""
    from birl.config.load import load_with_choices

    ranks = _ranks()
    ranks.end_with_torchrun()
    if ranks.started() > 1 and ranks.grid_of(config).size == 1:
        return load_with_choices(schema, [*words, f"parallel.fsdp={ranks.started()}"])
    return config, choices


def _ranks() -> Any:
    return import_module("birl.loops.ranks")


def _load(name: str) -> Any:
    """A module that takes seconds to import. Ctrl-C meanwhile is one, whatever a library that is being imported makes
    of it: transformers turns it into a ModuleNotFoundError."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = ours and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        return import_module(name)
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        if ours:  # asyncio looks for this very handler
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _split_flags(command: str, words: list[str]) -> tuple[set[str], list[str]]:
    words = [SHORT_FLAGS.get(word, word) for word in words]
    flags = {word for word in words if word in FLAGS}
    if "--dry-run" in flags and command not in TRAINING:
        raise BirlError(f"--dry-run belongs to training; `birl {command}` has {', '.join(set(FLAGS) - {'--dry-run'})}")
    if "--validate" in flags and command != "eval":
        raise BirlError(f"--validate belongs to `birl eval`, which plays the right answers; `birl {command}` has none")
    if "--multirun" in flags and command == "serve":
        raise BirlError("--multirun runs one job after another, and a server does not end; start one for each")
    for word in words:
        if word.startswith("--") and "=" not in word and word not in FLAGS:
            from birl.config.load import nearest_keys
            from birl.config.words import did_you_mean

            keys = nearest_keys(word.lstrip("-"), _schema(command))
            near = f" Did you mean {keys[0]}=...?" if keys else did_you_mean(word, FLAGS)
            raise BirlError(
                f"{word}: there is no such flag ({', '.join(FLAGS)}); keys are written key=value, without dashes.{near}"
            )
    return flags, [word for word in words if word not in FLAGS]


def _help(command: str, schema: type, words: list[str]) -> None:
    from birl.config.help import Own, render

    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    only = tuple(word.partition("=")[0] for word in words if not word.endswith((".yaml", ".yml")))
    kinds = [word.partition("=")[2] for word in words if word.startswith(("env=", "env.kind="))]
    own = None
    if command in ("rl", "eval") and kinds and kinds[-1]:
        from birl.envs.open import own_section

        own = Own(kind=kinds[-1], section=own_section(kinds[-1]))
    print(render(command, schema, shutil.get_terminal_size((100, 24)).columns, only, bold, own))


def _multirun(command: str, schema: type[Any], overrides: list[str], flags: set[str]) -> int:
    """One process per combination, one after the other. All configurations are checked before the first starts."""
    from birl.config.load import load_with_choices, run_folder, to_yaml
    from birl.config.sweep import job_names, swept_keys
    from birl.config.sweep import sweep as combinations
    from birl.jobs import Jobs

    swept, jobs, errors, configs = swept_keys(overrides), combinations(overrides), [], []
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
        jobs = [
            [*job, f"run={folder}/{name}" if name else f"run={folder}"] for job, name in zip(jobs, names, strict=True)
        ]
    elif command == "eval" and configs[0][0].output and "output" not in swept:
        output = Path(configs[0][0].output)
        jobs = [
            [*job, f"output={output.with_suffix('')}/{name or 'result'}.json"]
            for job, name in zip(jobs, names, strict=True)
        ]
    if "--print-config" in flags:
        for job in jobs:
            print(f"--- # {' '.join(job)}\n{to_yaml(load_with_choices(schema, job)[0])}", end="")
        return 0
    return Jobs().run([[command, *job, *sorted(flags - {"--multirun"})] for job in jobs], names)
