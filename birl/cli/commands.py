"""All commands: line in `birl --help`, function that runs it, and words for completion."""

from dataclasses import dataclass

from birl import __version__

TRAINING = ("sft", "rm", "dpo", "rl")
CONFIGURED = (*TRAINING, "eval", "serve", "tinker")  # take flags, YAML files and key=value (configured.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`run`: "module:function" of words -> exit code, imported on use; empty for the configured ones. Its help is in
    usage.py, or the module's USAGE. `offered`: further words for completion, beside keys and folders.

    Example: Command(name="ledger", brief="what became of every token", run="birl.rollout.ledger:run")
    """

    name: str
    brief: str
    run: str = ""
    offered: tuple[str, ...] = ()


ALL = (
    Command(name="sft", brief="train a model on texts"),
    Command(name="rm", brief="train a reward model on pairs of answers"),
    Command(name="dpo", brief="train a model on pairs of answers"),
    Command(name="rl", brief="train a model by reinforcement learning"),
    Command(
        name="eval",
        brief="evaluate a model; --validate: check reference answers; --judge: compare judges with people",
    ),
    Command(name="serve", brief="serve a model over HTTP: OpenAI, Anthropic and native APIs"),
    Command(name="tinker", brief="training service for Tinker clients: many tenants, one base model"),
    Command(
        name="launch",
        brief="start a training in the background: on this machine, a cluster or a cloud",
        run="birl.launch.command:run",
    ),
    Command(name="status", brief="processes of a launched training", run="birl.launch.command:status"),
    Command(
        name="logs",
        brief="output of its processes",
        run="birl.launch.command:logs",
        offered=("--follow", "--trust", "--help"),
    ),
    Command(name="stop", brief="save a checkpoint and end it", run="birl.launch.command:stop"),
    Command(name="scale", brief="add or remove engines", run="birl.launch.command:scale"),
    Command(
        name="view", brief="live page of runs: curves, comparison, rollouts, timeline", run="birl.view.command:run"
    ),
    Command(name="rollouts", brief="search a run's rollouts, and export them", run="birl.view.search:run"),
    Command(
        name="trace",
        brief="time of a run by activity and by process; export for Chrome and Perfetto",
        run="birl.track.trace_command:run",
    ),
    Command(
        name="plan",
        brief="predict memory; --simulate: split GPUs into engines and learners; --cluster: choose a layout",
        run="birl.cli.plan:run",
        offered=("--memory", "--json", "--simulate", "--measured", "--cluster", "--help"),
    ),
    Command(
        name="reproduce",
        brief="run a recipe and compare its results with the expected ones",
        run="birl.recipes.command:run",
    ),
    Command(name="chat", brief="talk to a model or to a run", run="birl.cli.chat:run"),
    Command(
        name="runs",
        brief="list the runs of a folder: state, step, reward, best validation",
        run="birl.track.listing:run",
        offered=("--json", "--help"),
    ),
    Command(
        name="diff",
        brief="compare the keys and metrics of two runs",
        run="birl.track.listing:diff",
        offered=("--json", "--help"),
    ),
    Command(name="ledger", brief="what became of every sampled token of a run", run="birl.rollout.ledger:run"),
    Command(
        name="checkpoints",
        brief="list, verify, export and prune the checkpoints of a run",
        run="birl.cli.checkpoints:run",
        offered=("verify", "export", "export-adapter", "prune", "convert", "--help"),
    ),
    Command(
        name="cache",
        brief="list, verify and clear converted models",
        run="birl.models.gguf:run",
        offered=("list", "verify", "clear", "--all", "--help"),
    ),
    Command(
        name="doctor",
        brief="check the installation: devices, packages, and how to install what is missing",
        run="birl.doctor:run",
    ),
    Command(
        name="completion",
        brief="shell completion script for bash, zsh or fish",
        run="birl.cli.completing:run",
        offered=("bash", "zsh", "fish", "--help"),
    ),
)
BY_NAME = {command.name: command for command in ALL}

# Names of commands in other systems, and words that people try first.
ELSEWHERE = {
    "train": "rl", "rlhf": "rl", "rlvr": "rl", "drgrpo": "rl",
    "finetune": "sft", "fine_tune": "sft", "pretrain": "sft data.train_on=[all]", "lora": "sft lora.rank=16",
    "reward": "rm", "reward_model": "rm", "reward_modeling": "rm",
    "cpo": "dpo preference.loss=simpo", "cdpo": "dpo preference.label_smoothing=0.1", "preference": "dpo",
    "evaluate": "eval", "test": "eval", "validate": "eval --validate", "benchmark": "eval env=NAME",
    "generate": "chat", "infer": "chat", "inference": "chat", "run": "rl", "api": "serve", "server": "serve",
    "vllm_serve": "serve", "env": "doctor", "info": "doctor", "check": "doctor", "version": "--version",
    "export": "checkpoints RUN export", "merge": "checkpoints RUN export", "ls": "runs", "list": "runs",
    "ray": "launch ray", "slurm": "launch slurm", "modal": "launch modal", "torchrun": "launch torchrun",
    "dashboard": "view", "tensorboard": "view", "ui": "view", "compare": "diff", "kill": "stop", "tail": "logs",
}  # fmt: skip


def instead(word: str) -> str:
    """The command line to suggest for an unknown command: another system's name, an algorithm, or a preference loss."""
    from birl.config.keys import documentation, presets
    from birl.config.schema import DPO, RL

    name = word.lower().replace("-", "_")
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name in documentation(DPO)["preference.loss"].choices:
        return f"dpo preference.loss={name}"
    return f"rl algorithm={name}" if name in presets(RL)["algorithm"] else ""


HEAD = f"""\
birl {__version__}: reinforcement-learning post-training for language models

Usage: birl COMMAND [key=value ...] [--help]
"""
FOOT = """\
Start here
  birl doctor
  birl rl data.train=my.jsonl            # rows such as {"prompt": "What is 3 + 4?", "answer": "7"}
  birl rl --help                         # the most used keys; --help all shows every key
  birl rl --help lr                      # search the keys, also by another library's names
"""


def page() -> str:
    """The text of `birl --help`."""
    return "\n".join([HEAD, *(f"  {command.name:<12} {command.brief}" for command in ALL), "", FOOT])
