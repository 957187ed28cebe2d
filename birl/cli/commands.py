"""All commands: line in `birl --help`, function that runs it, and words for completion."""

from dataclasses import dataclass

from birl import __version__

TRAINING = ("sft", "rm", "dpo", "rl")
CONFIGURED = (*TRAINING, "eval", "serve", "tinker")  # take flags, YAML files and key=value (configured.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`run`: "module:function" of words -> exit code, imported on use; empty for the configured ones. Its help is in
    usage.py, or the module's USAGE. `offered`: further words for completion, beside keys and folders.

    Example: Command(name="ledger", brief="where every token went", run="birl.rollout.ledger:run")
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
        brief="measure a model on data; --validate: check reference answers; --judge: do judges agree with people?",
    ),
    Command(name="serve", brief="a model behind HTTP: OpenAI's dialect and birl's own"),
    Command(name="tinker", brief="training as a service, for Tinker's client: many tenants, one model"),
    Command(
        name="launch",
        brief="start a training somewhere else, or detached: this machine, a cluster, a cloud",
        run="birl.launch.command:run",
    ),
    Command(name="status", brief="the processes of a launched training", run="birl.launch.command:status"),
    Command(
        name="logs", brief="what they print", run="birl.launch.command:logs", offered=("--follow", "--trust", "--help")
    ),
    Command(name="stop", brief="let them save and end", run="birl.launch.command:stop"),
    Command(name="scale", brief="more engines, or fewer", run="birl.launch.command:scale"),
    Command(
        name="view", brief="runs as a live page: curves, comparison, rollouts, waiting", run="birl.view.command:run"
    ),
    Command(name="rollouts", brief="search a run's rollouts, and export them", run="birl.view.rollouts_command:run"),
    Command(
        name="trace",
        brief="where a run's time went, who waited for whom; for Chrome and Perfetto, too",
        run="birl.track.trace_command:run",
    ),
    Command(
        name="plan",
        brief="how much memory a training will take; --simulate: how to split GPUs; --cluster: which layout",
        run="birl.cli.plan:run",
        offered=("--memory", "--json", "--simulate", "--measured", "--cluster", "--help"),
    ),
    Command(
        name="reproduce",
        brief="run a recipe, and say whether it gave what it gave before",
        run="birl.recipes.command:run",
    ),
    Command(name="chat", brief="talk to a model or to a run", run="birl.cli.chat:run"),
    Command(
        name="runs",
        brief="the runs of a folder: state, step, reward, best validation",
        run="birl.track.listing:run",
        offered=("--json", "--help"),
    ),
    Command(
        name="diff",
        brief="two runs: the keys that differ, and what came out",
        run="birl.track.difference:run",
        offered=("--json", "--help"),
    ),
    Command(name="ledger", brief="where every token went that a run has sampled", run="birl.rollout.ledger:run"),
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
        name="doctor", brief="what is installed, which device, what is missing and how to get it", run="birl.doctor:run"
    ),
    Command(
        name="completion",
        brief="a script that completes all this in bash, zsh or fish",
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
  birl rl --help                         # the keys that people set; --help all shows every key
  birl rl --help lr                      # the keys that a word finds, also another library's word
"""


def page() -> str:
    """The text of `birl --help`."""
    return "\n".join([HEAD, *(f"  {command.name:<12} {command.brief}" for command in ALL), "", FOOT])
