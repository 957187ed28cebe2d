"""All commands: line in `birl --help`, function that runs it, words for completion, and `birl COMMAND --help` of those
whose module is slow to import or has several."""

from dataclasses import dataclass

from birl import __version__

TRAINING = ("sft", "rm", "dpo", "rl")
CONFIGURED = (*TRAINING, "eval", "serve", "tinker")  # take flags, YAML files and key=value (configured.py)


@dataclass(frozen=True, slots=True)
class Command:
    """`run`: "module:function" of words -> exit code, imported on use; empty for the configured ones. Its help is in
    `USAGE`, or the module's USAGE. `offered`: words for completion, beside keys, folders and the flags in `USAGE`.

    Example: Command("ledger", "what became of every token", "birl.rollout.ledger:run")
    """

    name: str
    brief: str
    run: str = ""
    offered: tuple[str, ...] = ()


ALL = (
    Command("sft", "train a model on texts"),
    Command("rm", "train a reward model on pairs of answers"),
    Command("dpo", "train a model on pairs of answers"),
    Command("rl", "train a model by reinforcement learning"),
    Command("eval", "evaluate a model; --validate: check reference answers; --judge: compare judges with people"),
    Command("serve", "serve a model over HTTP: OpenAI, Anthropic and native APIs"),
    Command("tinker", "training service for Tinker clients: many tenants, one base model"),
    Command(
        "launch", "start a training in the background: on this machine, a cluster or a cloud", "birl.launch.command:run"
    ),
    Command("status", "processes of a launched training", "birl.launch.command:status"),
    Command("logs", "output of its processes", "birl.launch.command:logs"),
    Command("stop", "save a checkpoint and end it", "birl.launch.command:stop"),
    Command("scale", "add or remove engines", "birl.launch.command:scale"),
    Command(
        "view",
        "live page of runs: curves, comparison, rollouts, timeline",
        "birl.view.command:run",
        ("--port", "--no-browser"),
    ),
    Command(
        "rollouts",
        "search a run's rollouts, and export them",
        "birl.view.search:run",
        ("--text", "--limit", "--export"),
    ),
    Command(
        "trace",
        "time of a run by activity and by process; export for Chrome and Perfetto",
        "birl.track.trace_command:run",
        ("--output",),
    ),
    Command(
        "plan",
        "predict memory; --simulate: split GPUs into engines and learners; --cluster: choose a layout",
        "birl.cli.plan:run",
    ),
    Command("reproduce", "run a recipe and compare its results with the expected ones", "birl.recipes.command:run"),
    Command("chat", "talk to a model or to a run", "birl.cli.chat:run"),
    Command("runs", "list the runs of a folder: state, step, reward, best validation", "birl.track.listing:run"),
    Command("diff", "compare the keys and metrics of two runs", "birl.track.listing:diff"),
    Command("ledger", "what became of every sampled token of a run", "birl.rollout.ledger:run"),
    Command(
        "checkpoints",
        "list, verify, export and prune the checkpoints of a run",
        "birl.cli.checkpoints:run",
        ("verify", "export", "export-adapter", "prune", "convert"),
    ),
    Command("cache", "list, verify and clear converted models", "birl.models.gguf:run", ("list", "verify", "clear")),
    Command(
        "doctor", "check the installation: devices, packages, and how to install what is missing", "birl.doctor:run"
    ),
    Command(
        "completion",
        "shell completion script for bash, zsh or fish",
        "birl.cli.completing:run",
        ("bash", "zsh", "fish"),
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


USAGE = {
    "status": """\
Usage: birl status RUN [--trust]

Lists the processes of a training that `birl launch` started; exits with 1 if one has failed. --trust: also accept a
launch.json of another account, which selects the cluster that is contacted.""",
    "logs": """\
Usage: birl logs RUN [ROLE] [--follow] [--trust]

Prints the output of a launched training's processes.""",
    "stop": """\
Usage: birl stop RUN [--trust]

Makes a launched training save a checkpoint and end.""",
    "scale": """\
Usage: birl scale RUN engines=+2 | engines=-1 | engines=4 [--trust]

Adds engines to a running launched training, or removes some. A new engine gets the current weights before
its first request; a removed one finishes its running requests.""",
    "plan": """\
Usage: birl plan [MODEL or RUN] [FILE.yaml] [key=value ...] [device=KIND] [--memory GIB] [--json]

Takes the arguments of `birl rl`, but reads neither weights nor data. Predicts the memory of generation and training,
and the largest micro-batch and batch that fit into --memory (default: the free memory), or on a GPU of that KIND.

       birl plan --simulate [RUN or FILE] [section.key=value ...] [--measured FILE] [--json]

Simulates splits of GPUs into engines and learners from the times of the parts, with the waits of each side.
Default: SmolLM2-135M on two CPU cores.

       birl plan --cluster [MODEL] [gpu=KIND] [gpus=N] [batch=TOKENS] [sequence=TOKENS] [key=value] [--json]

Lists the layouts ddp x fsdp x cp x tp x ep of a model that fit on a cluster, fastest first, from data sheets.
MODEL: a folder with config.json, a run, or a known name such as llama3-70b. KIND: a100-40,
a100-80, h100, h200, b200, gb200, l40s, a10g, rtx4090, t4.""",
    "reproduce": """\
Usage: birl reproduce                                        list the recipes
       birl reproduce NAME [--seed N] [--dry-run] [key=value ...]

Runs a recipe of recipes/ in runs/reproduce/NAME/seed-N and compares its results with NAME.expected.yaml.
Exits with 0 if all results are within the expected band, 1 if one is outside or there is no band. An interrupted
run resumes with the same command. --dry-run checks the configurations and prints the commands.""",
    "chat": """\
Usage: birl chat [MODEL or RUN] [key=value ...]

MODEL is a folder, a .gguf file, a hub id or smollm2 (default).""",
    "runs": """\
Usage: birl runs [FOLDER ...] [--json]

Lists the runs in runs/ or in FOLDER, newest first.

state   running; done; stopped (by a signal, after saving);
        failed (ended by an error, a kill or a power cut)
reward  reward of the last step
time    total time of all its processes""",
    "diff": """\
Usage: birl diff RUN RUN [--json]

Prints the configuration keys that differ, then the metrics side by side; `last` is the mean of the last ten steps.""",
    "ledger": """\
Usage: birl ledger RUN

Adds up RUN/ledger.jsonl: the use of every sampled token.
Exits with 1 if the sums differ or a token was trained twice.""",
    "checkpoints": """\
Usage: birl checkpoints RUN                       list
       birl checkpoints RUN verify [STEP]         compare every file with its digest; exits with 1 if one differs
       birl checkpoints RUN export STEP FOLDER [--shard-gb N]
                                                  write a Hugging Face model folder (STEP: number, last, best)
       birl checkpoints RUN export STEP FILE.gguf [--type f16|bf16|f32|q8_0]
                                                  write a file for llama.cpp
       birl checkpoints RUN export-adapter STEP FOLDER
                                                  for runs with lora.rank: only the adapter, in peft's format
       birl checkpoints RUN prune N               keep the newest N and the best
       birl checkpoints RUN convert               rewrite checkpoints of earlier versions, whose index is a pickle""",
    "cache": """\
Usage: birl cache [list]        list converted models and their sizes
       birl cache clear NAME    remove models whose name begins with NAME
       birl cache clear --all   remove all
       birl cache verify        find damaged models; exits with 1 if there is one""",
    "doctor": """\
Usage: birl doctor

Exits with 0 if `birl rl` can run here, else with 1.""",
}
